import fcntl
import io
import os
import pickle
import random
import re
import select
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, ImageOps
from torchvision.datasets import ImageFolder as TorchvisionFolder

from data.image_decode import EncodedImage, UnreadableImage
from data.image_folder import ImageFolder
from data.image_index import build_index
from data.splits import ValSplit
from tests.conftest import ROOT
from utils.errors import Exit, UserError

torch.set_num_threads(1)


def write_images(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / name, "PNG")
    return root


def paths(index) -> list[str]:
    return [index.path(i) for i in range(len(index))]


@pytest.fixture
def index_of(tmp_path):
    return lambda root, fraction=0.1, seed=0: build_index(str(root), ValSplit(fraction, seed), tmp_path / "cache")


@pytest.fixture
def tree(tmp_path):
    names = ("b/x.png", "b/X.JPG", "b/deep/er/1.png", "b/deep-er/0.png", "a b/ü.png", "a b/2.gif", "C/10.png",
             "C/9.webp")
    return write_images(tmp_path / "tree", *(f"{split}/{name}" for split in ("train", "val") for name in names))


def encoded(image: Image.Image, format: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def photo(height: int, width: int) -> Image.Image:
    """A smooth picture with an asymmetric pattern, so that turned or shifted pixels show."""
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x * 255 / width, y * 255 / height, (x + 2 * y) % 97], axis=2).astype(np.uint8))


def test_classes_labels_and_order_are_those_of_torchvision(tree, index_of):
    index = index_of(tree)
    (tree / "train/C/9.webp").touch()
    for split in ("train", "val"):
        # torchvision does not know .gif
        theirs = TorchvisionFolder(str(tree / split), is_valid_file=lambda path: True)
        assert list(index.classes) == theirs.classes
        assert list(zip(paths(index.splits[split]), index.splits[split].labels.tolist(), strict=True)) == theirs.samples


def test_names_that_are_not_utf8_are_found_again(tmp_path, index_of):
    root = write_images(tmp_path / "d", "train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png")
    odd = os.fsencode(root / "train/a/") + b"/\xff.png"
    os.rename(root / "train/a/1.png", odd)
    for _ in range(2):  # scanned, then cached
        assert os.fsencode(index_of(root).splits["train"].path(0)) == os.fsencode(root) + b"/train/a/\xff.png"


def test_index_is_pickled_whole(tree, index_of):
    index = index_of(tree).splits["train"]
    assert paths(pickle.loads(pickle.dumps(index))) == paths(index)


def test_second_start_reads_the_cache(tree, index_of, monkeypatch):
    first = index_of(tree)
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail("scanned again"))
    second = index_of(tree)
    assert (second.classes, second.fingerprint, second.notes) == (first.classes, first.fingerprint, first.notes)
    assert {name: paths(split) for name, split in second.splits.items()} == {name: paths(split) for name,
                                                                             split in first.splits.items()}


@pytest.mark.parametrize("name", ["train/b/deep/er/2.png", "val/C/new.png", "train/C/new/folder/1.png"])
def test_added_file_makes_the_cache_outdated(tree, index_of, name):
    before = index_of(tree)
    time.sleep(0.02)  # a directory's time advances in steps of up to 10 ms
    write_images(tree, name)
    after = index_of(tree)
    assert str(tree / name) in paths(after.splits[name.split("/")[0]])
    assert after.fingerprint != before.fingerprint


