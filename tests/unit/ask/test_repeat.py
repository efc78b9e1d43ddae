"""Which starts of a run computed which steps, and from which checkpoint they are computed again."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ask.record import (
    Part,
    Record,
    checkpoint_before,
    last_start,
    part_of,
    parts_of,
    read_records,
    read_run,
    read_trained,
    starts_of,
)
from utils.errors import Exit, UserError
from utils.rundir.chain import digest_of
from utils.rundir.checkpoint_folder import CheckpointFolder, name_of

ALONE = SimpleNamespace(on_rank_zero=lambda work, **_: work())  # a world of one process


def line(start, step, processes=1, **settings):
    """A line of starts.jsonl."""
    return {"start": start, "step": step, "settings": {"task": "masked-lm", "strategy": "ddp", **settings},
            "resolved": {"pad_to": 8, "device": "cpu", "data": "fingerprint"},
            "processes": processes}


@pytest.fixture
def record_of(tmp_path):
    """record_of(*lines, saved=()): a run of these starts that has taken ten steps, with checkpoints of some."""

    def make(*lines, saved=()):
        links = {step: {"step": step, "start": 1, "awaits_evaluation": False, "content": "right"} for step in saved}
        folder = CheckpointFolder(tmp_path / "checkpoints", 100, print)
        for step in saved:
            files = {"state.pt": lambda path: path.write_text("state")}
            folder.write(name_of(step, 1, False), files, None, links[step])
        return Record(tmp_path, None, list(lines), links, reached=10)

    return make


def spans(parts):
    return [(part.first, part.last, part.line["start"]) for part in parts]


def test_starts_that_agree_are_one_part(record_of):
    record = record_of(line(1, 0), line(2, 4), line(3, 7, precision="bf16"))
    assert spans(parts_of(record, 0, 9, ALONE)) == [(0, 7, 2), (7, 9, 3)]
    assert spans(parts_of(record, 0, 5, ALONE)) == [(0, 5, 2)] and spans(parts_of(record, 0, 4, ALONE)) == [(0, 4, 1)]


def test_a_start_that_went_back_or_took_no_step_computed_what_counts(record_of):
    """The second start fell back to step 3, the fourth took no step."""
    record = record_of(line(1, 0), line(2, 3, lr=1), line(3, 8, lr=2), line(4, 9, lr=3), line(5, 9, lr=2))
    assert spans(parts_of(record, 0, 10, ALONE)) == [(0, 3, 1), (3, 8, 2), (8, 10, 5)]
    record = record_of(line(1, 0), line(2, 6, lr=1), line(3, 4, lr=2))
    assert spans(parts_of(record, 0, 10, ALONE)) == [(0, 4, 1), (4, 10, 3)]
    assert part_of(record, 5).line["start"] == 3 and part_of(record, 4).line["start"] == 1


def test_those_who_computed_it_are_all_named_though_they_are_one_part(record_of):
    record = record_of(line(1, 0), line(2, 4, processes=2), line(3, 7, processes=3))
    [part] = parts_of(record, 0, 6, ALONE)
    assert [start["processes"] for start in starts_of(record, [part])] == [1, 2]


def test_it_begins_at_the_newest_checkpoint_up_to_the_step_before(record_of):
    record = record_of(line(1, 0), line(2, 4, lr=1), saved=(2, 4, 6))
    [part] = parts_of(record, 5, 6, ALONE)
    assert (part.first, part.last, part.checkpoint.name) == (4, 6, name_of(4, 1, False))
    first, second = parts_of(record, 3, 6, ALONE)
    assert (first.first, first.checkpoint.name, second.first, second.checkpoint) == (2, name_of(2, 1, False), 4, None)
    assert spans(parts_of(record, 1, 2, ALONE)) == [(0, 2, 1)]


def test_damaged_and_abandoned_checkpoints_are_passed_over(record_of):
    record = record_of(line(1, 0), saved=(2, 4, 6))
    (record.path / "checkpoints" / name_of(6, 1, False) / "state.pt").write_text("other")
    record.links[4] = record.links[4] | {"content": "trained again"}
    assert checkpoint_before(record, 9, ALONE).name == name_of(2, 1, False)
    assert checkpoint_before(record, 1, ALONE) is None


@pytest.mark.parametrize("first, last", [(9, 11), (3, 3), (4, 3), (-1, 3)])
def test_steps_that_it_has_not_taken_are_refused(record_of, first, last):
    with pytest.raises(UserError, match="has taken 10 steps; ask for steps from 1 to 10") as caught:
        parts_of(record_of(line(1, 0)), first, last, ALONE)
    assert caught.value.code == Exit.USAGE


def test_a_start_that_is_missing_is_damage_and_no_older_version(tmp_path):
    (tmp_path / "auto.json").write_text(json.dumps({}))
    (tmp_path / "chain.jsonl").write_text('{"step": 0, "link": "abc"}\n')
    with pytest.raises(UserError, match=r"starts\.jsonl is damaged") as caught:
        last_start(str(tmp_path))
    assert caught.value.code == Exit.IO


def test_a_step_that_ended_the_run_and_is_on_no_record_can_be_asked_for(record_of):
    record = replace(record_of(line(1, 0)), reached=13)
    assert spans(parts_of(record, 12, 13, ALONE)) == [(0, 13, 1)]


@pytest.mark.parametrize("lines", [None, [line(1, 5)], []])
def test_what_is_no_run_and_one_that_an_older_version_began_are_named(tmp_path, lines):
    with pytest.raises(UserError, match="is not the directory of a run that has begun") as caught:
        last_start(str(tmp_path))
    assert caught.value.code == Exit.NO_INPUT
    (tmp_path / "auto.json").write_text(json.dumps({}))
    if lines is not None:
        (tmp_path / "starts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    with pytest.raises(UserError, match=r"a version before 0\.11 began this run") as caught:
        last_start(str(tmp_path))
    assert caught.value.code == Exit.NO_INPUT


@pytest.mark.parametrize("damage", ["{", "{}", "[]", "5"])
@pytest.mark.parametrize("name", ["starts.jsonl", "metrics.jsonl"])
def test_a_line_that_is_no_record_is_an_error_that_names_the_file(tmp_path, name, damage):
    (tmp_path / "auto.json").write_text(json.dumps({}))
    (tmp_path / "starts.jsonl").write_text(f"{json.dumps(line(1, 0))}\n")
    with (tmp_path / name).open("a") as file:
        file.write(f"{damage}\n")
    if name == "metrics.jsonl" and damage == "{":  # as a kill leaves it
        assert read_run(str(tmp_path), ALONE).reached == 0
        return
    with pytest.raises(UserError, match=name.replace(".", r"\.")) as caught:
        last_start(str(tmp_path))
        read_run(str(tmp_path), ALONE)
    assert caught.value.code == Exit.IO


def test_what_a_run_has_written_down_is_read_without_times(tmp_path):
    (tmp_path / "starts.jsonl").write_text(f"{json.dumps(line(1, 0))}\n")
    (tmp_path / "metrics.jsonl").write_text(
        '{"split": "train", "step": 3, "loss": 0.1, "time": "now"}\n{"split": "val", "step": 4, "loss": null}\n')
    record = read_run(str(tmp_path), ALONE, "/elsewhere")
    assert record.last_step == 4 and read_records(record, ALONE, "val") == [{"split": "val", "step": 4, "loss": None}]
    assert read_trained(record, ALONE, [Part(0, 3, {}, None)]) == {3: {"split": "train", "step": 3, "loss": 0.1}}
    assert (record.data, record.starts) == ("/elsewhere", [line(1, 0)])


def test_links_that_the_chain_lost_in_a_kill_count_edited_ones_do_not(tmp_path):
    links = [{"step": step, "start": 1, "awaits_evaluation": False} for step in (2, 4, 6)]
    links = [link | {"link": digest_of(link)} for link in links]
    folder = CheckpointFolder(tmp_path / "checkpoints", 9, print)
    folder.write(name_of(6, 1, False), {"state.pt": lambda path: path.write_text("state")}, None, links[2])
    edited = links[1] | {"start": 2}
    (tmp_path / "chain.jsonl").write_text("".join(f"{json.dumps(link)}\n" for link in (links[0], edited)))
    assert read_run(str(tmp_path), ALONE).links == {2: links[0], 6: links[2]}
