"""--cache: the images of a data set in one packed file, smaller, so that later epochs read and decode little.

    spec = CacheSpec("jpeg", short_side=256)
    make_cache(paths, spec, folder, workers=8, note=print)     # on one process of a node, once
    ImageCache(folder).read(path).pixels()                     # in any process; all map the same file

An image whose shorter side is longer than `short_side` is resized to that. "raw" stores uint8 pixels, "jpeg" JPEGs of
quality 90. In `images` one follows the other; a row of `index` says where; `order` has the rows by the keys of their
paths. The index grows after the images, so what a kill leaves is continued. An image that could not be read, or is too
long for a JPEG, has no pixels there: it is read from its file.

Legend: N images, H, W height and width in pixels.
"""

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np
import simplejpeg
from torch.utils.data import DataLoader

from data.images.augment import RESERVE, resized
from data.images.decode import LONGEST, WHITES, EncodedImage, PackedImage, UnreadableImage
from data.images.index import FolderIndex
from utils.array_folder import describe, digest_of, open_arrays
from utils.distributed.signals import end_worker_with
from utils.distributed.world import World
from utils.errors import Exit, UserError, counted
from utils.files import cache_path, locked, make_folder, see_listed, sync
from utils.hardware.cores import available_cores

VERSION = 2
QUALITY = 90
CHUNK = 64  # images that a process packs at a time
TRIED = 64  # images that tell how much room is needed
GB = 1e9
# A row of the index, int64: begin and end in `images`; H and W as shown, and as stored (0: not stored); the key of the
# file's path.
COLUMNS, STORED = 7, 4


@dataclass(frozen=True)
class CacheSpec:
    """How images are stored."""

    encoding: str  # jpeg or raw
    short_side: int  # at most, in pixels
    interpolation: str = "bilinear"  # or bicubic: how a longer one is resized
    white: int = WHITES[-1]  # see EncodedImage


def open_cache(
    index: FolderIndex, spec: CacheSpec, choices: Sequence[Sequence[str]], world: World, note: Callable[[str], None]
) -> "ImageCache":
    """The packed images of the first of `choices` that is packed, with files as they are now. Collective.

    choices: names of splits each. If none is packed, the last one is. Raises UserError (74).
    """
    def make() -> str:
        for splits in choices:
            every = (index.splits[name] for name in splits)
            paths = sorted({path for split in every for number in range(len(split)) for path in split.paths(number)})
            # Without `white`, where it is that of earlier versions: their caches are still used.
            how = {name: value for name, value in asdict(spec).items() if (name, value) != ("white", WHITES[-1])}
            folder = cache_path() / f"packed-{digest_of(VERSION, how, _digest(paths))}"
            if open_arrays(folder):
                break
        make_cache(paths, spec, folder, available_cores(), note)
        if missing := ImageCache(folder).num_missing():
            note(f"--cache {spec.encoding}: {counted(missing, 'image')} could not be packed, and will be read from the"
                 " file each time")
        return str(folder)

    folder = world.on_rank_zero(make, per_node=True)  # Collective.
    return world.everywhere(lambda: ImageCache(Path(folder)))  # Collective.


class ImageCache:
    """The packed images of a folder, mapped into memory. Raises UserError (74) if there are none."""

    def __init__(self, folder: Path):
        found = open_arrays(folder)
        if found is None:
            raise UserError(f"--cache: {folder} is not there, or is damaged; remove it, and the next start makes it"
                            " anew", Exit.IO)
        about, arrays = found
        self._rows, self._images, order = (arrays[name] for name in ("index", "images", "order"))
        self._numbers, self._keys = order.T  # of rows, and what they are sorted by
        self._spec = CacheSpec(**{each.name: about[each.name] for each in fields(CacheSpec) if each.name in about})

    def num_missing(self) -> int:
        """How many images are not stored."""
        return int((self._rows[:, STORED] == 0).sum())

    def read(self, path: str) -> EncodedImage:
        """The image of one of make_cache's paths. Raises UnreadableImage.

        If it could not be read when the others were packed, it is packed now: its pixels do not depend on that moment.
        """
        place = int(np.searchsorted(self._keys, key := _key(path)))
        if place == len(self._keys) or self._keys[place] != key:
            raise KeyError(f"{path} is not in the cache")
        begin, end, height, width, *stored, _ = self._rows[self._numbers[place]].tolist()
        data = self._images[begin:end]
        if not all(stored):
            packed, (height, width, *stored) = pack(path, self._spec)
            data = np.frombuffer(packed, np.uint8)
        if not all(stored):  # it is too long
            return EncodedImage(path, self._spec.white)
        return PackedImage(data, (height, width), stored, self._spec.encoding == "raw")


