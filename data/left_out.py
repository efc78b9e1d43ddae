"""Training samples that a run leaves out: --without FILE.

Each stays in its place in the order of every epoch, with sample weight 0, like an image that cannot be read. Of a text
its number of tokens is known; nothing else is read of it, and what is learnt before training is learnt without it.

Tests: tests/end_to_end/test_left_out.py
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from utils.errors import UserError, some
from utils.rundir.resolved import UNSET
from utils.rundir.run import Run
from utils.settings.run_options import DataOptions


class Named(Protocol):
    """Samples of a split, which names find."""

    left_out: frozenset[int]  # indices

    def __len__(self) -> int: ...

    def plain(self, line: str) -> str:
        """The name that a line of FILE means. Raises UserError (64) if it can mean none."""

    def find(self, names: Iterable[str]) -> Mapping[str, Sequence[int]]:
        """{name: indices}, of the names that occur: a text may be cut into several samples."""


def names_of(options: DataOptions, run: Run) -> list[str]:
    """What --without lists: as the run keeps it, or at its first start as in the file. Raises UserError (64)."""
    if options.without is None:
        return []
    if run.resolved.left_out is UNSET and options.without.names is None:
        raise UserError(f"--without {options.without}: another run keeps this list; give the file")
    return list(options.without.names) if run.resolved.left_out is UNSET else run.resolved.left_out


def find_left_out(options: DataOptions, run: Run, train: Named, evaluated: Named) -> list[int]:
    """Indices into train of the samples that the run leaves out, ascending; it keeps their names from here on.

    Raises UserError (64): see find_all; or if no sample is left.
    """
    found = find_all(names_of(options, run), train, evaluated)
    indices = sorted({index for each in found.values() for index in each})
    if len(indices) == len(train):
        raise UserError("--without: it names all samples of train; leave some to learn from")
    if indices:
        if run.resolved.left_out is UNSET:
            run.note(f"{len(indices)} of the {len(train)} training samples are left out (--without)")
        run.keep(left_out=sorted(found))
    return indices


def find_all(lines: Iterable[str], train: Named, evaluated: Named) -> Mapping[str, Sequence[int]]:
    """{name: indices into train} of the samples that these lines name.

    Raises UserError (64) where one is a sample that the run is evaluated on, or none at all.
    """
    names = {train.plain(line): line for line in lines}
    found = train.find(names)
    missing = [name for name in names if name not in found]
    if of_val := evaluated.find(missing):
        raise UserError(f"{some(map(names.get, of_val))} cannot be left out: the run is evaluated on it, and learns"
                        " nothing from it; name samples of train alone")
    if missing:
        raise UserError(f"{some(map(names.get, missing))} cannot be left out: train has no such sample; correct the"
                        " file")
    return found
