"""Whether two figures are the same bits, differ as rounding may make them differ, or jump.

Tests: tests/end_to_end/test_replay.py
"""

import math
from collections.abc import Mapping
from typing import Any

EPSILON = {"fp32": 1.2e-7, "fp16": 9.8e-4, "bf16": 7.8e-3}  # relative distance of neighbours: torch.finfo(dtype).eps
GROWN = {"fp32": 1e-3, "fp16": 1e-1, "bf16": 2e-1}  # what rounding may have become after some hundred steps


def apart(then: float | None, now: float | None, precision: str, names: tuple[str, str] = ("then", "now"),
          steps: float = math.inf) -> str:
    """How far a figure is from the recorded one, in words; "" for the same bits. None: it was not finite.

    names: of the two. steps: in which rounding has grown, if they are few.
    """
    now = now if now is not None and math.isfinite(now) else None
    if then == now:
        return ""
    if then is None or now is None:
        return f"{_shown(then)} {names[0]}, {_shown(now)} {names[1]}"
    distance = abs(now - then) / max(abs(then), abs(now))
    usual = min(GROWN[precision], 10 * steps * EPSILON[precision])
    what = "which rounding may do" if distance <= usual else "a jump: rounding does less"
    return (f"{then!r} {names[0]}, {now!r} {names[1]}: apart by {distance:.1e} of the value, {what} ({precision}:"
            f" {EPSILON[precision]:.1e} in one operation, and growing)")


def not_as_recorded(record: Mapping[str, Any], figures: Mapping[str, float], precision: str) -> list[str]:
    """The figures of a step that are not those of its train record, in words. figures: as they are computed here."""
    found = {name: apart(record[name], value, precision) for name, value in figures.items()}
    return [f"{name} of step {record['step']}: {words}" for name, words in found.items() if words]


def _shown(value: float | None) -> str:
    return "not finite" if value is None else repr(value)