def damages(good: bytes, is_checked: bool):
    """Shorter and longer content; with a checksum, changed content too."""
    for position in range(0, len(good), max(1, len(good) // 7)):
        yield good[:position]
        if is_checked:
            yield good[:position] + bytes([good[position] ^ 0xFF]) + good[position + 1:]
    yield good + b"\0"


def test_damaged_cache_is_rebuilt(tmp_path, index_of):
    root = write_images(tmp_path / "d", *(f"train/{name}/{i}.png" for name in "ab" for i in range(4)))
    expected = {split: paths(table) for split, table in index_of(root).splits.items()}
    files = {file: file.read_bytes() for file in (tmp_path / "cache").rglob("*") if file.is_file()}
    assert len(files) == 1 + 4 + 5  # directories and their times; names, spans, labels; spans and labels of two splits
    for file, good in files.items():
        for bad in damages(good, is_checked=file.suffix == ".json"):
            file.write_bytes(bad)
            assert {split: paths(table) for split, table in index_of(root).splits.items()} == expected
            assert {file: file.read_bytes() for file in (tmp_path / "cache").rglob("*") if file.is_file()} == files


def test_arrays_are_mapped_with_and_without_a_val_folder(tree, tmp_path, index_of):
    flat = write_images(tmp_path / "flat", *(f"train/{name}/{i}.png" for name in "ab" for i in range(4)))
    for _ in range(2):  # scanned, then cached
        tables = [table for root in (tree, flat) for table in index_of(root).splits.values()]
        assert {type(array) for table in tables for array in (table.names, table.spans, table.labels)} == {np.memmap}


def test_nodes_with_data_of_their_own_under_one_path_do_not_overwrite(tree, tmp_path, index_of):
    other = write_images(tmp_path / "other", *(f"{split}/{name}/1.png" for split in ("train", "val") for name in "ab"))
    os.utime(other, ns=(0, 0))  # here both are made within the same tick of the clock, perhaps
    written = []
    for _ in range(2):
        for node, number in ((tree, 8), (other, 2)):
            node.rename(tmp_path / "local")
            assert len(index_of(tmp_path / "local").splits["train"]) == number
            (tmp_path / "local").rename(node)
        written.append({file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")})
    assert written[0] == written[1]


def test_copies_of_the_data_on_several_nodes_share_one_index(tree, tmp_path, index_of):
    shutil.copytree(tree, tmp_path / "copy")
    index_of(tree), index_of(tmp_path / "copy")
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]) == 1
    assert paths(index_of(tmp_path / "copy").splits["val"])[0].startswith(f"{tmp_path}/copy/")


def test_one_process_scans_while_another_waits_and_finds_the_index(tree, tmp_path, index_of):
    index_of(tree)
    (file,) = (tmp_path / "cache").glob("*.json")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    program = ("import os, sys\nfrom pathlib import Path\nfrom data.image_index import build_index\nfrom data.splits"
               " import ValSplit\n"
               "os.scandir = lambda path: sys.exit('scanned too')\n"
               "print(len(build_index(sys.argv[1], ValSplit(0.1, 0), Path(sys.argv[2])).splits['train']))")
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        other = subprocess.Popen([sys.executable, "-c", program, tree, tmp_path / "cache"], cwd=ROOT, text=True,
                                 stdout=subprocess.PIPE)
        while not re.search(rf"->.* {other.pid} ", Path("/proc/locks").read_text()):  # blocked
            assert not select.select([other.stdout], [], [], 0.005)[0], "it did not wait"
        index_of(tree)
    assert other.communicate()[0] == "8\n"


def test_cache_that_cannot_be_written_does_not_matter(tree):
    assert len(build_index(str(tree), ValSplit(0.1, 0), Path("/proc/nowhere")).splits["train"]) == 8


@pytest.mark.parametrize(("others", "val", "test"), [
    (("valid", "test"), "valid", "test"), (("test",), "test", None), (("val", "validation"), "val", None),
    (("validation",), "validation", None)])
def test_val_is_the_first_folder_that_exists(tmp_path, index_of, others, val, test):
    root = write_images(tmp_path / "d",
                        *(f"{split}/{name}/{split}.png" for split in ("train", *others) for name in "ab"))
    index = index_of(root)
    assert {split: Path(index.splits[split].path(0)).stem for split in index.splits} == {
        "train": "train", "val": val, **({"test": test} if test else {})}
    assert any(val in note for note in index.notes) == (val != "val")


def test_test_split_may_lack_classes_and_keeps_the_labels_of_train(tmp_path, index_of):
    root = write_images(tmp_path / "d", "train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png", "test/b/1.png")
    assert index_of(root).splits["test"].labels.tolist() == [1]


def test_test_folder_without_classes_is_left_out_with_a_note(tmp_path, index_of):
    root = write_images(tmp_path / "d", "train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png", "test/1.png")
    index = index_of(root)
    assert set(index.splits) == {"train", "val"} and any("test/" in note for note in index.notes)


def test_held_out_share_is_stratified_disjoint_and_seeded(tmp_path, index_of):
    counts = {"one": 1, "two": 2, "ten": 10, "many": 40}
    root = write_images(tmp_path / "d",
                        *(f"train/{name}/{i}.png" for name, count in counts.items() for i in range(count)))
    index, again, other = index_of(root, 0.2), index_of(root, 0.2), index_of(root, 0.2, seed=1)
    train, val = index.splits["train"], index.splits["val"]
    held = dict(zip(index.classes, np.bincount(val.labels, minlength=4).tolist(), strict=True))
    assert held == {"one": 0, "two": 1, "ten": 2, "many": 8}
    assert sorted(paths(train) + paths(val)) == sorted(str(file) for file in root.glob("train/*/*"))
    assert all(f"/{index.classes[label]}/" in train.path(i) for i, label in enumerate(train.labels))
    assert paths(again.splits["val"]) == paths(val) != paths(other.splits["val"])
    assert index.fingerprint == other.fingerprint
    assert np.bincount(index_of(root, 0.999).splits["train"].labels).min() == 1


def test_classes_directly_in_the_root_are_taken_with_a_note(tmp_path, index_of):
    root = write_images(tmp_path / "d", *(f"{name}/{i}.png" for name in "ab" for i in range(3)))
    index = index_of(root)
    assert index.classes == ("a", "b") and any("no train/" in note for note in index.notes)


def test_hidden_and_stray_files_are_passed_over_with_one_note(tree, index_of):
    expected = paths(index_of(tree).splits["train"])
    write_images(tree, "train/README", "train/loose.png", "train/b/Thumbs.db")
    write_images(tree, "train/b/.hidden.png", "train/.git/1.png", "train/__MACOSX/1.png")
    index = index_of(tree)
    assert paths(index.splits["train"]) == expected
    (note,) = index.notes
    assert "3" in note and "train/README" in note


def test_symlinks_are_followed_and_loops_are_not(tree, index_of, tmp_path):
    write_images(tmp_path / "elsewhere", "s.png")
    (tree / "train/b/linked").symlink_to(tmp_path / "elsewhere")
    (tree / "train/b/deep/loop").symlink_to(tree / "train/b")
    (tree / "train/C/0.png").symlink_to(tree / "train/C/10.png")
    found = paths(index_of(tree).splits["train"])
    assert len(found) == 10 and str(tree / "train/b/linked/s.png") in found


@pytest.mark.parametrize(("names", "words"), [
    ((), "it is empty"),
    (("1.png", "2.png"), "only 1.png, 2.png"),
    (("train.csv", "val.csv"), "if these are texts, give --task text-classification or masked-lm"),
    (("train/a.jsonl",), "if these are texts, give --task text-classification or masked-lm"),
    (("train/1.png", "val/a/1.png"), "train/ holds no class folders"),
    (("train/a/1.png",), "only one class, a"),
    (("train/a/1.png", "train/b/readme.txt"), "train/b holds no images"),
    (("val/a/1.png", "val/b/1.png"), "no train/"),
    (("Train/a/1.png", "Val/a/1.png"), "must be named train"),
    (("train/a/1.png", "train/b/1.png", "val/a/1.png"), "train/ has b, which val/ lacks"),
    (("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png", "val/c/1.png"), "val/ has c, which train/ lacks"),
    (("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/B/1.png"), "only in case"),
    (("train/a/1.png", "train/b/1.png", "val/a/1.png", "val/b/1.png", "test/c/1.png"), "test/ has c"),
    (("train/a/1.png", "train/b/1.png"), "every class has one sample"),
])
def test_unusable_folder_is_bad_data_and_says_why(tmp_path, index_of, names, words):
    root = tmp_path / "d"
    root.mkdir()
    with pytest.raises(UserError, match=words) as error:
        index_of(write_images(root, *names))
    assert error.value.code == Exit.BAD_DATA and str(root) in str(error.value)


def test_a_folder_for_each_image_is_refused_before_training(tmp_path, index_of):
    for number in range(1001):
        (tmp_path / "d/train" / str(number)).mkdir(parents=True)
        (tmp_path / "d/train" / str(number) / "1.png").touch()
    with pytest.raises(UserError) as error:
        index_of(tmp_path / "d")
    assert (error.value.code, str(error.value)) == (
        Exit.BAD_DATA, f"--data {tmp_path}/d: train/ has 1001 classes, and 1001 of them have a single training sample,"
        " so they look like ids; with more than 1000 classes, at most 90% may have a single"
        " sample; put all images of a class into one folder")


def test_missing_folder_a_file_and_no_share_to_hold_out_have_their_codes(tmp_path, index_of):
    write_images(tmp_path, "d/train/a/1.png", "d/train/b/1.png", "file.png")
    for root, fraction, code in (("missing", 0.1, Exit.NO_INPUT), ("file.png", 0.1, Exit.BAD_DATA),
                                 ("d", 0.0, Exit.USAGE)):
        with pytest.raises(UserError) as error:
            index_of(tmp_path / root, fraction)
        assert error.value.code == code


def as_rgb(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


SMALL = photo(20, 30)
CLEAR = Image.merge("RGBA", (*SMALL.split(), Image.new("L", (30, 20), 0)))
PALETTE = SMALL.quantize(16)
GREY16 = Image.fromarray((np.arange(600).reshape(20, 30) * 109).astype(np.uint16))
GREY8 = np.round(np.arange(600).reshape(20, 30) * 109 / 257).astype(np.uint8)
WHITE = np.full((20, 30, 3), 255, dtype=np.uint8)


@pytest.mark.parametrize(("data", "expected"), [
    (encoded(SMALL, "PNG"), as_rgb(SMALL)),
    (encoded(SMALL, "JPEG"), as_rgb(Image.open(io.BytesIO(encoded(SMALL, "JPEG"))))),
    (encoded(SMALL, "JPEG", progressive=True),
     as_rgb(Image.open(io.BytesIO(encoded(SMALL, "JPEG", progressive=True))))),
    (encoded(SMALL.convert("L"), "JPEG"), as_rgb(Image.open(io.BytesIO(encoded(SMALL.convert("L"), "JPEG"))))),
    (encoded(SMALL.convert("CMYK"), "JPEG", quality=100), as_rgb(SMALL)),
    (encoded(SMALL.convert("CMYK"), "TIFF"), as_rgb(SMALL)),
    (encoded(PALETTE, "PNG"), as_rgb(PALETTE)),
    (encoded(PALETTE, "PNG", transparency=bytes(16)), WHITE),
    (encoded(PALETTE, "GIF"), as_rgb(PALETTE)),
    (encoded(PALETTE, "GIF", save_all=True, append_images=[PALETTE.rotate(180)]), as_rgb(PALETTE)),
    (encoded(SMALL, "WEBP", lossless=True, save_all=True, append_images=[SMALL.rotate(180)]), as_rgb(SMALL)),
    (encoded(CLEAR, "PNG"), WHITE),
    (encoded(CLEAR.convert("LA"), "PNG"), WHITE),
    (encoded(Image.new("RGB", (30, 20), "red"), "PNG", transparency=(255, 0, 0)), WHITE),
    (encoded(SMALL.convert("1"), "PNG"), as_rgb(SMALL.convert("1"))),
    (encoded(GREY16, "PNG"), np.stack([GREY8] * 3, axis=2)),
    (encoded(GREY16, "TIFF"), np.stack([GREY8] * 3, axis=2)),
    (encoded(Image.fromarray(np.asarray(GREY16).astype(np.int32)), "PPM"), np.stack([GREY8] * 3, axis=2)),
    (encoded(SMALL, "BMP"), as_rgb(SMALL)),
    (encoded(SMALL.convert("L"), "PPM"), as_rgb(SMALL.convert("L"))),
])
def test_every_mode_is_decoded_to_its_colours(data, expected):
    image = EncodedImage(data)
    pixels = image.pixels()
    assert (image.height, image.width) == (20, 30) and pixels.dtype == torch.uint8
    # CMYK goes through a lossy JPEG here; everything else is exact.
    assert np.abs(pixels.numpy().astype(int) - expected).max() <= (12 if data[:2] == b"\xff\xd8" and b"Adobe" in data
                                                                   else 0)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(SMALL, format, exif=exif)
    reference = as_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    image = EncodedImage(data)
    assert (image.height, image.width) == reference.shape[:2]
    assert np.array_equal(image.pixels().numpy(), reference)


def turned(kind: str, orientation: int) -> bytes:
    """A JPEG that is turned by EXIF or by XMP."""
    if kind == "exif":
        exif = Image.Exif()
        exif[0x0112] = orientation
        return encoded(SMALL, "JPEG", exif=exif)
    return encoded(SMALL, "JPEG", xmp=f'<rdf:Description tiff:Orientation="{orientation}"/>'.encode())


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2) + content


# What a JPEG may begin with, after its first two bytes: nothing else, a long profile, a comment that looks like a
# header, fill bytes, a marker without a length.
BEGINNINGS = {"": b"", "profile": segment(0xE2, bytes(60_000)), "comment": segment(0xFE, b"\xff\xda\xff\xe1"),
              "fill": b"\xff\xff", "restart": b"\xff\xd0"}


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("kind", ["exif", "xmp"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_jpeg_is_turned_as_pillow_turns_it(kind, orientation, beginning):
    data = turned(kind, orientation)
    data = data[:2] + BEGINNINGS[beginning] + data[2:]
    reference = as_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.array_equal(EncodedImage(data).pixels().numpy(), reference)
    assert reference.shape == ((20, 30, 3) if orientation == 1 else (30, 20, 3))


@pytest.mark.parametrize("beginning", ["", "profile", "comment"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"keep_rgb": True}])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_header_of_a_jpeg_that_is_not_turned_is_not_read_by_pillow(monkeypatch, mode, options, beginning):
    """Pillow takes forty times as long as libjpeg for it, and longer than for a small image's pixels."""
    data = encoded(SMALL.convert(mode), "JPEG", **options)
    data = data[:2] + BEGINNINGS[beginning] + data[2:]
    expected = as_rgb(Image.open(io.BytesIO(data)))
    monkeypatch.setattr("data.image_decode.Image.open", None)
    image = EncodedImage(data)
    assert (image.height, image.width) == (20, 30) and np.array_equal(image.pixels().numpy(), expected)


def test_a_jpeg_of_a_subsampling_without_a_name_is_decoded():
    """4:4:1, which is 4:1:1 turned by a quarter; simplejpeg names all others."""
    data = bytearray(simplejpeg.encode_jpeg(np.array(photo(32, 32)), colorsubsampling="411"))
    luma = data.index(b"\xff\xc0") + 11  # of the first component in the frame's header: its two factors
    assert data[luma] == 0x41
    data[luma] = 0x14  # as many blocks, in another order
    expected = as_rgb(Image.open(io.BytesIO(data)))
    assert np.array_equal(EncodedImage(bytes(data)).pixels().numpy(), expected)


@pytest.mark.parametrize("at_least", [1, 0.7, 0.5, 0.4, 0.25, 0.2, 0.125, 0.01])
@pytest.mark.parametrize("orientation", [1, 6])
def test_reduced_decode_keeps_what_is_asked_for(at_least, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = EncodedImage(encoded(photo(333, 501), "JPEG", exif=exif))
    pixels = image.pixels(at_least)
    factor = 2.0 ** max(-3, np.ceil(np.log2(at_least)))
    assert pixels.shape == (np.ceil(image.height * factor), np.ceil(image.width * factor), 3)
    full = torch.nn.functional.interpolate(image.pixels()[None].permute(0, 3, 1, 2), pixels.shape[:2], mode="bilinear",
                                           antialias=True)
    # Red and green are ramps: the same picture, unshifted.
    assert (full[0].permute(1, 2, 0)[4:-4, 4:-4, :2].float() - pixels[4:-4, 4:-4, :2].float()).abs().mean() < 4


GOOD_PNG, GOOD_JPEG = encoded(photo(64, 64), "PNG"), encoded(photo(64, 64), "JPEG")
FRAME = GOOD_JPEG.index(b"\xff\xc0")
BAD = {
    "truncated.jpg": GOOD_JPEG[:len(GOOD_JPEG) // 2], "without_end.jpg": GOOD_JPEG[:-2],
    "12_bits.jpg": GOOD_JPEG[:FRAME + 4] + b"\x0c" + GOOD_JPEG[FRAME + 5:],
    "truncated.png": GOOD_PNG[:len(GOOD_PNG) // 2],
    "empty.jpg": b"", "text.jpg": b"this is no image\n" * 9,
    "header.png": GOOD_PNG[:8] + b"\0\0\0\1XXXX" + GOOD_PNG[16:],
    "length.png": GOOD_PNG[:8] + b"\xff" * 4 + GOOD_PNG[12:],
    "bomb.png": encoded(Image.new("1", (15_000, 15_000)), "PNG"),
    "bomb.jpg": encoded(Image.new("L", (15_000, 15_000)), "JPEG"),
    "float.tif": encoded(Image.new("F", (4, 4)), "TIFF"), "int32.tif": encoded(Image.new("I", (4, 4), 70_000), "TIFF"),
}


class Whole:
    """The decoded image, as a transform."""

    size = 5

    def __call__(self, image):
        return image.pixels()


@pytest.mark.parametrize("name", [*BAD, "missing.jpg", "folder.jpg"])
def test_unreadable_image_is_a_grey_sample_with_path_and_reason(tmp_path, index_of, name, capfd):
    root = write_images(tmp_path / "d", f"train/a/{name}", "train/b/1.png", "val/a/1.png", "val/b/1.png")
    index = index_of(root).splits["train"]
    (root / "train/a" / name).unlink()
    if name in BAD:
        (root / "train/a" / name).write_bytes(BAD[name])
    elif name == "folder.jpg":
        (root / "train/a" / name).mkdir()
    image, label, bad = ImageFolder(index, Whole(), seed=0)[0, 0]
    assert image.shape == (5, 5, 3) and (image == 128).all() and label == 0
    assert bad.startswith(f"{root}/train/a/{name}: ") and len(bad) > len(f"{root}/train/a/{name}: ") + 5
    assert "0x" not in bad and bad.count(name) == 1


@pytest.mark.filterwarnings("ignore")  # pytest lifts the filter that data/image_decode.py sets
def test_damaged_files_raise_nothing_else():
    generator = random.Random(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [encoded(SMALL, "JPEG", exif=exif), encoded(SMALL, "JPEG"), encoded(SMALL.convert("CMYK"), "JPEG"),
             encoded(SMALL, "PNG", exif=exif),
             encoded(PALETTE, "PNG", transparency=3), encoded(PALETTE, "GIF"), encoded(SMALL, "WEBP"),
             encoded(SMALL, "BMP"),
             encoded(SMALL, "PPM"), encoded(GREY16, "PNG"), encoded(SMALL, "TIFF", exif=exif)]
    outcomes = set()
    for data in files * 60:
        damaged = bytearray(data[:generator.randrange(len(data))] if generator.random() < 0.2 else data)
        for _ in range(generator.choice((1, 3, 10))):
            if damaged:
                damaged[generator.randrange(min(len(damaged), 200))] = generator.randrange(256)
        try:
            EncodedImage(bytes(damaged)).pixels(0.3)
            outcomes.add("decoded")
        except UnreadableImage:
            outcomes.add("refused")
    assert outcomes == {"decoded", "refused"}


def test_large_image_gives_no_warning():
    with warnings.catch_warnings(action="error"):
        assert EncodedImage(encoded(Image.new("L", (10_000, 9_500)), "JPEG")).width == 10_000


def test_stray_bytes_before_a_marker_are_read_as_by_pillow():
    middle = GOOD_JPEG.rindex(b"\xff\xd9")
    data = GOOD_JPEG[:middle] + bytes(200) + GOOD_JPEG[middle:]
    assert np.array_equal(EncodedImage(data).pixels().numpy(), as_rgb(Image.open(io.BytesIO(data))))


class Noise:
    size = 3

    def __call__(self, image):
        return torch.randint(0, 256, (3, 3, 3), dtype=torch.uint8)


def test_augmentation_is_a_function_of_seed_epoch_and_index(tree, index_of):
    index = index_of(write_images(tree, "train/C/9.webp")).splits["train"]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, other_epoch, other_index = (ImageFolder(index, Noise(), seed=7)[item].image
                                       for item in ((3, 1), (4, 1), (3, 2)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(ImageFolder(index, Noise(), seed=7)[3, 1].image, first)
    other_seed = ImageFolder(index, Noise(), 8)[3, 1].image
    assert len({tuple(image.flatten().tolist()) for image in (first, other_epoch, other_index, other_seed)}) == 4


def test_index_of_many_files_is_fast_and_small(tmp_path, index_of):
    root = tmp_path / "d"
    for name in "abcd":
        (root / "train" / name).mkdir(parents=True)
        for i in range(1000):
            (root / "train" / name / f"{i}.jpg").touch()
    with warnings.catch_warnings(action="error"):
        index = index_of(root, 0.25)
    assert {name: len(split) for name, split in index.splits.items()} == {"train": 3000, "val": 1000}
    assert len(pickle.dumps(index.splits["train"])) < 3000 * 42  # 20 for spans and labels, 15 for each of 4000 names
