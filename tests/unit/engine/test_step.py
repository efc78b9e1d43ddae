"""engine/step.py: the outcome of the last step is read once, one step later."""

from types import SimpleNamespace

import torch

from data.batch import Batch
from engine.step import Outcome, forward
from models.output import Output
from utils.numerics.precision import Precision
from utils.rundir.state import Progress

YES, NO = torch.tensor(True), torch.tensor(False)
CPU = torch.device("cpu")


def outcome_of(is_corrupted=None):
    return Outcome(SimpleNamespace(is_corrupted=is_corrupted))


def test_the_position_of_a_step_that_was_not_finite_is_returned_once():
    outcome = outcome_of()
    outcome.note(Progress(step=1), YES)
    outcome.note(Progress(step=2), NO)
    assert [outcome.pop_nonfinite() for _ in range(2)] == [Progress(step=2), None]


def test_only_the_last_step_counts_and_before_the_first_there_is_none():
    outcome, fresh = outcome_of(), outcome_of()
    outcome.note(Progress(step=1), NO)
    outcome.note(Progress(step=2), YES)
    assert (outcome.pop_nonfinite(), fresh.pop_nonfinite()) == (None, None)


def test_the_first_step_whose_sum_changed_is_kept_and_comes_first():
    """Other ranks may have received the right sum: what only this one finds is not to be acted on."""
    strategy = SimpleNamespace(is_corrupted=NO)
    outcome, found = Outcome(strategy), []
    for step, (is_usual, strategy.is_corrupted) in enumerate([(YES, NO), (NO, YES), (YES, YES), (NO, NO)]):
        outcome.note(Progress(step=step), is_usual)
        found.append((outcome.corrupted(), outcome.pop_nonfinite()))
    assert found == [(None, None)] + [(Progress(step=1), None)] * 3


def test_a_micro_batch_draws_the_same_whoever_computes_it_again():
    """A function of the seed, the step and the index in the global batch."""
    start = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(seed=3)), world=SimpleNamespace(device=CPU),
        precision=Precision("fp32", CPU), task=SimpleNamespace(forward=lambda model, batch: Output(model(), None)))

    def drawn(step, index):
        batch = Batch({}, torch.zeros(1), torch.ones(1), index)
        return float(forward(start, lambda: torch.rand(()), batch, step))

    assert drawn(5, 2) == drawn(5, 2) and len({drawn(5, 2), drawn(5, 1), drawn(4, 2)}) == 3
