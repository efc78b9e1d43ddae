import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import demo
from data.demo import SETTINGS, unpack_demo
from utils.errors import Exit, UserError
from utils.settings.command_line import parse_command_line
from utils.settings.config import settings


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return unpack_demo("image-classification", tmp_path_factory.mktemp("cache"))


def test_every_digit_is_unpacked_under_its_label(root):
    """Every digit of the sheet is unpacked pixel for pixel under its label."""
    sheet = np.asarray(Image.open(demo.SHEET))
    labels = "".join(line for line in demo.LABELS.read_text().splitlines() if not line.startswith("#"))
    files = sorted(root.glob("*/*/*.png"), key=lambda file: file.stem)
    assert [file.stem for file in files] == [f"{number:04d}" for number in range(1797)]
    assert "".join(file.parent.name for file in files) == labels
    for number, file in enumerate(files):
        top, left = number // 60 * 8, number % 60 * 8
        assert np.array_equal(np.asarray(Image.open(file)), sheet[top:top + 8, left:left + 8])


def test_digits_are_those_that_scikit_learn_ships():
    sheet = np.asarray(Image.open(demo.SHEET)).reshape(30, 8, 60, 8).transpose(0, 2, 1, 3).reshape(1800, 8, 8)
    labels = "".join(line for line in demo.LABELS.read_text().splitlines() if not line.startswith("#"))
    # sha256 of sklearn.datasets.load_digits(): (images * 15).astype(uint8), then target.astype(uint8)
    expected = "22ffaddd16e5f5041160c53d90f23e0930c110477ba720830c9858dd26de20ee"
    assert hashlib.sha256(sheet[:1797].tobytes() + bytes(map(int, labels))).hexdigest() == expected


def test_a_fifth_of_each_class_is_for_validation(root):
    for folder in (root / "train").iterdir():
        train, val = len(list(folder.iterdir())), len(list((root / "val" / folder.name).iterdir()))
        assert val == (train + val) // 5


def test_mean_and_std_are_those_of_the_training_pixels(root):
    pixels = np.stack([np.asarray(Image.open(file)) for file in root.glob("train/*/*.png")]) / 255
    assert SETTINGS["image-classification"]["mean"] == (round(pixels.mean(), 3),) * 3
    assert SETTINGS["image-classification"]["std"] == (round(pixels.std(), 3),) * 3


def test_second_unpacking_writes_nothing(root, monkeypatch):
    monkeypatch.setitem(demo.SOURCES, "image-classification", (root.name, lambda root: pytest.fail("unpacked again")))
    assert unpack_demo("image-classification", root.parents[1]) == root


def test_unpacking_that_was_killed_is_not_used(tmp_path, monkeypatch):
    def half(root: Path) -> None:
        (root / "train/0").mkdir(parents=True)
        raise KeyboardInterrupt

    name, _ = demo.SOURCES["image-classification"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(demo.SOURCES, "image-classification", (name, half))
        unpack_demo("image-classification", tmp_path)
    assert len(list(unpack_demo("image-classification", tmp_path).glob("*/*/*.png"))) == 1797


def test_several_unpack_at_once_without_harm(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        roots = set(pool.map(unpack_demo, ["image-classification"] * 3, [tmp_path] * 3))
    assert len(roots) == 1 and len(list(roots.pop().glob("*/*/*.png"))) == 1797
    assert len(list((tmp_path / "demo").iterdir())) == 1


def test_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="LOCKSTEP_CACHE") as error:
        unpack_demo("image-classification", tmp_path / "file")
    assert error.value.code == Exit.CANNOT_CREATE


def test_settings_are_settings_of_the_task():
    config = parse_command_line([], SETTINGS)
    assert {name: settings(config)[name]
            for name in SETTINGS["image-classification"]} == SETTINGS["image-classification"]


def test_importing_needs_no_torch():
    program = "import sys, data.demo; sys.exit(bool({'torch', 'numpy', 'PIL'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[3]).returncode == 0
