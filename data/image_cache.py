"""--cache: the images of a data set in one packed file, smaller, so that later epochs read and decode little.

    spec = CacheSpec("jpeg", short_side=256)
    make_cache(paths, spec, folder, workers=8, note=print)     # on one process of a node, once
    ImageCache(folder).read(path).pixels()                     # in any process; all map the same file

An image whose shorter side is longer than `short_side` is resized to that. "raw" stores uint8 pixels, "jpeg" JPEGs of
quality 90. In `images` one follows the other; a row of `index` says where; `order` has the rows by the keys of their
paths. The index grows after the images, so what a kill leaves is continued. An image that cannot be read has the reason
in the place of its pixels.

Legend: N images, H, W height and width in pixels.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np
import simplejpeg
from torch.utils.data import DataLoader

from data.augment import RESERVE, resized
from data.image_decode import EncodedImage, PackedImage, UnreadableImage
from data.image_index import FolderIndex
from utils.array_folder import describe, digest_of, open_arrays
from utils.distributed.signals import end_with_parent
from utils.distributed.world import World
from utils.errors import Exit, UserError, counted
from utils.files import cache_path, one_at_a_time, sync
from utils.hardware.cores import available_cores

VERSION = 1
QUALITY = 90
CHUNK = 64  # images that a process packs at a time
TRIED = 64  # images that tell how much room is needed
GB = 1e9
# A row of the index, int64: begin and end in `images`; H and W as shown, and as stored (0: it cannot be read); what the
# file was: the key of its path, its size in bytes, and its st_mtime_ns (-1 if there was no file).
COLUMNS = 9
STAMP = slice(6, 9)


@dataclass(frozen=True)
class CacheSpec:
    """How images are stored."""

    encoding: str  # jpeg or raw
    short_side: int  # at most, in pixels


def open_cache(
    index: FolderIndex, spec: CacheSpec, split: str, world: World, note: Callable[[str], None]
) -> "ImageCache":
    """The packed images of train and of the split that is evaluated; those that are missing are packed. Collective.

    Raises UserError (74).
    """
    splits = [index.splits[name] for name in sorted(index.splits) if (name == "test") == (split == "test")]
    about = VERSION, asdict(spec), splits[0].root, index.fingerprint, split == "test"
    folder = cache_path() / f"packed-{digest_of(*about)}"

    def make() -> None:
        paths = sorted({path for each in splits for number in range(len(each)) for path in each.paths(number)})
        make_cache(paths, spec, folder, available_cores(), note)

    world.on_rank_zero(make, per_node=True)  # Collective.
    return world.everywhere(lambda: ImageCache(folder))  # Collective.


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
        self._is_raw = about["encoding"] == "raw"

    def read(self, path: str) -> PackedImage:
        """The image of one of make_cache's paths. Raises UnreadableImage."""
        place = int(np.searchsorted(self._keys, key := _key(path)))
        if place == len(self._keys) or self._keys[place] != key:
            raise KeyError(f"{path} is not in the cache")
        begin, end, height, width, *stored, _, _, _ = self._rows[self._numbers[place]].tolist()
        data = self._images[begin:end]
        if not all(stored):
            raise UnreadableImage(data.tobytes().decode())
        return PackedImage(data, (height, width), stored, self._is_raw)


def make_cache(paths: Sequence[str], spec: CacheSpec, folder: Path, workers: int, note: Callable[[str], None]) -> None:
    """Pack the images, or go on where an earlier start was stopped; nothing if they are packed and have not changed.

    One process works; others that call it wait. note: told what is done. Raises UserError (74) if there is no room.
    """
    stamps = _stamps(paths)
    if _is_current(folder, stamps):
        return
    with one_at_a_time(folder):
        if _is_current(folder, stamps):  # another process packed them meanwhile
            return
        partial = folder.with_name(f".{folder.name}.partial")
        try:
            partial.mkdir(parents=True, exist_ok=True)
            _fill(partial, paths, stamps, spec, workers, note)
            order = stamps[:, 0].argsort()
            (partial / "order").write_bytes(np.column_stack([order, stamps[order, 0]]))
            layout = {"index": ("i8", (COLUMNS,)), "images": ("u1", ()), "order": ("i8", (2,))}
            describe(partial, asdict(spec), layout)
            for name in layout:
                sync(partial / name)
            shutil.rmtree(folder, ignore_errors=True)  # of images that have changed
            partial.rename(folder)
            sync(folder.parent)
        except OSError as error:
            raise UserError(f"--cache {spec.encoding}: cannot write {partial}: {error.strerror or error}; with more"
                            " room the same command goes on from there; $LOCKSTEP_CACHE names another folder",
                            Exit.IO) from None