def make_cache(paths: Sequence[str], spec: CacheSpec, folder: Path, workers: int, note: Callable[[str], None]) -> None:
    """Pack the images, or go on where an earlier start was stopped; nothing if `folder` is there.

    One process works; others that call it wait. note: told what is done. Raises UserError (74) if it cannot be written.
    """
    if open_arrays(folder):
        return
    begun, is_alone = folder.with_name(f".{folder.name}.partial"), False
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        waits = f"--cache {spec.encoding}: waiting for another process, which packs into {folder.parent}"
        with locked(folder.with_name(f".{folder.name}.lock"), lambda: note(waits)) as is_alone:
            if not is_alone:  # this file system has no locks: what is begun is not gone on with
                make_folder(folder, lambda partial: _write(partial, paths, spec, workers, note), open_arrays)
                return
            see_listed(folder)
            if open_arrays(folder):  # another process packed them meanwhile
                return
            begun.mkdir(exist_ok=True)
            _write(begun, paths, spec, workers, note)
            if not open_arrays(folder):  # else another was first, without locks: it may be mapped already
                shutil.rmtree(folder, ignore_errors=True)  # damaged
                begun.rename(folder)
                sync(folder.parent)
    except OSError as error:
        if open_arrays(folder):  # as above, a moment later
            return
        is_full = is_alone and error.errno in (errno.ENOSPC, errno.EDQUOT) and begun.exists()
        more = "; with more room the same command goes on from there" if is_full else ""
        raise UserError(f"--cache {spec.encoding}: cannot write {folder}: {error.strerror or error}{more};"
                        " $LOCKSTEP_CACHE names another folder", Exit.IO) from None


def _write(partial: Path, paths: Sequence[str], spec: CacheSpec, workers: int, note: Callable[[str], None]) -> None:
    keys = np.array([_key(path) for path in paths])
    _fill(partial, paths, keys, spec, workers, note)
    rows = np.fromfile(partial / "index", np.int64).reshape(-1, COLUMNS)
    if not np.array_equal(rows[:, -1], keys) or rows[-1, 1] != (partial / "images").stat().st_size:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"--cache {spec.encoding}: another node wrote to {partial}, too: the locks of this file system"
                        " do not reach it; give each node a $LOCKSTEP_CACHE of its own", Exit.IO)
    order = keys.argsort()
    (partial / "order").write_bytes(np.column_stack([order, keys[order]]))
    layout = {"index": ("i8", (COLUMNS,)), "images": ("u1", ()), "order": ("i8", (2,))}
    describe(partial, asdict(spec), layout)
    for name in layout:
        sync(partial / name)


