"""What docs/pictures/measure.py measured, and the small print under a measured picture."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("measured")


def load(name: str) -> dict[str, Any]:
    """The figures of one picture."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def small_print(found: dict[str, Any], what: str) -> str:
    """Under a measured picture: where it was measured, and what."""
    load = f" shared with other work (load {found['load']})" if found.get("load", 0) > int(found["cores"]) else ""
    return f"{found['cpu']}, {found['cores']} cores{load}; torch {found['torch']}; {what}"
