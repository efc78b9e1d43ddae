"""ask/verify.py and ask/integrity.py without a training: what is computed again, and what a link must follow."""

from types import SimpleNamespace

import pytest

from ask.again import Again, key_of
from ask.integrity import _of_chain
from ask.record import Part, Record, starts_of
from ask.verify import not_promised, parts_to_verify
from utils.errors import Exit, UserError
from utils.rundir.chain import digest_of, valid_links

ALONE = SimpleNamespace(on_rank_zero=lambda work, **_: work())  # a world of one process


def start(number, step, **settings):
    return {"start": number, "step": step, "settings": settings, "resolved": {}}


def link(step, number, awaits=False):
    return {"step": step, "start": number, "awaits_evaluation": awaits, "content": f"content {step}"}


def record_of(tmp_path, starts, links):
    return Record(tmp_path, None, starts, {each["step"]: each for each in links})


def stretches(parts):
    return [(part.first, part.last, part.line["start"]) for part in parts]


# --- which steps


@pytest.mark.parametrize("asked, expected", [
    ((None, None), (0, 20)), ((None, 7), (0, 10)), ((None, 10), (0, 10)), ((3, 11), (0, 20)), ((None, 0), (0, 20))])
def test_from_the_beginning_to_the_next_link(tmp_path, asked, expected):
    record = record_of(tmp_path, [start(1, 0)], [link(0, 1), link(10, 1), link(20, 1)])
    [part] = parts_to_verify(record, *asked, ALONE)
    assert (part.first, part.last) == expected


@pytest.mark.parametrize("asked, links", [((None, 30), [0, 20]), ((None, None), [0]), ((20, None), [0, 20])])
def test_where_nothing_was_saved_is_an_error(tmp_path, asked, links):
    record = record_of(tmp_path, [start(1, 0)], [link(step, 1) for step in links])
    with pytest.raises(UserError) as raised:
        parts_to_verify(record, *asked, ALONE)
    assert raised.value.code == Exit.USAGE


def test_a_step_that_the_next_start_evaluated_belongs_to_two_parts(tmp_path):
    starts = [start(1, 0, best="loss"), start(2, 10, best="top1")]
    record = record_of(tmp_path, starts, [link(0, 1), link(10, 2), link(20, 2)])
    assert stretches(parts_to_verify(record, None, None, ALONE)) == [(0, 10, 1), (10, 20, 2)]
    assert stretches(parts_to_verify(record, None, 10, ALONE)) == [(0, 10, 1), (10, 10, 2)]


def test_a_start_that_only_evaluated_is_a_part_if_its_settings_are_others(tmp_path):
    links = [link(0, 1), link(10, 2), link(20, 3)]
    others = [start(1, 0), start(2, 10, best="loss"), start(3, 10, best="top1")]
    alike = [start(1, 0), start(2, 10), start(3, 10, best="top1")]
    assert stretches(parts_to_verify(record_of(tmp_path, others, links), None, None, ALONE)) == [
        (0, 10, 1), (10, 10, 2), (10, 20, 3)]
    assert stretches(parts_to_verify(record_of(tmp_path, alike, links), None, None, ALONE)) == [(0, 10, 2), (10, 20, 3)]


def test_a_start_that_did_nothing_is_no_part(tmp_path):
    starts = [start(1, 0), start(2, 10, best="loss"), start(3, 10, best="top1")]
    record = record_of(tmp_path, starts, [link(0, 1), link(10, 3), link(20, 3)])
    assert stretches(parts_to_verify(record, None, None, ALONE)) == [(0, 10, 1), (10, 20, 3)]


def test_starts_whose_steps_were_trained_again_do_not_count(tmp_path):
    starts = [start(1, 0), start(2, 10), start(3, 8), start(4, 15)]
    record = record_of(tmp_path, starts, [link(0, 1), link(8, 1), link(15, 3), link(20, 4)])
    assert [each["start"] for each in starts_of(record, [Part(0, 20, starts[3], None)])] == [1, 3, 4]
    assert [each["start"] for each in starts_of(record, [Part(0, 12, starts[2], None)])] == [1, 3]


@pytest.mark.parametrize("device, deterministic, compiled, expected", [
    ("cpu", False, False, []), ("xpu", True, False, []), ("xpu", False, False, ["without --deterministic"]),
    ("cpu", False, True, ["with --compile"])])
def test_bits_that_need_not_repeat_are_no_evidence(device, deterministic, compiled, expected):
    line = start(1, 0, deterministic=deterministic, compile=compiled) | {"resolved": {"device": device}}
    assert [*not_promised(line)] == expected


# --- what a link must be


def again_of(tmp_path, links, apart=(), last=9, **more):
    """Steps 1 to `last`, computed again; a run without any settings."""
    notes, record = [], Record(tmp_path, None, [], {each["step"]: each for each in links}, **more)
    place = SimpleNamespace(folder=tmp_path)
    return Again(place, record, [Part(0, last, start(1, 0), None)], [*apart], notes.append), notes


