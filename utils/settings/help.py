"""What --help prints: the settings of a task, their values, and the defaults that this command would really use.

Tests: tests/unit/utils/settings/test_command_line.py
"""

import shutil
import textwrap
from dataclasses import fields
from typing import Any

from utils.settings.config import CONFIGS, FIRST, Config, flag, groups
from utils.settings.option import Facts, values_of

COLUMN, MAX_WIDTH = 28, 120  # where the words about a setting begin; a longer line is hard to read
_ABOUT = """\
usage: python train.py [settings]
       torchrun [options] train.py [settings]
       ./launch.sh [options] [settings]

Trains a model, on one process or many. The same command continues the same run."""
_FIRST = "Used most"
_MORE = """\
--task T --help shows the settings of another task, --version the version. A --config file holds settings as
`name: value` lines."""


def help_text(defaults: Config, origin: str, shows_rare: bool) -> str:
    """The text of --help, as wide as the terminal. defaults: without this command line. origin: of them, in words."""
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    lines = [_ABOUT, "", *textwrap.wrap(f"Settings of --task {defaults.run.task}. {origin}", width)]

    # what is used most comes first
    sections: dict[str, list[tuple[Any, Any]]] = {_FIRST: []}  # (setting, its default)
    for group in groups(defaults):
        for item in fields(group):
            title = _FIRST if item.name in FIRST else type(group).__doc__
            sections.setdefault(title, []).append((item, getattr(group, item.name)))
    sections[_FIRST].sort(key=lambda entry: FIRST.index(entry[0].name))

    # each section, without rare settings
    num_rare = 0
    for title, entries in sections.items():
        shown = [(item, default) for item, default in entries if shows_rare or not item.metadata["facts"].rare]
        num_rare += len(entries) - len(shown)
        lines += ["", title] if shown else []
        for item, default in shown:
            lines += _entry(item.name, item.type, item.metadata["facts"], default, width)
    more = f"--help-all shows {num_rare} more, which are rarely needed. {_MORE}" if num_rare else _MORE
    return "\n".join([*lines, "", *textwrap.wrap(more, width)])


def _entry(name: str, kind: Any, known: Facts, default: Any, width: int) -> list[str]:
    """A setting, its values, the words about it, its default."""
    # the flag
    values = f"{{{','.join(CONFIGS)}}}" if name == "task" else values_of(kind, known)
    switch = f"{flag(name)}, {flag(f'no_{name}')}" if default is True else flag(name)
    left = f"  {switch} {values}".rstrip()

    # the default
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    about = known.help if default in (None, "") or default is False else f"{known.help} (default: {shown})"

    # side by side
    right = textwrap.wrap(about, width - COLUMN, break_on_hyphens=False)
    lines = [f"{left:{COLUMN - 2}}  {right.pop(0)}"] if len(left) <= COLUMN - 2 else [left]
    return lines + [" " * COLUMN + line for line in right]

