"""benchmarks/to_accuracy.py: the time to an accuracy, what a round without it counts, and who is compared."""

import json
import sys

import pytest

from benchmarks import in_turn, to_accuracy
from benchmarks.to_accuracy import Contender, best_peer, summary, times_as_fast
from docs.pictures.speed import ratios_of
from utils.settings.command_line import parse_command_line
from utils.settings.config import settings

TRAINS = """
import json, pathlib, sys, time
run = pathlib.Path(sys.argv[-1])
run.mkdir()
with (run / "metrics.jsonl").open("w") as file:
    for split, top1 in (("train", 0.1), ("val", 0.2), ("train", 0.3), ("val", 0.4)):
        line = json.dumps({"split": split, "top1": top1})
        for part in (line[:9], line[9:] + "\\n"):  # a reader may come in between
            file.write(part)
            file.flush()
            time.sleep(0.1)
"""


@pytest.fixture
def trained(monkeypatch):
    """Let every training have these evaluations, one a second; the words of the trainings."""
    words = []

    def let(*top1):
        monkeypatch.setattr(to_accuracy, "evaluations", lambda given: words.append(given) or (
            (float(at_s), value) for at_s, value in enumerate(top1, start=1)))
        return words

    return let


def test_the_time_is_that_of_the_first_evaluation_that_reaches_the_goal(trained):
    words, training = trained(0.5, 0.7, 0.6, 0.8), Contender(["program"], goal=0.65)
    assert [training(), training(), training()] == [(None, 0.5), (2.0, 0.8), (2.0, 0.8)]  # the first one fills caches
    assert words == [["program", "--seed", seed] for seed in "012"]


def test_a_round_that_misses_the_goal_is_shown():
    assert summary([1.5, None, 3.5]) == "2.5 s (1.5 to 3.5) | 2 of 3"
    assert summary([None]) == "- | 0 of 1"


def test_how_much_sooner_is_a_ratio_of_medians_and_not_of_rounds():
    """The seeds of one program have nothing to do with those of another. By rounds it would be 6, 2 and 2."""
    times = {"ours": [10, 40, 20], "peer": [60, 80, 40], "late": [None, 120, None], "never": [None, None, None]}
    assert times_as_fast(times, "peer") == {"ours": [3, 1.5, 6], "peer": [1, 0.75, 1.5], "late": [0.5, 0.5, 0.5]}
    assert times_as_fast(times, "never") == {}


def test_seconds_and_accuracies_are_kept(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(in_turn, "RESULTS", tmp_path / "results.jsonl")
    trained(0.5, 0.7)
    to_accuracy.compare("to 65 %", {"ours": [], "peer": []}, 0.65, rounds=2)
    kept = json.loads((tmp_path / "results.jsonl").read_text())
    assert kept["figures"] == {"ours": [2, 2], "peer": [2, 2]} and kept["ratios"]["ours"] == [1, 1, 1]
    assert (kept["against"], kept["top1"]) == ("peer", {"ours": [0.7, 0.7], "peer": [0.7, 0.7]})


@pytest.mark.parametrize(("unit", "ours", "peer", "late"), [
    ("s, null = not reached", [10, 40, 20], [60, 80, 40], [None, 120, None]),
    ("trainings/hour, 0 = not reached", [360, 90, 180], [60, 45, 90], [0, 30, 0])])  # older lines
def test_the_picture_has_ratios_of_medians_and_says_who_missed_it(unit, ours, peer, late):
    line = {"what": "to 62 %", "unit": unit, "against": "peer", "ratios": {},
            "figures": {"ours": ours, "peer": peer, "late": late}}
    assert ratios_of(line) == {"ours": [3, 1.5, 6], "peer": [1, 0.75, 1.5], "late": "1 of 3"}
    assert ratios_of(line | {"against": "late"}) == {"ours": "3 of 3", "peer": "3 of 3", "late": "1 of 3"}


def test_evaluations_are_read_as_they_are_written():
    (first_s, first), (second_s, second) = to_accuracy.evaluations([sys.executable, "-c", TRAINS])
    assert (first, second) == (0.2, 0.4) and second_s - first_s > 0.2  # four pauses, less what the reader is late


def test_a_program_that_fails_ends_the_benchmark_with_its_message():
    with pytest.raises(SystemExit, match="no such model"):
        list(to_accuracy.evaluations([sys.executable, "-c", "raise SystemExit('no such model')"]))


def test_the_best_peer_reaches_the_goal_most_often_and_then_soonest():
    times = {"ours": [1, 1, 1], "fast": [2, None, 2], "slow": [4, 4, 4], "slower": [5, 5, 5]}
    assert best_peer(times) == "slow"
    assert best_peer({"ours": [1], "late": [None], "soon": [8]}) == "soon"


@pytest.mark.parametrize("row", to_accuracy.ROWS)
def test_peers_have_the_batch_and_the_epochs_of_train_py(row, tmp_path, monkeypatch):
    commands = {}
    monkeypatch.setattr(to_accuracy, "compare", lambda what, found, goal, rounds: commands.update(found))
    to_accuracy.ROWS[row](tmp_path, "bf16", 1)
    ours = settings(parse_command_line(commands.pop("ours")[2:], {}))
    for words in commands.values():
        batch, epochs = (int(words[words.index(flag) + 1]) for flag in ("--batch", "--epochs"))
        assert (batch, epochs) == (ours["global_batch_size"], ours["epochs"])
