"""engine/training.py: an error of an extra on rank 0 alone becomes a note, said once; one of all ranks ends the run."""

from types import SimpleNamespace

import pytest

from engine.training import Extra, Extras
from utils.errors import UserError


class Failing(Extra):
    """Fails at each moment of rank 0; in `recorded`, as its answer is read."""

    def recorded(self, record):
        yield "the first line"
        raise KeyError(record["step"])

    def finished(self, t):
        return 7

    def began(self, t):
        raise ValueError("no picture")

    exported = closed = lambda self, *about: 1 / 0


class Watching(Extra):
    """Works."""

    def recorded(self, record):
        yield "step 1"

    def finished(self, t):
        return {"its page": "here"}


@pytest.fixture
def t():
    notes = []
    return SimpleNamespace(log=SimpleNamespace(note=notes.append), notes=notes, run=SimpleNamespace(writes=True))


@pytest.mark.parametrize("moment, error", [
    (lambda extras, t: extras.recorded(t, {"step": 1}), "KeyError: 1"),
    (lambda extras, t: extras.opened(t), "no picture"),
    (lambda extras, t: extras.exported(t, 1, {}, None), "ZeroDivisionError"),
    (lambda extras, t: extras.finished(t), "TypeError"), (lambda extras, t: extras.closed(t), "ZeroDivisionError")])
def test_an_error_of_rank_0_is_noted_once_and_the_next_extra_is_called(moment, error, t):
    extras = Extras([Failing(), Watching()])
    for _ in range(2):
        moment(extras, t)
    failed = [note for note in t.notes if "failed" in note]
    assert len(failed) == 1 and error in failed[0] and failed[0].endswith("the run is whole without it")


def test_what_extras_say_is_shown_by_the_rank_that_writes(t):
    extras = Extras([Watching()])
    extras.recorded(t, None)  # of the others
    extras.recorded(t, {"step": 1})
    assert (t.notes, extras.finished(t)) == (["step 1"], {"its page": "here"})


@pytest.mark.parametrize("moment", ["opened", "summed", "stepped"])
def test_where_all_ranks_are_called_an_error_is_raised(moment, t):
    def refuse(self, *about):
        raise UserError("--audit-every 5: no")

    extras = Extras([type("Refusing", (Extra,), {moment: refuse})()])
    with pytest.raises(UserError):
        getattr(extras, moment)(t, *([None, None] if moment == "summed" else []))
