"""What ask.replay takes from its words, and how it says what it found."""

import json

import pytest

from ask.replay import PARSER, consequences, steps_of
from ask.samples import shortened, table, write_rows
from utils.errors import Exit, UserError


def given(*words):
    return PARSER.parse_args(["run", *words])


@pytest.mark.parametrize("words, steps", [
    (["--step", "7"], (7, 7)), (["--steps", "7:9"], (7, 9)), (["--steps", "7"], (7, 7)), (["--steps", "8:8"], (8, 8))])
def test_one_step_or_several_with_both_ends(words, steps):
    assert steps_of(given(*words)) == steps


@pytest.mark.parametrize("words", [
    [], ["--step", "0"], ["--step=-1"], ["--steps", "9:7"], ["--steps", "0:3"], ["--steps", "a:b"],
    ["--steps", "1:2:3"], ["--steps", "3:4", "--list"], ["--steps", "3:4", "--inputs-only"]])
def test_other_steps_are_refused_with_the_rule(words):
    with pytest.raises(UserError, match="give --step N") as caught:
        steps_of(given(*words))
    assert caught.value.code == Exit.USAGE


@pytest.mark.parametrize("strategy, differ, follows", [
    ("ddp", {"processes": "processes: 2 then, 3 here"}, "sums may be rounded differently"),
    ("exact", {"python": "Python: 3.11 then, 3.12 here"}, "the bits may differ: --strategy exact"),
    ("exact", {"the program": "the program: a then, b here"}, "what is computed here may be something else")])
def test_what_is_not_as_it_was_is_said_with_what_follows(strategy, differ, follows):
    [text] = consequences({"settings": {"strategy": strategy}}, differ)
    [what] = differ.values()
    assert text.startswith(f"{what}; ") and follows in text


def row(step=3, sample="/data/train/cat/1.png", **more):
    return {"step": step, "micro_batch": 0, "index": 5, "sample": sample, **more}


def test_samples_are_named_within_the_folder_that_all_share():
    folder, rows = shortened([row(), row(sample="/data/train/dog/2.png")])
    assert folder == "/data/train" and [each["sample"] for each in rows] == ["cat/1.png", "dog/2.png"]
    assert shortened([row(), row(sample="/data/train/category/2.png")])[0] == "/data/train"
    assert shortened([row()])[1][0]["sample"] == "1.png"
    assert shortened([row(sample="text 5"), row(sample="text 52")])[0] == ""


def test_the_step_is_left_out_where_there_is_one_and_pictures_always():
    assert "step" not in shortened([row(), row()])[1][0] and "step" in shortened([row(), row(step=4)])[1][0]
    assert "seen" not in shortened([row(seen="step-3-0-0.png")])[1][0]
    assert shortened([row(seen="[CLS] a text [SEP]")])[1][0]["seen"] == "[CLS] a text [SEP]"


def test_a_table_fits_a_terminal_and_says_how_much_it_leaves_out():
    rows = [row(sample=f"/{'folder/' * 20}{number}.png", seen="a text of words\n" * 9, loss=0.123456789)
            for number in range(30)]
    lines = table(rows)
    assert len(lines) == 22 and lines[-1] == "... and 10 more" and max(map(len, lines)) <= 120
    assert lines[1].split()[3].endswith("/0.png") and lines[1].split()[3].startswith("...")
    assert lines[1].endswith("0.1235") and "a text of words a" in lines[1]
    assert {len(line) for line in lines[1:-1]} == {120}
    assert table(rows[:2])[-1] == lines[2]


def test_a_table_of_many_columns_fits_too_and_says_how_many_it_leaves_out():
    """As of a regression with fifteen targets; columns of two characters would say nothing."""
    lines = table([row(**{f"target{number}_prediction": number + 0.123456 for number in range(30)})] * 3)
    assert lines[-1] == "... and 22 columns more" and max(map(len, lines)) <= 120
    assert lines[1].split()[:2] == ["3", "0"] and "7.123" in lines[1] and len(lines) == 5


def test_files_have_all_digits_and_what_is_not_finite_is_null(tmp_path):
    rows = [row(label="a,\"b\"", loss=0.1 + 0.2), row(label="c", loss=float("nan"))]
    write_rows(rows, str(tmp_path / "samples"))
    assert json.loads((tmp_path / "samples.json").read_text()) == [rows[0], rows[1] | {"loss": None}]
    assert (tmp_path / "samples.csv").read_text().splitlines() == [
        "step,micro_batch,index,sample,label,loss", '3,0,5,/data/train/cat/1.png,"a,""b""",0.30000000000000004',
        "3,0,5,/data/train/cat/1.png,c,nan"]
