"""speed.svg: how fast train.py is beside its peers, from the newest figures of each benchmark.

    python -m docs.pictures.speed     # takes them over from benchmarks/results.jsonl; then python -m docs.pictures
"""

import json
from typing import Any

from benchmarks.in_turn import RESULTS
from docs.pictures.measured import FOLDER, load
from docs.pictures.svg import BLUE, GREY, WIDTH, Svg

LEFT, RIGHT, TOP, ROW = 190, 560, 96, 24  # px; bars stand between LEFT and RIGHT, their figures right of them
DRAWN = ("input", "training", "to ")  # the beginnings of what was measured
LARGEST = 20  # times the peer: a benchmark with more than that has no picture


def draw() -> str:
    """The picture: a bar for each contender, a line from its lowest to its highest ratio."""
    svg = Svg(0, "Speed beside what others would use", [
        "In turn, in one run: the median ratio to the grey bar, and the range (line). 0: most missed it."])
    y = TOP
    for found in load("speed"):
        svg.text(24, y + 14, found["what"], "strong")
        y += ROW
        scale = (RIGHT - LEFT) / max(high for _, _, high in found["ratios"].values())
        for name, (middle, low, high) in found["ratios"].items():
            is_ours, is_peer = name.startswith("ours"), name == found["against"]
            svg.text(LEFT - 12, y + 14, name, "strong small" if is_ours else "quiet small", "end")
            svg.rect(LEFT, y + 3, scale * middle, ROW - 10, BLUE if is_ours else GREY,
                     fill_opacity=None if is_ours or is_peer else ".5")
            if not is_peer:
                svg.line(LEFT + scale * low, y + 10, LEFT + scale * high, y + 10, stroke_width=2)
            svg.text(RIGHT + 12, y + 14, f"{middle:.2f}", "strong small" if is_ours else "quiet small")
            y += ROW
        rate = f"; {found['products']} GFLOP/s" if "products" in found else ""  # of matrices; older lines lack it
        about = f"{found['hardware']}{rate}; torch {found['torch']}; n = {found['rounds']}"
        svg.text(24, y + 12, about, "quiet small")
        y += ROW + 14
    svg.line(24, y, WIDTH - 24, y, stroke_opacity=".3")
    svg.height = y + 20
    return str(svg)


def newest() -> list[dict[str, Any]]:
    """The newest speeds of each benchmark, in the order in which they were first measured."""
    found = {}
    for line in RESULTS.read_text().splitlines():
        each = json.loads(line)
        ratios = {name: [round(value, 3) for value in values] for name, values in each["ratios"].items()
                  if not name.startswith("floor")}
        if each["what"].startswith(DRAWN) and max(high for _, _, high in ratios.values()) <= LARGEST:
            found[each["what"]] = {name: each[name] for name in ("what", "against", "rounds", "hardware")} | {
                "torch": each["versions"]["torch"], "ratios": ratios} | (
                {"products": round(max(each["products"].values()) / 1e9)} if "products" in each else {})
    return list(found.values())


if __name__ == "__main__":
    (FOLDER / "speed.json").write_text(json.dumps(newest(), indent=1) + "\n")
