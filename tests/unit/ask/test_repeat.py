"""Which starts of a run computed which steps, and from which checkpoint they are computed again."""

import json

import pytest

from ask.record import Part, Record, checkpoint_before, part_of, parts_of, read_run, starts_of
from utils.errors import Exit, UserError
from utils.rundir.checkpoint_folder import CheckpointFolder, name_of


def line(start, step, processes=1, **settings):
    """A line of starts.jsonl."""
    return {"start": start, "step": step, "settings": {"strategy": "ddp", **settings}, "resolved": {"pad_to": 8},
            "processes": processes}


@pytest.fixture
def record_of(tmp_path):
    """record_of(*lines, saved=()): a run of these starts that has taken ten steps, with checkpoints of some."""

    def make(*lines, saved=()):
        links = {step: {"step": step, "content": "right"} for step in saved}
        folder = CheckpointFolder(tmp_path / "checkpoints", 100, print)
        for step in saved:
            files = {"state.pt": lambda path: path.write_text("state")}
            folder.write(name_of(step, 1, False), files, None, links[step])
        return Record(tmp_path, list(lines), links, {10: {"step": 10}})

    return make


def spans(parts):
    return [(part.first, part.last, part.line["start"]) for part in parts]


def test_starts_that_agree_are_one_part(record_of):
    record = record_of(line(1, 0), line(2, 4), line(3, 7, precision="bf16"))
    assert spans(parts_of(record, 0, 9)) == [(0, 7, 2), (7, 9, 3)]
    assert spans(parts_of(record, 0, 5)) == [(0, 5, 2)] and spans(parts_of(record, 0, 4)) == [(0, 4, 1)]


def test_a_start_that_went_back_or_took_no_step_computed_what_counts(record_of):
    """The second start fell back to step 3, the fourth took no step."""
    record = record_of(line(1, 0), line(2, 3, lr=1), line(3, 8, lr=2), line(4, 9, lr=3), line(5, 9, lr=2))
    assert spans(parts_of(record, 0, 10)) == [(0, 3, 1), (3, 8, 2), (8, 10, 5)]
    record = record_of(line(1, 0), line(2, 6, lr=1), line(3, 4, lr=2))
    assert spans(parts_of(record, 0, 10)) == [(0, 4, 1), (4, 10, 3)]
    assert part_of(record, 5).line["start"] == 3 and part_of(record, 4).line["start"] == 1


def test_those_who_computed_it_are_all_named_though_they_are_one_part(record_of):
    record = record_of(line(1, 0), line(2, 4, processes=2), line(3, 7, processes=3))
    [part] = parts_of(record, 0, 6)
    assert [start["processes"] for start in starts_of(record, [part])] == [1, 2]


def test_it_begins_at_the_newest_checkpoint_up_to_the_step_before(record_of):
    record = record_of(line(1, 0), line(2, 4, lr=1), saved=(2, 4, 6))
    [part] = parts_of(record, 5, 6)
    assert (part.first, part.last, part.checkpoint.name) == (4, 6, name_of(4, 1, False))
    first, second = parts_of(record, 3, 6)
    assert (first.first, first.checkpoint.name, second.first, second.checkpoint) == (2, name_of(2, 1, False), 4, None)
    assert spans(parts_of(record, 1, 2)) == [(0, 2, 1)]


def test_damaged_and_abandoned_checkpoints_are_passed_over(record_of):
    record = record_of(line(1, 0), saved=(2, 4, 6))
    (record.path / "checkpoints" / name_of(6, 1, False) / "state.pt").write_text("other")
    record.links[4] = {"step": 4, "content": "trained again"}
    assert checkpoint_before(record, 9).name == name_of(2, 1, False)
    assert checkpoint_before(record, 1) is None


@pytest.mark.parametrize("first, last", [(9, 11), (3, 3), (4, 3), (-1, 3)])
def test_steps_that_it_has_not_taken_are_refused(record_of, first, last):
    with pytest.raises(UserError, match="has taken 10 steps; ask for steps from 1 to 10") as caught:
        parts_of(record_of(line(1, 0)), first, last)
    assert caught.value.code == Exit.USAGE


def test_steps_of_an_older_version_are_refused(record_of):
    record = record_of(line(1, 5), saved=(7,))
    for ask in (lambda: parts_of(record, 4, 8), lambda: part_of(record, 5)):
        with pytest.raises(UserError, match=r"trained the first 5 and kept too little of them; .* 6 to 10"):
            ask()
    with pytest.raises(UserError, match="has no checkpoint of steps 5 to 6 left to begin from") as caught:
        parts_of(record, 6, 8)
    assert caught.value.code == Exit.NO_INPUT
    assert spans(parts_of(record, 7, 8)) == [(7, 8, 1)] and part_of(record, 6) == Part(0, 6, record.starts[0], None)


def test_what_is_no_run_and_a_run_without_starts_are_named(tmp_path):
    with pytest.raises(UserError, match="is not the directory of a run that has begun"):
        read_run(str(tmp_path))
    (tmp_path / "auto.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match=r"has no starts\.jsonl: a version before 0\.11") as caught:
        read_run(str(tmp_path))
    assert caught.value.code == Exit.NO_INPUT
