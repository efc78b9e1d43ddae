"""The chain of a run's checkpoints: under exact a step's content hash is the same whoever computes it, and how often.

Every step is saved, so every step has a link.
"""

import json

import pytest

from tests.faults.sweep_saves import flip
from tests.harness.launches import STEPS, WORDS, assert_gone
from tests.harness.run_directory import begins_with, contents, newest_checkpoint, status, trained_steps
from utils.rundir.chain import FILE, digest_of, files_in, read_lines, starts_hash, valid_links
from utils.rundir.checkpoint_folder import step_of
from utils.rundir.starts import read_starts


@pytest.fixture(scope="module")
def words(photos):
    return [*WORDS, "--strategy", "exact", "--data", photos, "--save-every", 1, "--ema-decay", "0.9"]


@pytest.fixture(scope="module")
def expected(session_dir, words, run_train):
    """The content hash of each step, by a run on one process that nothing disturbed."""
    run = session_dir / "chain"
    result = run_train(*words, "--run-dir", run, "--keep", 1, "--keep-every", 3)
    assert result.returncode == 0, result.text
    assert_is_whole(run)
    assert [*contents(run)] == [*range(STEPS + 1)]
    return contents(run)


def assert_is_whole(run):
    """Each link holds the hash of the one before, and what it names is there as it was."""
    links, before = valid_links(read_lines(run)), ""
    for link in links:
        assert (link["previous"], link["link"]) == (before, digest_of(link))
        assert link["metrics"] == begins_with(run / "metrics.jsonl", link["metrics"]["bytes"])
        assert link["starts"] == starts_hash(run, link["start"])
        before = link["link"]
    best = json.loads((run / "summary.json").read_text())["best"]["step"]
    assert [link["model"] for link in links if link["step"] == best] == [files_in(run / "model")]
    newest = json.loads((newest_checkpoint(run) / "MANIFEST.json").read_text())
    assert newest["link"] == links[-1]


@pytest.mark.long
def test_checkpoints_to_repeat_from_stay_to_the_end(session_dir, expected):
    run = session_dir / "chain"
    steps = {step_of(path.name) for path in (run / "checkpoints").iterdir()}
    best = json.loads((run / "summary.json").read_text())["best"]["step"]
    assert {3, 6, 9, best} <= steps < set(expected)
    assert read_starts(run)[0]["settings"]["keep_every"] == 3


@pytest.mark.long
@pytest.mark.parametrize("share", [0.5, pytest.param(0, marks=pytest.mark.slow)], ids=["cut in half", "lost"])
def test_a_run_killed_on_2_and_finished_on_3_has_the_links_of_one_on_1(
        run_dir, words, expected, start_torchrun, run_torchrun, share):
    """Killed before a checkpoint's line was in the file."""
    live = start_torchrun(2, *words, "--run-dir", run_dir, "--workers", 2)
    live.wait_for(lambda: trained_steps(run_dir) >= 4, "four steps")
    live.kill_all()
    assert_gone(live, run_dir)
    lines = (run_dir / FILE).read_bytes().splitlines(keepends=True)
    (run_dir / FILE).write_bytes(b"".join(lines[:-1]) + lines[-1][:int(share * len(lines[-1]))])
    reached = step_of(newest_checkpoint(run_dir).name)
    finished = run_torchrun(3, *words, "--run-dir", run_dir)
    assert finished.returncode == 0, finished.text
    assert contents(run_dir) == expected
    assert_is_whole(run_dir)
    assert [(each["processes"], each["step"]) for each in read_starts(run_dir)] == [(2, 0), (3, reached)]


@pytest.mark.slow
def test_links_beyond_a_damaged_checkpoint_are_abandoned_and_repeated(run_dir, words, expected, run_torchrun):
    stopped = run_torchrun(3, *words, "--run-dir", run_dir, "--stop-after", 5)
    assert status(run_dir)["step"] == 5, stopped.text
    before = valid_links(read_lines(run_dir))
    for step in (4, 5):
        flip(run_dir / "checkpoints" / f"step-{step:010d}-g1" / "state.pt", 9000, bit=0)
    finished = run_torchrun(2, *words, "--run-dir", run_dir)
    assert finished.returncode == 0 and "resumed at step 3" in finished.out, finished.text
    assert contents(run_dir) == expected
    assert_is_whole(run_dir)
    lines = read_lines(run_dir)
    assert [line["resumed"] for line in lines if "resumed" in line] == [3]
    assert [link["step"] for link in before if link not in valid_links(lines)] == [4, 5]
