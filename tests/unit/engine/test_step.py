"""engine/step.py: what a rank saw of a step is read one step later, and kept until all ranks have judged it."""

from types import SimpleNamespace

import pytest
import torch

from data.batch import Batch
from engine.step import Facts, Outcome, forward
from models.output import Output
from utils.numerics.precision import Precision
from utils.rundir.state import Progress

CPU = torch.device("cpu")
ONE, NAN = torch.ones(2, dtype=torch.float64), torch.tensor([1, torch.nan], dtype=torch.float64)


@pytest.fixture
def strategy(world):
    return SimpleNamespace(world=world, is_corrupted=torch.tensor(False), is_own_finite=torch.tensor(True))


def outcome_after(strategy, *steps, precision="fp32"):
    """(losses, is_finite) of each step; read after each of them."""
    outcome, flags = Outcome(strategy, Precision(precision, CPU)), []
    for step, (losses, is_finite) in enumerate(steps):
        outcome.note(Progress(step=step), losses, torch.tensor(is_finite))
        flags.append(outcome.is_wrong())
    return outcome, flags


def test_what_is_seen_of_a_step_is_kept_for_one_step_more(strategy):
    outcome, flags = outcome_after(strategy, (ONE, True), (NAN, False), (ONE, True), (ONE, True))
    assert flags == [False, True, True, False]
    assert [at for at, _ in outcome.seen] == [Progress(step=2), Progress(step=3)]
    assert outcome.position == Progress(step=3)


def test_what_is_judged_is_forgotten_and_a_step_is_read_once(strategy):
    outcome, _ = outcome_after(strategy, (ONE, False))
    outcome.seen = []
    assert (outcome.is_wrong(), outcome.seen) == (False, [])


@pytest.mark.parametrize("losses, is_own_finite, expected", [
    (ONE, True, True), (NAN, True, False), (ONE, False, False)])
def test_a_ranks_own_part_is_its_losses_and_its_gradient(strategy, losses, is_own_finite, expected):
    strategy.is_own_finite = torch.tensor(is_own_finite)
    outcome, flags = outcome_after(strategy, (losses, True))
    [(_, facts)] = outcome.seen
    assert (facts.is_own_finite, flags) == (expected, [False])  # what counts is the sum


def test_a_sum_that_changed_is_wrong_though_it_is_finite(strategy):
    strategy.is_corrupted = torch.tensor(True)
    outcome, flags = outcome_after(strategy, (ONE, True))
    [(_, facts)] = outcome.seen
    assert flags == [True] and facts == Facts(facts.place, True, True, True, True, "1")
    assert facts.place.startswith("rank 0 on ")


def test_with_fp16_a_step_is_judged_but_usual_until_the_scale_is_below_1(strategy):
    outcome = Outcome(strategy, precision := Precision("fp16", CPU))
    precision.scaler.scale(torch.ones(()))  # it begins
    for scale, is_usual in ((65536.0, True), (0.5, False)):
        precision.scaler._scale.fill_(scale)
        outcome.note(Progress(), ONE, torch.tensor(False))
        assert outcome.is_wrong()
        assert (outcome.seen[-1][1].is_usual, outcome.seen[-1][1].loss_scale) == (is_usual, f"{scale:g}")


def test_a_micro_batch_draws_the_same_whoever_computes_it_again():
    """A function of the seed, the step and the index in the global batch."""
    start = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(seed=3)), world=SimpleNamespace(device=CPU),
        precision=Precision("fp32", CPU), task=SimpleNamespace(forward=lambda model, batch: Output(model(), None)))

    def drawn(step, index):
        batch = Batch({}, torch.zeros(1), torch.ones(1), index)
        return float(forward(start, lambda: torch.rand(()), batch, step))

    assert drawn(5, 2) == drawn(5, 2) and len({drawn(5, 2), drawn(5, 1), drawn(4, 2)}) == 3
