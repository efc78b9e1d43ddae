"""benchmarks/in_turn.py: contenders take turns, and ratios are made round by round."""

import json
from importlib.metadata import version

from benchmarks import in_turn as module
from benchmarks.in_turn import in_turn, report


def test_contenders_take_turns_and_the_first_round_does_not_count():
    order = []

    def contender(name, figures):
        return lambda: order.append(name) or figures.pop(0)

    found = in_turn({"ours": contender("ours", [9, 1, 2]), "theirs": contender("theirs", [9, 3, 4])}, rounds=2)
    assert order == ["ours", "theirs"] * 3 and found == {"ours": [1, 2], "theirs": [3, 4]}


def test_ratios_are_those_of_each_round_and_are_kept_with_the_hardware(tmp_path, monkeypatch, capsys):
    """A machine that becomes slower changes no ratio."""
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results.jsonl")
    for _ in range(2):
        report("input", "images/s", {"ours": [30, 20, 6], "theirs": [10, 10, 2]}, against="theirs")
    assert "| ours | 20 | 3.00 (2.00 to 3.00) |" in capsys.readouterr().out
    first, second = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert first["ratios"] == second["ratios"] == {"ours": [3, 2, 3], "theirs": [1, 1, 1]}
    assert first["hardware"] == module.hardware() and first["versions"]["torch"] == version("torch")
    assert first["rounds"] == 3