def _fill(folder: Path, paths: Sequence[str], keys: np.ndarray, spec: CacheSpec, workers: int,
          note: Callable[[str], None]) -> None:
    with (folder / "index").open("ab") as index, (folder / "images").open("ab") as images:
        # what an earlier start has packed; what follows is cut off
        done = Path(index.name).stat().st_size // (8 * COLUMNS)
        end = int(np.fromfile(index.name, np.int64, done * COLUMNS)[1::COLUMNS].max(initial=0))
        index.truncate(8 * COLUMNS * done)
        images.truncate(end)
        if done >= len(paths):  # more only if two wrote at once, which _write refuses
            return

        # the rest
        _require_room(folder, paths[done:], spec)
        note(f"--cache {spec.encoding}: packing {counted(len(paths) - done, 'image')} into {folder.parent}, once"
             + (f"; {done} are done" if done else ""))
        told = 10 * done // len(paths)
        for chunk in DataLoader(
                paths[done:], CHUNK, collate_fn=lambda chunk: [_packed_or_nothing(path, spec) for path in chunk],
                num_workers=workers, multiprocessing_context="fork",
                worker_init_fn=partial(end_worker_with, os.getpid())):
            ends = end + np.cumsum([0, *(len(data) for data, _ in chunk)])
            rows = np.column_stack([ends[:-1], ends[1:], [sizes for _, sizes in chunk], keys[done:done + len(chunk)]])
            _append(images, b"".join(data for data, _ in chunk))  # it reaches the disk before its rows
            _append(index, rows.astype(np.int64).tobytes())
            done, end = done + len(chunk), int(ends[-1])
            if 10 * done // len(paths) > told:
                told = 10 * done // len(paths)
                note(f"--cache {spec.encoding}: {done} of {len(paths)} images, {end / GB:.3g} GB")


def _append(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _require_room(folder: Path, paths: Sequence[str], spec: CacheSpec) -> None:
    """Raise UserError (74) if what the images will take, judging by some of them, is not free."""
    tried = [len(_packed_or_nothing(path, spec)[0]) for path in paths[::-(-len(paths) // TRIED)]]
    needed, free = len(paths) * (sum(tried) / len(tried) + 8 * COLUMNS), shutil.disk_usage(folder).free
    if needed > free:
        smaller = "--cache jpeg, " if spec.encoding == "raw" else ""
        raise UserError(f"--cache {spec.encoding}: {len(paths)} images take about {needed / GB:.3g} GB, and"
                        f" {folder.parent} has {free / GB:.3g} GB free; use {smaller}another"
                        " folder by $LOCKSTEP_CACHE, or no --cache; or remove what no run uses there (packed-*,"
                        " .packed-*)", Exit.IO)


Packed = tuple[bytes, tuple[int, int, int, int]]  # pixels or JPEG; H, W as shown, stored H, W
NOTHING: Packed = b"", (0, 0, 0, 0)


def pack(path: str, spec: CacheSpec) -> Packed:
    """An image as it is stored; NOTHING if it is too long. Raises UnreadableImage."""
    image = EncodedImage(path, spec.white)
    height, width = target = image.height, image.width
    if (short := min(target)) > spec.short_side:  # as CentreCrop resizes
        target = tuple(int(spec.short_side * side / short) for side in target)
        pixels = resized(image, (0, 0, height, width), target, spec.interpolation, RESERVE).numpy()
    else:
        pixels = image.pixels().contiguous().numpy()
    if spec.encoding == "raw":
        return pixels.tobytes(), (height, width, *target)
    if max(target) > LONGEST:
        return NOTHING
    return simplejpeg.encode_jpeg(pixels, QUALITY, colorsubsampling="420"), (height, width, *target)


def _packed_or_nothing(path: str, spec: CacheSpec) -> Packed:
    try:
        return pack(path, spec)
    except UnreadableImage:
        return NOTHING


def _digest(paths: Sequence[str]) -> str:
    """Of the path, size and time of each file. Threads, because a network file system takes a while to answer."""
    def stamps(first: int) -> list[tuple[str, int, int]]:
        return [(path, *_stamp(path)) for path in paths[first:first + 1000]]

    with ThreadPoolExecutor(32) as pool:
        digest = sha256()
        for some in pool.map(stamps, range(0, len(paths), 1000)):
            digest.update(os.fsencode(repr(some)))
    return digest.hexdigest()


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns
    except OSError:
        return -1, -1


def _key(path: str) -> int:
    return int.from_bytes(blake2b(os.fsencode(path), digest_size=8).digest(), signed=True)
