"""extra.py: when the files are written, on which ranks, at whose cost, and what is said about them."""

import math
import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import profile

from data.loader import BadSamples
from engine.records.steps import log_step
from engine.training import Extras
from extras.profile import extra as module
from extras.profile.extra import EXTRA, SKIPPED, Profile
from utils.rundir.clock import Clock

pytestmark = pytest.mark.unit

CPU, ALONE = torch.device("cpu"), [[1.0, 0.0, 0.0]]


class Ranks:
    """A World of which this process is one rank; counts how often it met the others."""

    device = CPU

    def __init__(self, rank=0):
        self.rank, self.is_main, self.meetings = rank, rank == 0, 0

    def everywhere(self, work):
        self.meetings += 1
        work()


def recorded(num_steps, num_asked, folder, world):
    """The notes of a start of num_steps steps."""
    notes, before = [], 0
    found = Profile(num_asked, folder, world, notes.append)
    for step in range(num_steps):
        torch.ones(2).sum()
        is_due = found.is_due()
        found.step()
        assert is_due == (step == SKIPPED + num_asked - 1) == world.meetings - before
        before = world.meetings
    found.close()
    return notes


@pytest.mark.parametrize("num_steps, words", [(0, "0 steps"), (1, "1 step"), (2, "2 steps")])
def test_a_start_without_a_step_to_record_says_how_many_it_needs(tmp_path, num_steps, words):
    notes = recorded(num_steps, 5, tmp_path / "profile", Ranks())
    assert notes == [f"--profile 5 wrote nothing: it begins with step 3 of a start, and this start took {words}"]
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("num_steps, words", [(3, "1 step"), (4, "2 steps"), (7, "5 steps"), (9, "5 steps")])
def test_the_note_says_how_many_steps_the_files_hold(tmp_path, num_steps, words):
    [note] = recorded(num_steps, 5, tmp_path / "profile", Ranks())
    assert note.startswith(f"profile of {words}: {tmp_path / 'profile'};")
    table = (tmp_path / "profile/operators.txt").read_text()
    shares = [float(share) for share in re.findall(r"(?m)^ *\S+ +([\d.]+)%", table)]  # of the time, by operator
    assert "aten::sum" in table and len(shares) > 2 and shares == sorted(shares, reverse=True)


def test_without_the_setting_nothing_is_written_said_or_waited_for(tmp_path):
    world = Ranks()
    found = Profile(0, tmp_path / "profile", world, pytest.fail)
    for _ in range(5):
        assert not found.is_due()
        found.step()
    found.close()
    assert (world.meetings, list(tmp_path.iterdir())) == (0, [])


@pytest.mark.parametrize("num_steps, num_meetings", [(5, 1), (4, 0)])
def test_all_ranks_meet_after_the_last_recorded_step_and_at_no_end(tmp_path, num_steps, num_meetings):
    """At an end, which may be an error, no rank waits for the others. Rank 0 alone makes the table."""
    worlds = [Ranks(rank) for rank in range(3)]
    notes = [recorded(num_steps, 3, tmp_path, world) for world in worlds]
    assert ([world.meetings for world in worlds], list(map(len, notes))) == ([num_meetings] * 3, [1, 0, 0])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "operators.txt", *(f"rank-{rank}.pt.trace.json" for rank in range(3))]


def test_files_of_an_earlier_start_are_removed(tmp_path):
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/rank-3.pt.trace.json").write_text("of a start on four processes")
    recorded(1, 1, tmp_path / "profile", Ranks())  # this start writes nothing, so they stay
    assert (tmp_path / "profile/rank-3.pt.trace.json").exists()
    recorded(3, 1, tmp_path / "profile", Ranks())
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["operators.txt", "rank-0.pt.trace.json"]


@pytest.mark.parametrize("steps", [3, 7])
def test_what_cannot_be_written_is_a_note_at_the_end_of_a_run_and_within(steps, tmp_path):
    (tmp_path / "file").write_text("")
    assert recorded(steps, 5, tmp_path / "file/profile", Ranks()) == [
        f"profile: cannot write {tmp_path}/file/profile: Not a directory"]


def test_of_a_large_trace_there_is_no_table_and_the_note_says_so(tmp_path, monkeypatch):
    (tmp_path / "operators.txt").write_text("of an earlier start")
    monkeypatch.setattr(profile, "key_averages", lambda self: pytest.fail("takes a minute for every 200 MB"))
    monkeypatch.setattr(module, "MOST_MB", 0)
    [note] = recorded(5, 3, tmp_path, Ranks())
    assert "; operators.txt is left out above 0 MB, and this trace has " in note
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.pt.trace.json"]


@pytest.mark.parametrize("rank", [0, 1])
def test_writing_has_a_limit_of_its_own_and_is_no_part_of_a_step(tmp_path, monkeypatch, rank):
    now, limits = [1000.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("utils.rundir.clock.process_began", lambda: 1000.0)

    def write(self, path):
        limits.append(entered[-1:])
        now[0] += 1000
        open(path, "w").close()

    entered, log = [], SimpleNamespace(advance=lambda step: None)
    monkeypatch.setattr(profile, "export_chrome_trace", write)
    faults, record = SimpleNamespace(section_timeout=300), SimpleNamespace(log_every=math.inf)
    extra = EXTRA()
    extra._profile = Profile(1, tmp_path, Ranks(rank), lambda text: None)
    t = SimpleNamespace(
        clock=Clock(CPU, None), extras=Extras([extra]), log=log, total_steps=9,
        bad_samples=BadSamples("stop", None),
        watchdog=SimpleNamespace(enter=lambda doing, limit_s: entered.append((doing, limit_s))),
        config=SimpleNamespace(faults=faults, record=record),
        state=SimpleNamespace(progress=SimpleNamespace(step=5), coverage=SimpleNamespace(add=lambda *samples: None)))
    for _ in range(5):
        now[0] += 2
        log_step(t, SimpleNamespace(num_samples=4, num_tokens=0, epoch=0, counted={}), None, None)
    assert (entered, limits) == ([("writing the profile", 300)], [[("writing the profile", 300)]])
    assert t.clock.times()[0] == 10 and t.clock.record(ALONE)["samples_per_s"] == 2
    assert t.clock.shares()["logging"] > 0.9
