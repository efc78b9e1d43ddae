"""Extras: what only watches a training, or is asked for by few. The training is the same without them.

An extra is a folder. __init__.py may hold OPTIONS, its settings (operational, not kept), and is read before torch is
imported. extra.py holds EXTRA, a class of moments (engine/training.py). README.md and tests/ are about it alone. An
extra that takes the place of a training, as --check does, is a mode: its OPTIONS name the module whose run() is called.
One that lays out what a run begins with, as --branch does, names the module whose begin() is called, and returns by
base() the settings that the command line begins with.

To delete one: `rm -r extras/NAME`, and its name in EXTRAS. With the report goes ask/report.py.
"""

from __future__ import annotations  # so that an older Python comes as far as the message

from importlib import import_module
from importlib.util import find_spec
from typing import Any

EXTRAS = (  # in the order in which they are called
    "audit",
    "notes",
    "first_batch",
    "profile",
    "card",
    "report",
    "check",
    "branch",
)


def pages() -> tuple[Any, ...]:
    """The pages of settings of the extras, for the command line. This imports no torch."""
    modules = [import_module(f"extras.{name}") for name in EXTRAS]
    return tuple(module.OPTIONS() for module in modules if hasattr(module, "OPTIONS"))


def build() -> list[Any]:
    """A new object of each extra, for one training."""
    names = [f"extras.{name}.extra" for name in EXTRAS]
    return [import_module(name).EXTRA() for name in names if find_spec(name)]
