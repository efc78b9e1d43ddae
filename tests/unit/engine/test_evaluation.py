"""engine/evaluation.py: --eval-only says which weights it evaluates."""

from types import SimpleNamespace

import pytest
from torch import nn

from engine import evaluation
from engine.evaluation import evaluate_only
from utils.numerics.precision import Precision
from utils.rundir.state import Progress
from utils.settings.config import ImageClassificationConfig
from utils.settings.run_options import RunOptions


@pytest.mark.parametrize("is_average, words", [
    (False, "evaluating the best checkpoint of RUN, at step 7"),
    (True, "evaluating the average of the weights in the best checkpoint of RUN, at step 7")])
def test_it_says_whether_it_evaluates_the_average_of_the_weights(world, monkeypatch, capsys, is_average, words):
    found = SimpleNamespace(load_best=lambda strategy: (Progress(step=7), is_average))
    monkeypatch.setattr(evaluation, "Checkpoints", lambda *arguments: found)
    monkeypatch.setattr(evaluation, "Evaluation", lambda *arguments: SimpleNamespace(run=lambda: {"loss": 1.0}))
    run = SimpleNamespace(is_there=True, path="RUN", note=(notes := []).append, resolve=lambda name, given, derive: 64)
    task = SimpleNamespace(build_model=lambda initial_weights: nn.Linear(1, 1), train_set=range(9))
    start = SimpleNamespace(config=ImageClassificationConfig(run=RunOptions(eval_only=True)), world=world, run=run,
                            task=task, watchdog=SimpleNamespace(wants_to_stop=bool),
                            precision=Precision("fp32", world.device))
    evaluate_only(start)
    assert notes == [words] and '"loss": 1.0' in capsys.readouterr().out
