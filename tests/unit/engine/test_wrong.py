"""engine/wrong.py: all ranks decide alike about what some of them saw of a step."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import wrong
from engine.step import Facts
from engine.wrong import end_if_wrong, void_steps
from utils.errors import Exit, UserError
from utils.rundir.state import Progress
from utils.strategies.base import Strategy

FINITE, VOID = (True, True, True, False, "1"), (False, False, True, False, "1")
USUAL = (False, True, True, False, "32768")
OWN, CORRUPTED = (False, False, False, False, "1"), (False, False, True, True, "1")


def training(*steps, raised=("wrong",), skipped=0, max_nonfinite=0):
    """A Training before step 8 + len(steps): steps[k][rank] is what the rank saw of step 8 + k. It is rank 0."""
    ranks = len(steps[0])
    by_rank = [[Facts(f"rank {rank} on host{rank}", *facts[rank]) for facts in steps] for rank in range(ranks)]
    flags = SimpleNamespace(wrong="wrong" in raised, bad_sample="bad_sample" in raised, exchange=lambda: None,
                            wait=lambda: None)
    t = SimpleNamespace(
        done=[], flags=flags, strategy=Strategy,
        world=SimpleNamespace(gather=lambda value: by_rank), run=SimpleNamespace(path=Path("runs/my run")),
        outcome=SimpleNamespace(seen=[(Progress(step=7 + k), facts) for k, facts in enumerate(by_rank[0])],
                                position=Progress(step=6 + len(steps))),
        state=SimpleNamespace(progress=Progress(step=7 + len(steps), skipped=skipped)),
        config=SimpleNamespace(faults=SimpleNamespace(max_nonfinite=max_nonfinite)))
    t.state.go_back = lambda progress: setattr(t.state, "progress", progress)
    t.log = SimpleNamespace(note=t.done.append)
    t.precision = SimpleNamespace(undo=lambda: t.done.append("undo"))
    t.bad_samples = SimpleNamespace(stop=lambda world: t.done.append("stop"))
    return t


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    monkeypatch.setattr(wrong, "command", str)
    monkeypatch.setattr(wrong, "save", lambda t: t.done.append(t.state.progress))
    monkeypatch.setattr(wrong, "wait_for_save", lambda t: t.done.append("wait"))


def ended(t):
    with pytest.raises(UserError) as ending:
        end_if_wrong(t)
    return ending.value.code, str(ending.value)


# --- 71


@pytest.mark.parametrize("step, named", [
    ((FINITE, VOID, FINITE), "rank 1 on host1 is wrong"),
    ((FINITE, VOID, VOID), "rank 0 on host0 is wrong"),
    ((FINITE, VOID), "rank 0 on host0 or rank 1 on host1 is wrong"),
    ((USUAL, USUAL, (*USUAL[:-1], "16384")), "rank 2 on host2 is wrong")])
def test_ranks_that_disagree_end_with_71_and_the_name_of_the_odd_one(step, named):
    code, text = ended(training((FINITE,) * len(step), step, max_nonfinite=5))
    assert code == Exit.HARDWARE and named in text
    assert text.startswith("the ranks disagree about optimizer step 9: ")


def test_a_sum_that_changed_comes_before_what_its_receivers_make_of_it():
    code, text = ended(training((FINITE, CORRUPTED, FINITE), (VOID, VOID, VOID)))
    assert code == Exit.HARDWARE and "sum of the gradients of optimizer step 8 is" in text
    assert "its checksum is wrong on rank 1 on host1;" in text


def test_ranks_that_disagree_end_with_71_before_a_bad_sample_is_saved():
    t = training((FINITE, VOID), raised=("bad_sample",))
    assert ended(t)[0] == Exit.HARDWARE and t.done == []


# --- 80


ASK = ("its samples, the highest loss first: python -m ask.replay 'runs/my run' --step 8;"
       " --grad-norms")


def test_a_gradient_that_is_not_finite_is_80_with_step_rank_and_command():
    code, text = ended(training((VOID, OWN)))
    assert code == Exit.DIVERGED and "--max-nonfinite; " in text and ASK in text
    assert text.startswith("the gradient of optimizer step 8 is not finite; it comes from rank 1 on host1; the"
                           " training diverged")


@pytest.mark.parametrize("step, cause", [
    ((OWN, VOID), "it comes from rank 0 on host0"), ((OWN, OWN), "it comes from rank 0 on host0, rank 1 on host1"),
    ((VOID, VOID), "the losses are finite")])
def test_the_ranks_whose_own_part_was_not_finite_are_named(step, cause):
    t = training(step, max_nonfinite=1)
    end_if_wrong(t)
    assert t.done == [f"the gradient of optimizer step 8 is not finite; {cause}; the step changed nothing"
                      f" (--max-nonfinite: 1 of 1); {ASK} adds the norm of each one's gradient"]


def test_as_many_steps_as_max_nonfinite_says_are_gone_over_with_a_note():
    t = training((VOID, VOID), (FINITE, FINITE), skipped=1, max_nonfinite=2)
    end_if_wrong(t)
    assert t.state.progress == Progress(step=9, skipped=2)
    assert len(t.done) == 1 and "--max-nonfinite: 2 of 2" in t.done[0]


def test_one_more_is_80():
    assert ended(training((VOID, VOID), (VOID, VOID), skipped=1, max_nonfinite=2))[0] == Exit.DIVERGED


@pytest.mark.parametrize("step, raised", [((FINITE, FINITE), ["wrong"]), ((USUAL, USUAL), ["wrong"]),
                                          ((VOID, VOID), [])])
def test_of_a_usual_step_and_without_a_flag_nothing_is_said(step, raised):
    t = training(step, raised=raised)
    end_if_wrong(t)
    assert (t.state.progress, t.done) == (Progress(step=8), [])


def test_a_step_is_judged_once():
    t = training((VOID, VOID))
    assert ([at for at, _ in void_steps(t)], t.outcome.seen) == ([Progress(step=7)], [])


# --- 65


def test_a_step_made_void_by_an_unreadable_sample_is_saved_as_before():
    t = training((FINITE, FINITE), (VOID, OWN), raised=["wrong", "bad_sample"])
    end_if_wrong(t)
    assert t.done == ["undo", Progress(step=8), "wait", "stop"]


def test_a_step_that_was_gone_over_before_it_counts_in_what_is_saved():
    t = training((VOID, OWN), (VOID, OWN), raised=["wrong", "bad_sample"], max_nonfinite=1)
    end_if_wrong(t)
    assert t.done[1:] == ["undo", Progress(step=8, skipped=1), "wait", "stop"]
