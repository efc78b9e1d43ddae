"""--cache: packed images are those of the files, are packed once, whole or not at all, and follow what changes."""

import errno
import io
import os
import signal
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from data.images.augment import CentreCrop, PhotoTrain
from data.images.cache import CHUNK, LONGEST, CacheSpec, ImageCache, make_cache, open_cache
from data.images.decode import EncodedImage, UnreadableImage
from utils.errors import Exit, UserError
from utils.numerics.seed import seeded

WHOLE, SMALL = 4096, 48  # shorter sides: no image of these tests is resized, all photos are


def picture(height, width, seed=0) -> Image.Image:
    """Smooth, as photos are: JPEG does not change it much."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.BICUBIC)


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Photos, one of them turned by EXIF, a GIF, and a file that is no image, the third."""
    folder = tmp_path / "photos"
    folder.mkdir()
    turned = Image.Exif()
    turned[0x0112] = 6
    picture(80, 100).save(folder / "a.jpg", quality=95)
    picture(60, 90, 1).save(folder / "b.jpg", quality=95, exif=turned)
    (folder / "c.jpg").write_bytes(b"no image")
    picture(70, 70, 2).save(folder / "d.gif")
    return sorted(str(path) for path in folder.iterdir())


def packed(files, tmp_path, encoding="raw", short_side=WHOLE, note=None) -> ImageCache:
    spec, folder = CacheSpec(encoding, short_side), tmp_path / f"{encoding}-{short_side}"
    make_cache(files, spec, folder, 1, note or (lambda text: None))
    return ImageCache(folder)


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """opened(files): by open_cache, from train and val. `home` has the caches, `said` what was noted."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "home"))
    world = SimpleNamespace(on_rank_zero=lambda work, per_node: work(), everywhere=lambda work: work())

    def open_(files, names=("train", "val")):
        splits = {name: Split(paths) for name, paths in (("train", files[1:]), ("val", files[:1]), ("test", ["none"]))}
        return open_cache(SimpleNamespace(splits=splits), CacheSpec("raw", WHOLE), names, world, open_.said.append)

    open_.said, open_.home = [], tmp_path / "home"
    return open_


class Split(list):
    """Paths, one of each sample."""

    def paths(self, number):
        return [self[number]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_raw_images_that_need_no_resizing_give_the_samples_of_the_files(files, tmp_path):
    cache = packed(files, tmp_path)
    for path in (files[0], files[1], files[3]):
        assert torch.equal(cache.read(path).pixels(), EncodedImage(path).pixels())
        for transform in (PhotoTrain(24), CentreCrop(24, "bilinear", 28)):
            samples = []
            for image in (cache.read(path), EncodedImage(path)):
                with seeded(3):
                    samples.append(transform(image))
            assert torch.equal(*samples) or path.endswith("jpg")
            assert (samples[0].float() - samples[1].float()).abs().mean() < 2  # at half their size


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_images_are_stored_smaller_and_a_box_is_the_same_place_in_both(files, tmp_path, encoding):
    cache = packed(files, tmp_path, encoding, SMALL)
    for path in (files[0], files[1], files[3]):
        stored, whole = cache.read(path), EncodedImage(path)
        assert (stored.height, stored.width) == (whole.height, whole.width)
        assert min(stored.pixels().shape[:2]) == SMALL
        for transform in (PhotoTrain(24), CentreCrop(24, "bilinear", 28)):
            samples = []
            for image in (stored, whole):
                with seeded(3):
                    samples.append(transform(image).float())
            assert (samples[0] - samples[1]).abs().mean() < 6, path  # of another box: 30 and more


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_an_image_that_was_unreadable_is_read_as_it_would_be_stored(files, tmp_path, encoding):
    """It is not stored: a network file system may have been away."""
    cache = packed(files, tmp_path, encoding, SMALL)
    with pytest.raises(UnreadableImage) as of_file:
        EncodedImage(files[2])
    with pytest.raises(UnreadableImage, match=str(of_file.value)):
        cache.read(files[2])
    picture(SMALL + 20, 90, 5).save(files[2])
    stored = packed(files[2:3], tmp_path / "repaired", encoding, SMALL)
    assert torch.equal(cache.read(files[2]).pixels(), stored.read(files[2]).pixels())


def test_a_side_that_no_jpeg_can_have_is_read_from_its_file(tmp_path):
    Image.new("RGB", (LONGEST + 1, 2), "red").save(wide := str(tmp_path / "wide.png"))
    cache = packed([wide], tmp_path, "jpeg", 2)
    for transform in (PhotoTrain(24), CentreCrop(24, "bilinear", 28)):
        samples = []
        for image in (cache.read(wide), EncodedImage(wide)):
            with seeded(3):
                samples.append(transform(image))
        assert torch.equal(*samples)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_are_resized_as_the_evaluation_resizes(files, tmp_path, interpolation):
    spec, folder, evaluated = CacheSpec("raw", 28, interpolation), tmp_path / "cache", CentreCrop(24, interpolation, 28)
    make_cache(files, spec, folder, 1, print)
    for path in (files[0], files[3]):
        assert torch.equal(evaluated(ImageCache(folder).read(path)), evaluated(EncodedImage(path)))


def test_images_are_packed_once_and_beside_them_anew_when_a_file_changes(files, opened):
    caches = [opened(files) for _ in range(2)]
    once = [text for text in opened.said if "once" in text]
    assert once == [f"--cache raw: packing 4 images into {opened.home}, once"]
    picture(33, 44, 5).save(files[0])
    assert opened(files).read(files[0]).pixels().shape == (33, 44, 3)
    assert len([text for text in opened.said if "once" in text]) == 2
    for cache in caches:  # a run that has mapped it goes on
        assert cache.read(files[0]).pixels().shape == (80, 100, 3)


def test_an_evaluation_packs_what_it_reads(files, opened):
    cache = opened(files, ("val",))
    assert f"--cache raw: packing 1 image into {opened.home}, once" in opened.said
    assert cache.read(files[0]) and opened(files).read(files[1])


def test_each_start_says_how_many_images_are_not_packed(files, opened):
    for _ in range(2):
        opened(files)
    line = "--cache raw: 1 image could not be packed: their files will be read"
    assert opened.said.count(line) == 2


def test_files_that_swap_their_names_are_packed_anew(files, opened):
    """With the same sizes and times: neither may stand for the other."""
    for number, path in enumerate(files[:2]):
        picture(20, 20, number).save(path, "BMP")
        os.utime(path, (1, 1))
    opened(files[:2])
    renamed = [files[1], f"{files[0]}.bmp"]
    os.rename(files[1], renamed[1])
    os.rename(files[0], renamed[0])
    cache = opened(renamed)
    for path in renamed:
        assert torch.equal(cache.read(path).pixels(), EncodedImage(path).pixels())


@pytest.fixture
def many(tmp_path) -> list[str]:
    """Files of two chunks and a half."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(5 * CHUNK // 2):
        picture(20, 30, number).save(folder / f"{number:03d}.png")
    return sorted(str(path) for path in folder.iterdir())


