"""speed.svg: how fast train.py is beside its peers, from the newest figures of each benchmark.

    python -m docs.pictures.speed     # takes them over from benchmarks/results.jsonl; then python -m docs.pictures
"""

import json
from typing import Any

from benchmarks.in_turn import RESULTS
from docs.pictures.measured import FOLDER, load
from docs.pictures.svg import BLUE, GREY, WIDTH, Svg

LEFT, RIGHT, TOP, ROW = 190, 560, 115, 24  # px; bars stand between LEFT and RIGHT, their figures right of them
DRAWN = ("input", "training")  # the beginnings of what was measured
LARGEST = 20  # times the peer: a benchmark with more than that has no picture
TITLES = {"input, ants_bees": "input, real photos of about 500 x 375"}  # of those that are not named by what they are


def draw() -> str:
    """The picture: a bar for each contender, a line from its lowest to its highest ratio."""
    rows = load("speed")
    left_out = [f"{found['what']} (up to {highest(found):.0f})" for found in rows if highest(found) > LARGEST]
    svg = Svg(0, "Speed beside what others would use", [
        "In turn, in one run: the median ratio to the grey bar, and the range (line).",
        f"Not drawn, because its ratios are too large: {', '.join(left_out) or 'nothing'}."])
    y = TOP
    for found in rows:
        if highest(found) <= LARGEST:
            y = draw_row(svg, y, found)
    svg.line(24, y, WIDTH - 24, y, stroke_opacity=".3")
    svg.height = y + 20
    return str(svg)


def draw_row(svg: Svg, y: float, found: dict[str, Any]) -> float:
    """One benchmark from `y` on; where the next one begins."""
    svg.text(24, y + 14, TITLES.get(found["what"], found["what"]), "strong")
    y += ROW
    scale = (RIGHT - LEFT) / highest(found)
    for name, (middle, low, high) in found["ratios"].items():
        is_ours, is_peer = name.startswith("ours"), name == found["against"]
        style = "strong small" if is_ours else "quiet small"
        svg.text(LEFT - 12, y + 14, name, style, "end")
        svg.rect(LEFT, y + 3, scale * middle, ROW - 10, BLUE if is_ours else GREY,
                 fill_opacity=None if is_ours or is_peer else ".5")
        if low < high:
            svg.line(LEFT + scale * low, y + 10, LEFT + scale * high, y + 10, stroke_width=2)
        svg.text(RIGHT + 12, y + 14, f"{middle:.2f}", style)
        y += ROW
    rate = f"; {found['products']} GFLOP/s" if "products" in found else ""  # of matrices; older lines lack it
    svg.text(24, y + 12, f"{found['hardware']}{rate}; torch {found['torch']}; n = {found['rounds']}", "quiet small")
    return y + ROW + 14


def highest(found: dict[str, Any]) -> float:
    """The highest ratio of a contender."""
    return max(high for _, _, high in found["ratios"].values())


def newest() -> list[dict[str, Any]]:
    """The newest speeds of each benchmark, in the order in which they were first measured."""
    found = {}
    for line in RESULTS.read_text().splitlines():
        each = json.loads(line)
        if each["what"].startswith(DRAWN):
            ratios = {name: [round(value, 3) for value in values] for name, values in each["ratios"].items()
                      if not name.startswith("floor")}
            found[each["what"]] = {name: each[name] for name in ("what", "against", "rounds", "hardware")} | {
                "torch": each["versions"]["torch"], "ratios": ratios} | (
                {"products": round(max(each["products"].values()) / 1e9)} if "products" in each else {})
    return list(found.values())


if __name__ == "__main__":
    (FOLDER / "speed.json").write_text(json.dumps(newest(), indent=1) + "\n")