def _fill(partial: Path, paths: Sequence[str], stamps: np.ndarray, spec: CacheSpec, workers: int,
          note: Callable[[str], None]) -> None:
    with (partial / "index").open("ab") as index, (partial / "images").open("ab") as images:
        done = _begun(index, images, stamps)
        if done == len(paths):
            return
        _require_room(partial, paths[done:], spec)
        note(f"--cache {spec.encoding}: packing {counted(len(paths) - done, 'image')} into {partial.parent}, once"
             + (f"; {done} are done" if done else ""))
        end, told = images.tell(), 10 * done // len(paths)
        for chunk in _packed(paths[done:], spec, workers):
            ends = end + np.cumsum([0, *(len(data) for data, _ in chunk)])
            rows = np.column_stack([ends[:-1], ends[1:], [sizes for _, sizes in chunk], stamps[done:done + len(chunk)]])
            _append(images, b"".join(data for data, _ in chunk))  # it reaches the disk before its rows
            _append(index, rows.astype(np.int64).tobytes())
            done, end = done + len(chunk), int(ends[-1])
            if 10 * done // len(paths) > told:
                told = 10 * done // len(paths)
                note(f"--cache {spec.encoding}: {done} of {len(paths)} images, {end / GB:.3g} GB")


def _begun(index: BinaryIO, images: BinaryIO, stamps: np.ndarray) -> int:
    """How many images an earlier start has packed that have not changed since; what follows them is cut off."""
    whole = Path(index.name).stat().st_size // (8 * COLUMNS)
    rows = np.fromfile(index.name, np.int64, whole * COLUMNS).reshape(-1, COLUMNS)[:len(stamps)]
    same = (rows[:, STAMP] == stamps[:len(rows)]).all(axis=1)
    done = len(rows) if same.all() else int(same.argmin())
    index.truncate(done * 8 * COLUMNS)
    images.truncate(int(rows[done - 1, 1]) if done else 0)
    for file in (index, images):
        file.seek(0, os.SEEK_END)
    return done


def _append(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _require_room(folder: Path, paths: Sequence[str], spec: CacheSpec) -> None:
    """Raise UserError (74) if what the images will take, judging by some of them, is not free."""
    tried = [len(pack(path, spec)[0]) for path in paths[::-(-len(paths) // TRIED)]]
    needed, free = len(paths) * (sum(tried) / len(tried) + 8 * COLUMNS), shutil.disk_usage(folder).free
    if needed > free:
        smaller = "--cache jpeg, " if spec.encoding == "raw" else ""
        raise UserError(f"--cache {spec.encoding}: {len(paths)} images take about {needed / GB:.3g} GB, and"
                        f" {folder.parent} has {free / GB:.3g} GB free; use {smaller}a smaller --cache-size, another"
                        " folder by $LOCKSTEP_CACHE, or no --cache", Exit.IO)


Packed = tuple[bytes, tuple[int, int, int, int]]  # pixels or JPEG or reason; H, W as shown, stored H, W


def pack(path: str, spec: CacheSpec) -> Packed:
    """An image as it is stored."""
    try:
        image = EncodedImage(path)
        height, width = image.height, image.width
        target = height, width
        if (short := min(target)) > spec.short_side:  # as CentreCrop resizes
            target = tuple(int(spec.short_side * side / short) for side in target)
            pixels = resized(image, (0, 0, height, width), target, "bilinear", RESERVE).numpy()
        else:
            pixels = image.pixels().contiguous().numpy()
    except UnreadableImage as error:
        return str(error).encode(), (0, 0, 0, 0)
    data = pixels.tobytes() if spec.encoding == "raw" else simplejpeg.encode_jpeg(
        pixels, QUALITY, colorsubsampling="420")
    return data, (height, width, *target)


def _packed(paths: Sequence[str], spec: CacheSpec, workers: int) -> Iterator[list[Packed]]:
    """Chunks in the order of `paths`, from as many processes."""
    yield from DataLoader(
        _Chunks(paths, spec), batch_size=None, sampler=range(-(-len(paths) // CHUNK)), num_workers=workers,
        multiprocessing_context="fork", worker_init_fn=lambda worker: end_with_parent(signal.SIGKILL))


class _Chunks:
    def __init__(self, paths: Sequence[str], spec: CacheSpec):
        self._paths, self._spec = paths, spec

    def __getitem__(self, number: int) -> list[Packed]:
        return [pack(path, self._spec) for path in self._paths[number * CHUNK:(number + 1) * CHUNK]]


def _stamps(paths: Sequence[str]) -> np.ndarray:
    """[N, 3] key, size and time of each file. Threads, because a network file system takes a while to answer."""
    def read(first: int) -> list[tuple[int, int, int]]:
        return [_stamp(path) for path in paths[first:first + 1000]]

    with ThreadPoolExecutor(32) as pool:
        found = [stamp for some in pool.map(read, range(0, len(paths), 1000)) for stamp in some]
    return np.array(found, np.int64)


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
        return _key(path), found.st_size, found.st_mtime_ns
    except OSError:
        return _key(path), -1, -1


def _is_current(folder: Path, stamps: np.ndarray) -> bool:
    """Whether the folder holds these images as they are."""
    found = open_arrays(folder)
    return found is not None and np.array_equal(found[1]["index"][:, STAMP], stamps)


def _key(path: str) -> int:
    return int.from_bytes(blake2b(os.fsencode(path), digest_size=8).digest(), signed=True)
