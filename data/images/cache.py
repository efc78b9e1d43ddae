"""--cache: the images of a data set in one packed file, smaller, so that later epochs read and decode little.

    spec = CacheSpec("jpeg", short_side=256)
    make_cache(paths, spec, folder, workers=8, note=print)     # on one process of a node, once
    ImageCache(folder).read(path).pixels()                     # in any process; all map the same file

An image whose shorter side is longer than `short_side` is resized to that. "raw" stores uint8 pixels, "jpeg" JPEGs of
quality 90. In `images` one follows the other; a row of `index` says where; `keys` are those of the paths, in the order
of the rows, ascending; `files` are the sha256 of the files. An image that could not be read, or is too long for a JPEG,
has no pixels there: it is read from its file.

Legend: N images, H, W height and width in pixels.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path

import numpy as np
import simplejpeg
from torch.utils.data import DataLoader

from data.images.augment import RESERVE, resized
from data.images.decode import LONGEST, WHITES, EncodedImage, PackedImage, UnreadableImage
from data.images.index import FolderIndex
from data.shards.shard import stat_of
from utils.array_folder import describe, digest_of, open_arrays
from utils.distributed.signals import end_worker_with
from utils.distributed.world import World
from utils.errors import Exit, UserError, counted
from utils.files import cache_path, make_folder
from utils.hardware.cores import available_cores

VERSION = 4
QUALITY = 90
CHUNK = 64  # images that a process packs at a time
STAMPED = 1000  # files that a thread asks about at a time
GB = 1e9
# the arrays of a folder. A row: begin and end in `images`, H and W as shown, H and W as stored
LAYOUT = {"index": ("i8", (6,)), "images": ("u1", ()), "keys": ("i8", ()), "files": ("u1", (32,))}


@dataclass(frozen=True)
class CacheSpec:
    """How images are stored."""

    encoding: str  # jpeg or raw
    short_side: int  # at most, in pixels
    interpolation: str = "bilinear"  # or bicubic: how a longer one is resized
    white: int = WHITES[-1]  # see EncodedImage


def open_cache(
    index: FolderIndex, spec: CacheSpec, splits: Sequence[str], world: World, note: Callable[[str], None]
) -> "ImageCache":
    """The packed images of `splits`, with files as they are now; packed if they are not yet. Collective.

    Raises UserError (74).
    """
    def make() -> str:
        every = [index.splits[name] for name in splits]
        paths = sorted({path for split in every for number in range(len(split)) for path in split.paths(number)})
        folder = cache_path() / f"packed-{digest_of(VERSION, asdict(spec), _digest(paths))}"
        make_cache(paths, spec, folder, available_cores(), note)
        if missing := ImageCache(folder).num_missing():
            note(f"--cache {spec.encoding}: {counted(missing, 'image')} could not be packed: their files will be read")
        return str(folder)

    folder = world.on_rank_zero(make, per_node=True)  # Collective.
    return world.everywhere(lambda: ImageCache(Path(folder)))  # Collective.


class ImageCache:
    """The packed images of a folder, mapped into memory. Raises UserError (74) if there are none."""

    def __init__(self, folder: Path):
        found = open_arrays(folder)
        if found is None:
            raise UserError(f"--cache: {folder} is missing or is damaged; remove it, and start again", Exit.IO)
        about, arrays = found
        self._spec = CacheSpec(**about["spec"])
        self._index, self._images, self._keys, self._files = (arrays[name] for name in LAYOUT)

    def num_missing(self) -> int:
        """How many images are not stored."""
        return int((self._index[:, 0] == self._index[:, 1]).sum())

    def read(self, path: str) -> EncodedImage:
        """The image of one of make_cache's paths. Raises UnreadableImage.

        If it could not be read when the others were packed, it is packed now: its pixels do not depend on that moment.
        """
        place = int(np.searchsorted(self._keys, key := _key(path)))
        if place == len(self._keys) or self._keys[place] != key:
            raise KeyError(f"{path} is not in the cache")
        begin, end, *sizes = self._index[place].tolist()
        data, file = self._images[begin:end], self._files[place].tobytes()
        if begin == end:
            packed, sizes, file = pack(path, self._spec)
            data = np.frombuffer(packed, np.uint8)
        if not len(data):  # it is too long
            return EncodedImage(path, self._spec.white)
        return PackedImage(data, sizes[:2], sizes[2:], self._spec.encoding == "raw", file)


def make_cache(paths: Sequence[str], spec: CacheSpec, folder: Path, workers: int, note: Callable[[str], None]) -> None:
    """Pack the images, unless `folder` is there: whole or not at all. One process works; others that call it wait.

    note: told what is done. Raises UserError (74) if it cannot be written.
    """
    def write(begun: Path) -> None:
        note(f"--cache {spec.encoding}: packing {counted(len(paths), 'image')} into {folder.parent}, once")
        keys, rows, end = np.array([_key(path) for path in paths]), np.zeros((len(paths), 6), np.int64), 0
        files = np.zeros((len(paths), 32), np.uint8)
        with (begun / "images").open("wb") as images:
            for number, (data, sizes, file) in enumerate(_packed(paths, spec, workers)):
                images.write(data)
                rows[number], files[number] = (end, end + len(data), *sizes), np.frombuffer(file, np.uint8)
                end += len(data)
                if 10 * number // len(paths) < 10 * (number + 1) // len(paths):  # another tenth
                    note(f"--cache {spec.encoding}: {number + 1} of {len(paths)} images, {end / GB:.3g} GB")
        order = keys.argsort()
        (begun / "index").write_bytes(rows[order])
        (begun / "keys").write_bytes(keys[order])
        (begun / "files").write_bytes(files[order])
        describe(begun, {"spec": asdict(spec)}, LAYOUT)

    try:
        make_folder(folder, write, open_arrays)
    except OSError as error:
        raise UserError(f"--cache {spec.encoding}: cannot write {folder}: {error.strerror or error};"
                        " $LOCKSTEP_CACHE names another folder", Exit.IO) from None


# pixels or JPEG; H, W as shown, stored H, W; the file's sha256
Packed = tuple[bytes, tuple[int, int, int, int], bytes]
NOTHING: Packed = b"", (0, 0, 0, 0), bytes(32)


def _packed(paths: Sequence[str], spec: CacheSpec, workers: int) -> Iterator[Packed]:
    """The images in their order; NOTHING for one that cannot be read."""
    def of_chunk(chunk: Sequence[str]) -> list[Packed]:
        found = []
        for path in chunk:
            try:
                found.append(pack(path, spec))
            except UnreadableImage:
                found.append(NOTHING)
        return found

    for found in DataLoader(paths, CHUNK, collate_fn=of_chunk, num_workers=workers, multiprocessing_context="fork",
                            worker_init_fn=partial(end_worker_with, os.getpid())):
        yield from found


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
        return pixels.tobytes(), (height, width, *target), image.sha256()
    if max(target) > LONGEST:
        return NOTHING
    return simplejpeg.encode_jpeg(pixels, QUALITY, colorsubsampling="420"), (height, width, *target), image.sha256()


def _digest(paths: Sequence[str]) -> str:
    """Of the path, size and time of each file. Threads, because a network file system takes a while to answer."""
    def of_some(first: int) -> str:
        found = []
        for path in paths[first:first + STAMPED]:
            found.append(path)
            with suppress(OSError):
                found.append(stat_of(path))
        return sha256(repr(found).encode()).hexdigest()

    with ThreadPoolExecutor(32) as pool:
        return digest_of(*pool.map(of_some, range(0, len(paths), STAMPED)))


def _key(path: str) -> int:
    return int.from_bytes(blake2b(os.fsencode(path), digest_size=8).digest(), signed=True)