def test_other_content_or_another_model_differs(tmp_path):
    expected = link(3, 1) | {"model": {"a": "1", "b": "2"}}
    again, notes = again_of(tmp_path, [expected])
    again.compare(expected, key_of(expected))
    assert (again.seen, notes) == ({(3, False): expected}, ["step 3: the same, content 3"])
    for other, words in (({"content": "another"}, "step 3 differs: the content"),
                         ({"model": {"a": "1", "b": "3", "c": "4"}}, "step 3 differs: RUN/model/b, RUN/model/c"),
                         ({"model": {}}, "step 3 differs: RUN/model/a, RUN/model/b")):
        with pytest.raises(UserError, match=words) as raised:
            again.compare(expected | other, key_of(expected))
        assert raised.value.code == Exit.DIFFERS


def test_every_link_of_the_steps_is_required_whichever_start_it_names(tmp_path):
    """Also of a copy before an evaluation, and of the end."""
    links, copy = [link(0, 1), link(3, 7), link(9, 1)], link(6, 2, awaits=True)
    for missing in ((3, False), (6, True), (9, False)):
        again, _ = again_of(tmp_path, links, copies=[copy])
        again.seen.update({key: each for key, each in again.wanted.items() if key != missing})
        with pytest.raises(UserError, match=f"step {missing[0]} differs: nothing is saved there"):
            again.require_all()


RECORD = '{"split": "val", "step": 9, "top1": 0.25, "time": "now"}\n'


def differing(tmp_path, then, here, differ=()):
    """What differs between the lines of a run and those computed here, or ""."""
    links = []
    for folder, lines in ((tmp_path, then), (tmp_path / "run", here)):
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text(lines)
        links.append(link(9, 1) | {"metrics": {"bytes": len(lines)}})
    again, _ = again_of(tmp_path, links[:1], [(start(1, 0), dict(differ))])
    again.seen[9, False] = links[1]
    return again.differing_record()


@pytest.mark.parametrize("then, words", [
    ('{"split": "test", "step": 9, "top1": 0.99, "time": "now"}\n' + RECORD, "the test record of step 9 differs"),
    (RECORD.replace('"top1": 0.25', '"top1": 0.99, "top1": 0.25'), "differs: split unreadable in the run, val here"),
    (RECORD.replace('"top1": 0.25', '"top1":  0.25'), "differs: split unreadable in the run, val here"),
    (RECORD.replace("0.25", "0.26"), "the val record of step 9 differs: top1 0.26 in the run, 0.25 here"),
    (RECORD + RECORD, "the val record of step 9 differs: split val in the run, None here"),
    ("no record\n" + RECORD, "the unreadable record of step ? differs: split"),
    ("", "the val record of step 9 differs: split None in the run, val here")])
def test_every_line_must_be_one_that_the_log_writes(tmp_path, then, words):
    assert words in differing(tmp_path, then, RECORD)


def test_times_are_another_runs(tmp_path):
    assert differing(tmp_path, RECORD, RECORD.replace("now", "later")) == ""


@pytest.mark.parametrize("differ, found", [
    ({}, "differs: brier None in the run, 0.5 here"), ({"the program": "another program"}, "")])
def test_a_figure_that_only_another_program_computes_is_no_difference(tmp_path, differ, found):
    words = differing(tmp_path, RECORD, RECORD.replace(', "time"', ', "brier": 0.5, "time"'), differ)
    assert words.endswith(found) and bool(words) == bool(found)


def chain(*steps):
    """Lines as the program writes them; (step,) = the run resumed there."""
    lines = []
    for step in steps:
        if isinstance(step, tuple):
            lines.append({"resumed": step[0]})
            continue
        before = [each["link"] for each in valid_links(lines) if each["step"] < step]
        new = link(step, 1) | {"number": len(lines), "previous": before[-1] if before else ""}
        lines.append(new | {"link": digest_of(new)})
    return lines


@pytest.mark.parametrize("steps", [(0, 2, 4, 4, 6), (0, 2, 4, (2,), 3, 4), (0, 2, (0,), (0,), 1), (5, 10, 10)])
def test_what_the_program_writes_has_no_fault(steps):
    assert [*_of_chain(chain(*steps))] == []


@pytest.mark.parametrize("without", range(7))
def test_a_line_less_is_a_fault(without):
    """But for the last one, which a kill may have kept from the file, and what the next line of its step replaces."""
    lines = chain(0, 2, 4, 4, (2,), 3, 5)
    rest = [*lines[:without], *lines[without + 1:]]
    assert bool([*_of_chain(rest)]) == (without not in (2, 3, 6))


def test_a_link_that_a_kill_kept_from_the_file_is_the_checkpoints():
    lines = chain(0, 2, 4)
    assert valid_links(lines[:2], lines[2]) == lines
    assert valid_links(lines, lines[1]) == lines  # an older one
