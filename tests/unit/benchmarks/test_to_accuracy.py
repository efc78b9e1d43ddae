"""benchmarks/to_accuracy.py: the time to an accuracy, what a round without it counts, and who is compared."""

import sys

import pytest

from benchmarks import to_accuracy
from benchmarks.to_accuracy import Contender, best_peer
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
    assert [training(), training(), training()] == [0, 1800, 1800]  # the first one fills caches
    assert words == [["program", "--seed", seed] for seed in "012"]
    assert training.summary() == "2.0 s | 2 of 2 | 80.0 % (80.0 to 80.0)"


def test_a_round_that_misses_the_goal_counts_0_and_is_shown(trained):
    training = Contender([], goal=0.65)
    for top1 in (0.5, 0.7, 0.6):
        trained(top1)
        training()
    assert training.times == [1.0, None]
    assert training.summary() == "1.0 s | 1 of 2 | 65.0 % (60.0 to 70.0)"


def test_evaluations_are_read_as_they_are_written():
    (first_s, first), (second_s, second) = to_accuracy.evaluations([sys.executable, "-c", TRAINS])
    assert (first, second) == (0.2, 0.4) and second_s - first_s > 0.2  # four pauses, less what the reader is late


def test_a_program_that_fails_ends_the_benchmark_with_its_message():
    with pytest.raises(SystemExit, match="no such model"):
        list(to_accuracy.evaluations([sys.executable, "-c", "raise SystemExit('no such model')"]))


def test_the_best_peer_reaches_the_goal_most_often_and_then_soonest():
    found = {"ours": [9, 9, 9], "fast": [8, 0, 8], "slow": [4, 4, 4], "slower": [3, 3, 3]}
    assert best_peer(found) == ("slow", [0, 1, 2])
    assert best_peer({"ours": [9, 9], "peer": [0, 8]}) == ("peer", [1])


@pytest.mark.parametrize("row", to_accuracy.ROWS)
def test_peers_have_the_batch_and_the_epochs_of_train_py(row, tmp_path, monkeypatch):
    commands = {}
    monkeypatch.setattr(to_accuracy, "compare", lambda what, found, goal, rounds: commands.update(found))
    to_accuracy.ROWS[row](tmp_path, "bf16", 1)
    ours = settings(parse_command_line(commands.pop("ours")[2:], {}))
    for words in commands.values():
        batch, epochs = (int(words[words.index(flag) + 1]) for flag in ("--batch", "--epochs"))
        assert (batch, epochs) == (ours["global_batch_size"], ours["epochs"])
