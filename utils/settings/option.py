"""What one line of the page of settings says, and how words become its value.

    lr: float | Auto = option("auto", "peak learning rate", at_least=0)
    parse(float | Auto, ["0.1"])                               # 0.1

Nothing here imports torch.
"""

import ast
import hashlib
import math
import operator
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin

from utils.errors import UserError, counted

Auto = Literal["auto"]
DEFINING, TOLERATED, OPERATIONAL = "defining", "tolerated", "operational"
PATH, NAME_OR_PATH = "path", "name or path"
OWN = Path(__file__).parents[2] / "models" / "own.py"
_BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


class Kept:
    """Why a branch of a run keeps a setting, in words."""

    AMID_EPOCH = "an epoch is cut by it"  # at the end of one it may change
    SAMPLES = "a sample would be another one"
    MODEL = "the state is that of another model"


@dataclass(frozen=True)
class Facts:
    """All that the program knows about a setting besides its name, its type and its default.

    Everything that treats settings differently asks here; a fact about a setting is written in no other place.
    """

    help: str
    kind: str = DEFINING  # DEFINING names the run; TOLERATED too, but it may change within the run; OPERATIONAL neither
    at_least: float | None = None  # bounds of a number, or of every number of a tuple
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    kept: bool = True  # in config.yaml; False = it is about one launch, not about the run
    in_file: bool = True  # may stand in a --config file
    per_node: bool = False  # may differ between the nodes of a run
    path: str = ""  # made absolute where it names the run; NAME_OR_PATH = only if it exists
    resolved: bool = False  # a run compares what the setting became (in auto.json), not the setting
    fixed: bool = False  # `auto` becomes a value at the run's first start, kept in auto.json under the setting's name
    ends_run: bool = False  # decides where the run ends
    changes_bits: bool = True  # False: TOLERATED, though the weights of the run do not depend on it
    rare: bool = False  # --help-all shows it, --help does not
    in_branch: str = ""  # see Kept; or another reason

    def broken_rule(self, value: Any) -> str:
        """The rule that `value` breaks, in words: "at least 0 and below 1". "" if it breaks none."""
        values = value if isinstance(value, tuple) else (value,)
        numbers = [number for number in values if isinstance(number, int | float)]
        if not all(abs(number) < math.inf for number in numbers):  # a NaN is not below it either
            return "finite"
        limits = {name: getattr(self, name) for name in _BOUNDS if getattr(self, name) is not None}
        if all(_BOUNDS[name](number, limit) for number in numbers for name, limit in limits.items()):
            return ""
        return " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items())


class Interval(str):
    """Optimizer steps ("1000") or a duration ("90s", "5min", "2h"): the text that the user typed, and what it means."""

    steps: float  # infinite if it is a duration
    seconds: float  # infinite if it is a number of steps

    def __new__(cls, text: str) -> Self:
        """Raises ValueError if `text` is neither."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|)", text.strip())
        if not match or (not match[2] and "." in match[1]) or float(match[1]) <= 0:
            raise ValueError(f"{text}: give a number of optimizer steps (1000) or a duration (90s, 5min, 2h)")
        interval = super().__new__(cls, text)
        interval.steps = math.inf if match[2] else int(match[1])
        interval.seconds = float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]] if match[2] else math.inf
        return interval


@cache
def own_names() -> set[str]:
    """The names in models/own.py, from the statements that fill its tables; it is read, not run: it imports torch."""
    try:
        tree = ast.parse(OWN.read_bytes())
    except SyntaxError:  # models.tasks.load_task says where
        return set()
    nodes = [[*ast.walk(statement)] for statement in ast.walk(tree)
             if isinstance(statement, ast.stmt) and not hasattr(statement, "body")]
    filling = (each for each in nodes if {"IMAGE_MODELS", "TEXT_MODELS"} & {getattr(node, "id", "") for node in each})
    keys = [key for each in filling for node in each
            for key in (node.keys if isinstance(node, ast.Dict) else [getattr(node, "slice", None)])]
    return {key.value for key in keys if isinstance(key, ast.Constant)}


def is_model_folder(name: str) -> bool:
    """Whether a --model, or a --tokenizer, is a folder on this machine. A name in models/own.py never is."""
    return name not in own_names() and Path(name).is_dir()


class Names(str):
    """A file with a name on each line, which counts for what it lists: "10 names (sha256)" is the value, wherever the
    file lies. A value that stands in config.yaml has no `names` (None): they are in auto.json.
    """

    names: tuple[str, ...] | None

    def __new__(cls, text: str) -> Self:
        """Raises UserError if `text` is neither a file with names nor such a value."""
        names = None
        if not re.fullmatch(r"\d+ names? \([0-9a-f]{16}\)", text):
            with suppress(OSError):
                names = tuple(sorted({*Path(text).read_text("utf-8", "surrogateescape").splitlines()} - {""}))
            if not names:
                raise UserError(f"{text} must be a file with a name on each line")
            digest = hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()
            text = f"{counted(len(names), 'name')} ({digest[:16]})"
        value = super().__new__(cls, text)
        value.names = names
        return value


UNIONS = (Union, UnionType)  # `int | Literal[...]` is the one, `int | None` the other
# A type in --help, and in a message: "must be ...".
_TYPES = {int: ("N", "a whole number"), float: ("NUMBER", "a number"), str: ("NAME", "a name"),
          Names: ("FILE", "a file with a name on each line"),
          Interval: ("STEPS|TIME", "a number of optimizer steps (1000) or a duration (90s, 5min, 2h)")}


def parse(kind: Any, words: Sequence[str]) -> Any:
    """The value that the words behind a flag are. Raises ValueError if they are no value of this type."""
    word = words[0] if len(words) == 1 else None
    if get_origin(kind) in UNIONS:
        for each in reversed(get_args(kind)):  # None and auto stand last, and a name may be any word
            with suppress(ValueError):
                return parse(each, words)
    if get_origin(kind) is tuple:
        return tuple(parse(each, [word]) for each, word in zip(get_args(kind), words, strict=True))
    if kind in _TYPES and word:
        return kind(word)
    if get_origin(kind) is Literal and word in get_args(kind):
        return word
    if kind is NoneType and word in ("None", "null", "~"):
        return None
    if kind is bool and not words:
        return True
    raise ValueError(words)


def values_of(kind: Any, known: Facts) -> str:
    """The values of a setting, for --help: "N|auto". "" for a switch."""
    if get_origin(kind) in UNIONS:
        return "|".join(filter(None, (values_of(each, known) for each in get_args(kind))))
    if get_origin(kind) is Literal:
        choices = ",".join(get_args(kind))
        return f"{{{choices}}}" if "," in choices else choices
    if get_origin(kind) is tuple:
        return " ".join(values_of(each, known) for each in get_args(kind))
    if kind is str and known.path:
        return known.path.replace(" or ", "|").upper()
    return "" if kind in (bool, NoneType) else _TYPES[kind][0]


def rule_of(kind: Any) -> str:
    """What a value must be, in words: "a whole number or auto"."""
    if get_origin(kind) in UNIONS:
        return " or ".join(rule_of(each) for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(kind) is tuple:
        return f"{len(get_args(kind))} numbers"
    return _TYPES[kind][1]


def option(default: Any, help: str, kind: str = DEFINING, **facts: Any) -> Any:
    """A setting: its default and its Facts."""
    return field(default=default, metadata={"facts": Facts(help, kind, **facts)})


options = dataclass(frozen=True, kw_only=True)  # what a page of settings is
