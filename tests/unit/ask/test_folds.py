"""What ask.folds does between its runs and after them; a script that trains nothing stands in for train.py."""

import os
import signal
from types import SimpleNamespace

import pytest

from ask import folds
from utils.errors import SIGNALS, Exit, UserError
from utils.settings.config import CONFIGS, with_values

RUN = """
import os, signal, sys
signal.signal({number}, signal.SIG_IGN)  # it has finished its work
with open({log!r}, "a") as file:
    file.write("run\\n")
if len(open({log!r}).readlines()) == {last}:
    os.kill(os.getppid(), {number})
"""


@pytest.fixture
def handlers(monkeypatch):
    """Those of ask.folds, until the test ends; no signal has come, and no run was started."""
    monkeypatch.setattr(folds, "SIGNALLED", [])
    monkeypatch.setattr(folds, "RUNNING", [])
    before = {number: signal.getsignal(number) for number in SIGNALS}
    folds.listen()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def config(tmp_path):
    """Two classes of twelve texts."""
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(12)))
    return lambda **values: with_values(CONFIGS["text-classification"](), {"data": str(tmp_path / "t.csv"), **values})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("last", [1, 3])
def test_a_signal_as_a_run_ends_starts_no_other_and_reports_nothing(
        handlers, config, tmp_path, monkeypatch, capsys, number, last):
    script, log = tmp_path / "run.py", tmp_path / "log"
    script.write_text(RUN.format(number=int(number), log=str(log), last=last))
    monkeypatch.setattr(folds, "TRAIN", script)
    given, words = folds.begin(["--folds", "3", "--output", str(tmp_path), "--"])
    assert folds.main(given, words, [config()]) == Exit.STOPPED
    assert log.read_text() == "run\n" * last and "the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_run_ends_it_in_words(handlers, config, monkeypatch, tmp_path, capsys, number):
    monkeypatch.setattr(folds, "read_samples", lambda config: os.kill(os.getpid(), number))
    given, words = folds.begin(["--output", str(tmp_path / "out"), "--"])
    with pytest.raises(SystemExit) as caught:
        folds.main(given, words, [config()])
    assert (caught.value.code, (tmp_path / "out").exists()) == (Exit.STOPPED, False)
    assert capsys.readouterr().err == "folds: stopped before its first run; the same command starts it\n"


@pytest.mark.parametrize("most, is_refused", [(11, True), (12, False)])
def test_folds_too_large_for_rows_are_refused_before_anything_starts(
        handlers, config, found, monkeypatch, most, is_refused):
    """Six texts x two labels: models.metrics.labels writes no rows above MAX_SCORES."""
    monkeypatch.setattr(folds, "MAX_SCORES", most)
    if is_refused:
        with pytest.raises(UserError, match="6 samples x 2 labels, and above 11 a run writes no row") as caught:
            found(rows(0), multi_label=True)
        assert caught.value.code == Exit.USAGE and "give more folds" in str(caught.value)
    else:
        found(rows(0), multi_label=True)


def rows(doubted, number=12):
    """The predictions of all samples. doubted: how many of them have another label."""
    return [{"sample": i, "seed": 0, "fold": 1, "input": f"text {i}", "label": "ab"[i % 2],
             "prediction": "ab"[(i + (i < doubted)) % 2], "probability": "0.995000",
             "loss": "4.600000" if i < doubted else "0.010000"} for i in range(number)]


@pytest.fixture
def found(config, tmp_path, monkeypatch, capsys):
    """found(rows, **settings): what main says of runs that are trained already, and the path of the list."""
    def found(predictions, **values):
        monkeypatch.setattr(folds.Fold, "train", lambda fold: fold.run.mkdir(parents=True, exist_ok=True) or 0)
        monkeypatch.setattr(folds.Fold, "figures", lambda fold: {"top1": 0.5})
        monkeypatch.setattr(folds.Fold, "predictions", lambda fold: predictions[fold.number - 1::2])
        given, words = folds.begin(["--folds", "2", "--output", str(tmp_path), "--"])
        assert folds.main(given, words, [config(**values)]) == 0
        [folder] = tmp_path.glob("folds-*")
        return capsys.readouterr().out, folder / "mislabelled.csv"
    return found


@pytest.mark.parametrize("doubted, too_many", [(1, False), (2, False), (3, True)])
def test_a_list_of_more_than_a_fifth_of_the_labels_is_called_meaningless(handlers, found, doubted, too_many):
    said, path = found(rows(doubted))
    assert len(path.read_text().splitlines()) == 1 + doubted
    assert ("do not trust this list" in said, "no label is doubted" in said) == (too_many, False)


def test_a_list_goes_when_no_label_is_doubted_any_more(handlers, found):
    assert found(rows(1))[1].exists()
    said, path = found(rows(0))
    assert "no label is doubted" in said and not path.exists() and not path.with_suffix(".json").exists()


def test_no_label_is_doubted_by_a_loss_that_gives_no_probability(handlers, found):
    said, path = found(rows(1), loss="bce")
    assert "with --loss bce" in said and not path.exists()


@pytest.mark.parametrize(("code", "words"), [
    (Exit.STOPPED, "75; the same"), (137, "137; the same"), (Exit.LOST_PEERS, "76; the same"),
    (Exit.BAD_DATA, "65; correct what it says, and the same")])
def test_a_run_that_fails_ends_it_with_a_way_out(handlers, config, tmp_path, monkeypatch, capsys, code, words):
    (script := tmp_path / "run.py").write_text(f"import sys\nsys.exit({int(code)})\n")
    monkeypatch.setattr(folds, "TRAIN", script)
    given, settings = folds.begin(["--folds", "3", "--output", str(tmp_path), "--"])
    assert folds.main(given, settings, [config()]) == code
    assert f"exit code {words} command continues" in capsys.readouterr().err


@pytest.mark.parametrize("count, are_differences, low, high", [
    (4, False, None, None), (5, False, True, True), (5, True, False, False)])
def test_an_interval_needs_five_runs_and_a_share_stays_between_0_and_1(count, are_differences, low, high):
    """Of a difference it does not; nor of a figure that nobody knows."""
    fold = SimpleNamespace(indices=range(20), parts={"train": range(80)})
    rows = folds.estimates([{"top1": float(each % 2), "own": float(each % 2)} for each in range(count)], fold,
                           are_differences)
    top1, own = ({name: row.get(name) for name in ("low", "high")} for row in rows)
    assert top1 == ({"low": None, "high": None} if low is None else {"low": 0, "high": 1} if low else own)
    assert low is None or (own["low"] < 0 and own["high"] > 1)
