"""An honest run is never said to be edited: after each course of the pages it passes both forms of ask.verify."""

import os
import shutil
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from ask.integrity import findings
from tests.harness.launches import HeldImage, image_of, sample_of
from tests.harness.run_directory import newest_checkpoint, trained_steps
from utils.errors import Exit

WORDS = ["--model", "small-cnn", "--image-size", "16", "--epochs", "3", "--global-batch-size", "24",
         "--micro-batch-size", "4", "--save-every", "2", "--log-every", "1", "--workers", "0", "--precision", "fp32",
         "--strategy", "exact", "--ema-decay", "0.5"]
VERIFY = {"script": "ask/verify.py"}


class Course:
    """What a course is given: launches, its own data, its own run directory."""

    def __init__(self, run_dir, photos, run_torchrun, start_torchrun):
        self.run, self.photos = run_dir, photos
        self._run_torchrun, self._start_torchrun = run_torchrun, start_torchrun

    def words(self, *more):
        return [*WORDS, "--data", self.photos, "--run-dir", self.run, *more]

    def ends(self, processes, *more, code=0, **options):
        """A launch that ends by itself."""
        result = self._run_torchrun(processes, *self.words(*more), **options)
        assert result.code == code, result.text
        return result

    def lives(self, processes, *more, **options):
        return self._start_torchrun(processes, *self.words(*more), **options)


def a_repaired_sample(course):
    bad = image_of(course.photos, "train", sample_of(rank=1, step=2))
    whole = bad.read_bytes()
    bad.write_bytes(whole[:len(whole) // 2])
    course.ends(2, code=Exit.BAD_DATA)
    assert findings(course.run) == []
    bad.write_bytes(whole)
    course.ends(2)


def a_full_disk(course):
    with mounted(course.run, "tmpfs", "-t", "tmpfs", "-o", "size=700k"):
        course.ends(1, "--save-every", 1, "--keep", 20, "--keep-every", 1, code=Exit.IO)
        assert findings(course.run) == []
        subprocess.run(["mount", "-o", "remount,size=64m", course.run], check=True)
        course.ends(1)
        copy = shutil.copytree(course.run, course.run.with_name("copy"))
    course.run.rmdir()
    copy.rename(course.run)


def a_read_only_disk(course):
    course.ends(1)
    with mounted(course.run, course.run, "--bind"):
        subprocess.run(["mount", "-o", "remount,ro,bind", course.run], check=True)
        is_verified(course)


def a_kill_in_an_evaluation(course):
    held = HeldImage(image_of(course.photos, "val", 2))
    live = course.lives(2)
    live.wait_for(held.is_wanted, "an evaluation")
    live.kill_all()
    held.give()
    assert findings(course.run) == []
    course.ends(2)


def a_kill_after_an_evaluation(course):
    live = course.lives(2)
    live.wait_for((course.run / "model").exists, "a model")
    live.kill_all()
    assert findings(course.run) == []
    course.ends(2)


def kills_at_any_moment(course):
    for step in (2, 4, 5, 7):
        live = course.lives(2, "--save-every", 1)
        live.wait_for(lambda step=step: trained_steps(course.run) >= step, f"step {step}")
        live.kill_all()
        assert findings(course.run) == []
    course.ends(2)


def a_restart_by_torchrun(course):
    live = course.lives(2, torchrun=("--max-restarts=1",))
    live.wait_for(lambda: trained_steps(course.run) >= 3, "three steps")
    live.kill_rank(1)
    assert live.wait().returncode == 0, live.wait().text


def a_fresh_start(course):
    course.ends(1, "--stop-after", 4, code=Exit.STOPPED)
    course.ends(2, "--fresh")


def growth_and_shrinking(course):
    for processes in (1, 3):
        course.ends(processes, "--stop-after", 3, code=Exit.STOPPED)
        assert findings(course.run) == []
    course.ends(2)


def a_damaged_checkpoint(course):
    course.ends(1, "--stop-after", 5, code=Exit.STOPPED)
    file = newest_checkpoint(course.run) / "state.pt"
    file.write_bytes(file.read_bytes()[:-1])
    course.ends(1)


def a_move(course):
    """The run and its data, to other folders with other times, as on another machine."""
    course.ends(1, "--stop-after", 5, code=Exit.STOPPED)
    place = course.run.parent / "elsewhere"
    course.photos = shutil.copytree(course.photos, place / "data", copy_function=shutil.copyfile)
    course.run = course.run.rename(place / "renamed")
    course.ends(2)


def a_lost_status(course):
    course.ends(1, "--stop-after", 5, code=Exit.STOPPED)
    (course.run / "status.json").unlink()
    course.ends(1)


def another_eval_every(course):
    """The next start evaluates the step that the last one saved without an evaluation."""
    course.ends(1, "--eval-every", 4, "--stop-after", 6, code=Exit.STOPPED)
    course.ends(1, "--eval-every", 3)


def a_stop_while_it_starts(course):
    """After a kill: records are behind the last save."""
    live = course.lives(1, "--save-every", 4, "--eval-every", 100)
    live.wait_for(lambda: trained_steps(course.run) >= 5, "five steps")
    live.kill_all()
    live = course.lives(1)
    live.wait_for(lambda: '"start": 2' in (course.run / "status.json").read_text(), "the second start")
    live.process.send_signal(signal.SIGTERM)
    assert live.wait().code in (0, Exit.STOPPED), live.wait().text
    assert findings(course.run) == []
    course.ends(1)


COURSES = [a_repaired_sample, a_kill_in_an_evaluation, a_move, a_full_disk, a_read_only_disk,
           a_kill_after_an_evaluation, kills_at_any_moment, a_restart_by_torchrun, a_fresh_start, growth_and_shrinking,
           a_damaged_checkpoint, a_lost_status, another_eval_every, a_stop_while_it_starts]


@contextmanager
def mounted(folder, *words):
    """A file system of its own in `folder`."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(
            ["mount", *words[1:], words[0], folder], capture_output=True).returncode:
        pytest.skip("cannot mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def is_verified(course):
    assert findings(course.run) == []
    result = course._run_torchrun(1, course.run, **VERIFY)
    assert result.code == 0 and f"\nverified: {course.run}, steps 1 to 9: " in result.out, result.text


@pytest.mark.rows(3)
@pytest.mark.parametrize("course", COURSES, ids=lambda course: course.__name__.replace("_", " "))
def test_an_honest_run_is_verified_after(course, own_photos, run_dir, run_torchrun, start_torchrun):
    through = Course(run_dir, own_photos, run_torchrun, start_torchrun)
    course(through)
    is_verified(through)


def test_the_page_names_each_course():
    page = Path("docs/reliability.md").read_text()
    words = [course.__name__.removeprefix("a_").replace("_", " ") for course in COURSES]
    assert [each for each in words if each.replace("eval every", "--eval-every") not in page] == []