def packing(paths, folder, last="none"):
    """A process that packs, a fork of this one; it is killed when a note begins with `last`."""
    def note(text):
        if text.startswith(last):
            os.kill(os.getpid(), signal.SIGKILL)

    process = get_context("fork").Process(target=make_cache, args=(paths, CacheSpec("jpeg", SMALL), folder, 2, note))
    process.start()
    return process


def test_what_a_kill_leaves_is_no_cache_and_the_next_starts_pack_once(many, tmp_path):
    folder = tmp_path / "killed"
    killed = packing(many, folder, f"--cache jpeg: {CHUNK} of ")
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and not folder.exists()
    starts = [packing(many, folder) for _ in range(3)]
    for start in starts:
        start.join()
    assert [start.exitcode for start in starts] == [0, 0, 0]
    make_cache(many, CacheSpec("jpeg", SMALL), tmp_path / "undisturbed", 1, print)
    assert contents(folder) == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_folder_that_cannot_be_written_is_named(files, tmp_path, monkeypatch, number):
    monkeypatch.setattr("data.images.cache._packed", lambda *_: exec(f"raise OSError({number}, os.strerror({number}))"))
    with pytest.raises(UserError, match=rf"cannot write .*/cache: {os.strerror(number)};") as refused:
        make_cache(files, CacheSpec("raw", SMALL), tmp_path / "cache", 1, print)
    assert refused.value.code == Exit.IO and "$LOCKSTEP_CACHE" in str(refused.value)
    assert not list(tmp_path.glob("*cache*"))  # nothing of it stays


def test_a_damaged_cache_is_made_anew_by_the_next_start(files, tmp_path):
    packed(files, tmp_path)
    folder = tmp_path / f"raw-{WHOLE}"
    os.truncate(folder / "images", 10)
    with pytest.raises(UserError, match="is damaged"):
        ImageCache(folder)
    assert torch.equal(packed(files, tmp_path).read(files[0]).pixels(), EncodedImage(files[0]).pixels())


def test_a_path_that_was_not_packed_is_an_error_not_another_image(files, tmp_path):
    cache = packed(files, tmp_path)
    for name in "abcdefgh":
        with pytest.raises(KeyError):
            cache.read(str(tmp_path / name))


def test_a_stored_jpeg_is_a_jpeg(files, tmp_path):
    cache = packed(files, tmp_path, "jpeg", SMALL)
    begin, end = next(row[:2] for row in cache._index if row[0] < row[1])
    assert Image.open(io.BytesIO(cache._images[begin:end].tobytes())).format == "JPEG"
