"""Training samples that a run leaves out: --without FILE.

Each stays in its place in the order of every epoch, with sample weight 0, like an image that cannot be read. Of a text
its number of tokens is known; nothing else is read of it, and what is learnt before training is learnt without it.

Tests: tests/end_to_end/test_left_out.py
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol, runtime_checkable

from data.batch import SampleSet
from utils.errors import UserError, some
from utils.rundir.resolved import UNSET
from utils.rundir.run import Run
from utils.settings.run_options import DataOptions


@runtime_checkable
class Named(Protocol):
    """Samples of a split, which names find: `index` of a task's train_set and eval_set, if the task knows --without."""

    left_out: frozenset[int]  # indices

    def __len__(self) -> int: ...

    def called(self, index: int) -> str:
        """The name of a sample, which a run keeps."""

    def find(self, lines: Iterable[str]) -> Mapping[str, Sequence[int]]:
        """{line of FILE: indices}, of the lines that name a sample, or several: a long text is cut. Raises UserError.
        """


def named(samples: SampleSet) -> Named | None:
    """The index of a task's samples; None if the task does not know --without."""
    index = getattr(samples, "index", None)
    return index if isinstance(index, Named) else None


def require_named(options: DataOptions, samples: SampleSet) -> None:
    """Raise UserError (64) if samples are to be left out of these, and their task does not know --without."""
    if options.without and named(samples) is None:
        raise UserError("--without: this task leaves no sample out; make a table of those that stay")


def names_of(options: DataOptions, run: Run) -> Sequence[str]:
    """What --without lists: as the run keeps it, or at its first start as in the file. Raises UserError (64)."""
    if options.without is None:
        return []
    if run.resolved.left_out is not UNSET:
        return run.resolved.left_out
    if options.without.names is None:
        raise UserError(f"--without {options.without}: another run keeps this list; give the file")
    return options.without.names


def find_left_out(options: DataOptions, run: Run, train: Named, evaluated: Named) -> frozenset[int]:
    """Indices into train of the samples that the run leaves out; it keeps their names from here on.

    Raises UserError (64): see find_all; or if no sample is left. Of a list that is kept, names may be missing: the data
    are not what they were, which the run says.
    """
    lines = names_of(options, run)
    if run.resolved.left_out is not UNSET:
        return frozenset(chain(*train.find(lines).values()))
    indices = frozenset(chain(*find_all(lines, train, evaluated).values())) if lines else frozenset()
    if len(indices) == len(train):
        raise UserError("--without: it names all samples of train; leave some to learn from")
    if indices:
        run.note(f"{len(indices)} of the {len(train)} training samples are left out (--without)")
        run.keep(left_out=sorted({train.called(index) for index in indices}))
    return indices


def find_all(lines: Sequence[str], train: Named, evaluated: Named) -> Mapping[str, Sequence[int]]:
    """{line: indices into train} of the samples that these lines name.

    Raises UserError (64) where one is a sample that the run is evaluated on, or none at all.
    """
    indices_of = train.find(lines)
    missing = [line for line in lines if line not in indices_of]
    if of_val := evaluated.find(missing):
        raise UserError(f"{some(of_val)} cannot be left out: the run is evaluated on it, and learns nothing from it;"
                        " name samples of train alone")
    if missing:
        raise UserError(f"{some(missing)} cannot be left out: train has no such sample; correct the file")
    return indices_of
