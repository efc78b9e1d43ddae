"""extras/: each can be deleted, with its folder and its line; the training is the same without."""

import shutil
import tempfile
from pathlib import Path

import pytest

from extras import EXTRAS
from tests.harness.project_copy import copy_project, run_in
from tests.harness.run_directory import weights_sha256

COMMAND = ("python train.py --device cpu --precision fp32 --workers 0 --threads 1 --image-size 16 --max-steps 4"
           " --eval-every 2")


@pytest.fixture(scope="module")
def without(session_dir):
    """without(names): the weights of a run, and what it printed, by a copy of the project without these extras."""
    def train(names):
        folder = copy_project(Path(tempfile.mkdtemp(prefix="without-", dir=session_dir)))
        listing = folder / "extras" / "__init__.py"
        for name in names:
            shutil.rmtree(folder / "extras" / name)
            line = f'    "{name}",\n'
            assert line in listing.read_text()
            listing.write_text(listing.read_text().replace(line, ""))
        done = run_in(folder, f"{COMMAND} --run-dir run", session_dir / "cache")
        assert done.returncode == 0, done.stdout + done.stderr
        weights = weights_sha256(folder / "run")
        shutil.rmtree(folder)
        return weights, done.stdout

    return train


@pytest.fixture(scope="module")
def whole(without):
    return without([])


@pytest.mark.parametrize("names", [
    EXTRAS, *(pytest.param([name], marks=pytest.mark.long) for name in EXTRAS)], ids=lambda names: " ".join(names))
def test_a_run_without_extras_has_the_same_weights(names, without, whole):
    weights, printed = without(names)
    assert weights == whole[0] and "is whole without it" not in printed and "Traceback" not in printed
    assert ("its report" in printed, "its report" in whole[1]) == ("report" not in names, True)
