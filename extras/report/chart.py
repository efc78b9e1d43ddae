"""Charts for the page of a run: lines, dots and axes as numbers, which report.html.jinja draws as SVG.

Tests: extras/report/tests/test_page.py
"""

import math
from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 230, 52, 12, 10, 40  # as wide as a phone: text keeps its size
MOST_POINTS, MOST_TICKS = 300, 5  # of a line
STYLES = ("a", "b", "c", "a dashed", "b dashed", "c dashed", "a dotted", "b dotted", "c dotted")  # three colours
Points = Sequence[tuple[float, float]]


def chart(title: str, of_x: str, lines: Sequence[tuple[str, Points]], mark: float | None = None) -> dict[str, Any]:
    """Lines with their names, in the order of STYLES, from x = 0 on; a point may be the mean of several.

    mark: where x is marked.
    """
    lines = [(name, _thinned(points)) for name, points in lines if points]
    x_ticks, x_place = _axis([0, *(x for _, points in lines for x, _ in points)], LEFT, WIDTH - RIGHT)
    y_ticks, y_place = _axis([y for _, points in lines for _, y in points], HEIGHT - BOTTOM, TOP)
    shown = [(name, style, [(x_place(x), y_place(y)) for x, y in points])
             for (name, points), style in zip(lines, STYLES * len(lines), strict=False)]
    return {"title": title, "of_x": of_x, "lines": shown, "x_ticks": x_ticks, "y_ticks": y_ticks,
            "mark": None if mark is None else x_place(mark)}


def _thinned(points: Points) -> Points:
    size = -(-len(points) // MOST_POINTS)
    parts = (points[first:first + size] for first in range(0, len(points), size))
    return [tuple(sum(values) / len(part) for values in zip(*part, strict=True)) for part in parts]


def _axis(values: Sequence[float], start: float, end: float) -> tuple[list[tuple[float, str]], Any]:
    """(place, words) of its ticks, and the place of a value, in pixels."""
    low, high = min(values, default=0), max(values, default=0)
    if low == high:
        low, high = low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10
    size = 10 ** math.floor(math.log10((high - low) / MOST_TICKS))
    step = next(size * each for each in (1, 2, 5, 10) if (high - low) / (size * each) <= MOST_TICKS)

    def place(value: float) -> float:
        return round(start + (value - low) / (high - low) * (end - start), 1)

    ticks = [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [(place(tick), f"{tick / 1000:g}k" if step >= 1000 else f"{tick:.6g}") for tick in ticks], place
