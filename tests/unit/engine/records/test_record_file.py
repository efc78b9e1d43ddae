"""engine/records/record_file.py: size and hash of the records are those of the file, whatever it went through."""

import json

import pytest

from engine.records.record_file import RecordFile, last_records
from tests.harness.run_directory import begins_with
from utils.rundir.chain import NO_RECORDS
from utils.rundir.state import Progress

BEGIN = Progress()


def line(step, split="train"):
    return json.dumps({"split": split, "step": step})


def written_by(path, *steps, done=BEGIN, kept=NO_RECORDS):
    """What the file says of itself after these records."""
    file = RecordFile(path, done, kept)
    for step in steps:
        file.write(line(step))
    file.close()
    return file.written()


def steps_in(path):
    return [json.loads(each)["step"] for each in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def as_it_is(path):
    return begins_with(path, path.stat().st_size)


def test_the_hash_is_that_of_the_file(path):
    assert written_by(path) == NO_RECORDS == as_it_is(path)
    assert written_by(path, 1, 2) == as_it_is(path)


def test_a_resume_keeps_what_the_checkpoint_knew_and_reads_no_record(path, monkeypatch):
    kept = written_by(path, 1, 2)
    with path.open("a") as file:
        file.write(f"{line(3)}\n" + '{"split": "tr')
    monkeypatch.setattr(RecordFile, "_past", lambda self: pytest.fail("all records were read"))
    assert written_by(path, 3, 4, done=Progress(step=2), kept=kept) == as_it_is(path)
    assert steps_in(path) == [1, 2, 3, 4]


@pytest.mark.parametrize("kept", [NO_RECORDS, {"bytes": 7, "sha256": "another"}, {"bytes": 10**6, "sha256": "more"}])
def test_where_the_file_is_not_as_the_checkpoint_knew_it_the_steps_decide(path, kept):
    written_by(path, 1, 2, 3)
    assert written_by(path, 3, done=Progress(step=2), kept=kept) == as_it_is(path)
    assert steps_in(path) == [1, 2, 3]


def test_records_beyond_the_position_go_also_if_the_checkpoint_knew_them(path):
    """A version before 0.14 saved so, after a sample that could not be read."""
    kept = written_by(path, 1, 2, 3)
    assert written_by(path, 3, done=Progress(step=2), kept=kept) == as_it_is(path)
    assert steps_in(path) == [1, 2, 3]


def test_the_last_records_of_a_large_file_are_read_without_the_others(path):
    path.write_text("".join(f"{line(step)}\n" for step in range(100_000)))
    found = [record["step"] for record in last_records(path)]
    assert found == [*range(found[0], 100_000)] and found[0] > 0
