"""`python -m benchmarks.input`: training images per second and core, from the file to the model's square.

Ours, from files and from both kinds of --cache, beside torchvision's reference pipeline and timm's, on the same JPEGs:
500 x 375 (ImageNet's usual size) and 4000 x 3000 (a phone's). One thread; the files are in the disk's cache.

Floors: libjpeg-turbo alone, with which all of the above decode, to all pixels, as the others do; our own reading and
decoding alone, at the size and as far down as the random boxes need, of these files and of the JPEGs of --cache; and
the former with torch's resizing of as many pixels as a box has, which nobody cut out.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import simplejpeg
import timm.data
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision import transforms

from benchmarks.in_turn import in_turn, report
from benchmarks.made_images import photo
from data.images.augment import PhotoTrain, random_box
from data.images.cache import CacheSpec, ImageCache, make_cache
from data.images.decode import EncodedImage
from utils.numerics.seed import seeded

SIDE = 224  # px
SIZES = {"500 x 375": (500, 375, 128), "4000 x 3000": (4000, 3000, 12)}  # width, height, images of a turn
_PIXELS = torch.zeros(3 * 2048**2, dtype=torch.uint8)  # more than a box has after a reduced decode
LEAST_S = 0.5  # of a turn
REFERENCE = "torchvision's reference"


def main(rounds: int, folder: Path | None) -> None:
    """Measure and report. folder: of JPEGs; None makes some."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        for name, (width, height, count) in SIZES.items() if folder is None else ():
            compare(name, write_photos(Path(temporary) / name, width, height, count), Path(temporary), rounds)
        if folder:
            compare(folder.name, sorted(map(str, folder.rglob("*.jp*g"))), Path(temporary), rounds)


def compare(what: str, paths: Sequence[str], temporary: Path, rounds: int) -> None:
    """Report images/s of each pipeline over the same files, in the same order."""
    ours, sources = PhotoTrain(SIDE), {"ours": EncodedImage}
    for encoding in ("jpeg", "raw"):
        spec, folder = CacheSpec(encoding, 256), temporary / f"{what} {encoding}"
        make_cache(paths, spec, folder, 1, lambda text: None)
        sources[f"ours, --cache {encoding}"] = ImageCache(folder).read
    # references/classification: RandomResizedCrop and flip, then PILToTensor (uint8 to the device, as ours)
    reference = transforms.Compose([
        transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    # timm.data.create_loader(use_prefetcher=True): the same, as a NumPy array
    of_timm = timm.data.create_transform(SIDE, is_training=True, use_prefetcher=True, color_jitter=None)

    def rate(load: Callable[[str], object]) -> Callable[[], float]:
        def measure() -> float:
            load(paths[0])  # its code and memory are in the caches from here on, whatever ran before
            began, count = time.perf_counter(), 0
            while (taken_s := time.perf_counter() - began) < LEAST_S:
                with seeded(0):  # the same boxes in every round, for all
                    for path in paths:
                        load(path)
                count += len(paths)
            return count / taken_s
        return measure

    report(f"input, {what}", "images/s and core", in_turn({
        REFERENCE: rate(lambda path: reference(Image.open(path).convert("RGB"))),
        "timm": rate(lambda path: of_timm(Image.open(path).convert("RGB"))),
        **{name: rate(lambda path, read=read: ours(read(path))) for name, read in sources.items()},
        "floor: decoding all pixels": rate(lambda path: simplejpeg.decode_jpeg(Path(path).read_bytes())),
        "floor: decoding for the boxes": rate(lambda path: decode(EncodedImage(path))),
        "floor: decoding and resizing them": rate(lambda path: resize(*decode(EncodedImage(path)))),
        "floor: decoding --cache jpeg for them": rate(lambda path: decode(sources["ours, --cache jpeg"](path))),
        "floor: resizing --cache raw for them": rate(
            lambda path: resize(*decode(sources["ours, --cache raw"](path)))),
    }, rounds), REFERENCE)


def decode(image: EncodedImage) -> tuple[int, int]:
    """What PhotoTrain does before it resizes. Returns height and width of the box in the decoded pixels."""
    box = random_box(image.height, image.width)
    pixels = image.pixels(max(SIDE / box[2], SIDE / box[3]))
    torch.rand(1)  # as its flip does: the same boxes follow
    scale = pixels.shape[0] / image.height
    return max(1, round(scale * box[2])), max(1, round(scale * box[3]))


def resize(height: int, width: int) -> None:
    """Resize as PhotoTrain does, from memory that has the right order already."""
    pixels = _PIXELS[:height * width * 3].view(1, height, width, 3).permute(0, 3, 1, 2)  # [1, 3, H, W]
    F.interpolate(pixels, size=(SIDE, SIDE), mode="bilinear", antialias=True)


def write_photos(folder: Path, width: int, height: int, count: int) -> list[str]:
    """JPEGs of noise; their paths."""
    folder.mkdir()
    for number in range(count):
        photo(number, width, height).save(folder / f"{number:03}.jpg", quality=90)
    return sorted(map(str, folder.iterdir()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.input")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="JPEGs of yours instead of made ones")
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.folder)
