"""What docs/pictures/measure.py measured, and the small print under a measured picture."""

import json
from pathlib import Path
from typing import Any

from docs.pictures.svg import WIDTH, Svg

FOLDER = Path(__file__).with_name("measured")


def load(name: str) -> dict[str, Any]:
    """The figures of one picture."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def small_print(svg: Svg, y: float, found: dict[str, Any], what: str) -> None:
    """The end of a measured picture: what was measured, and where."""
    load = f", shared with other work (load average {found['load']})" if found.get("load", 0) > found["cores"] else ""
    svg.line(24, y, WIDTH - 24, y, stroke_opacity=".3")
    svg.text(24, y + 22, what, "quiet small")
    svg.text(24, y + 40, f"{found['cpu']}, {found['cores']} cores{load}; torch {found['torch']}", "quiet small")
    svg.height = y + 60
