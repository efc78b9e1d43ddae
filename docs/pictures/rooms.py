"""map.svg: the packages of the program with their files, from the tree and from the imports.

A room is a package: a folder of the program, or one of utils/. It stands one floor above the highest room that it
imports from. So the picture shows that no rooms import from each other; if some do, it cannot be drawn.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from docs.pictures.svg import BLUE, GREY, ORANGE, TEAL, VIOLET, WIDTH, Svg

ROOT = Path(__file__).parents[2]
FOLDERS = ("extras", "engine", "models", "data", "utils")
COLOURS = {"train.py": ORANGE, "engine": VIOLET, "models": BLUE, "data": TEAL}
PURPOSE = {
    "train.py": "the order of a run, and the loop",
    "extras": "what only watches a training",
    "engine": "builds the loop, and serves it",
    "models": "tasks, networks, metrics, prediction",
    "data": "samples, their order, batches",
    "utils/rundir": "checkpoints, records, restarts",
    "utils/strategies": "sums over ranks",
    "utils/distributed": "ranks meet, agree, watch each other",
    "utils/numerics": "precision, optimizers, seeds",
    "utils/settings": "every setting, from the command line",
    "utils/hardware": "devices and cores",
    "utils/cpu": "what only a CPU needs",
    "utils": "messages, exit codes, small files",
}
LEFT, GAP, LINE, CHARACTER = 24, 10, 18, 7.25  # px; CHARACTER: of a monospaced file name


def files() -> list[Path]:
    """The program's files, relative to its root."""
    paths = [path.relative_to(ROOT) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))
             if not {"tests", "conftest.py"} & {*path.parts}]
    return [Path("train.py"), *(path for path in paths if (ROOT / path).read_text().strip())]


def room_of(path: Path) -> str:
    """The room that a file stands in."""
    return "/".join(path.parts[:2]) if path.parts[0] == "utils" and len(path.parts) > 2 else path.parts[0]


def rooms() -> dict[str, list[str]]:
    """{room: its files, without .py, in alphabetical order}."""
    found: dict[str, list[str]] = {}
    for path in files():
        room = room_of(path)
        name = path.relative_to(room).as_posix() if path.as_posix() != room else "train.py"
        found.setdefault(room, []).append(name.removesuffix(".py"))
    return found


def imports() -> dict[str, set[str]]:
    """{room: other rooms that its files import from}."""
    modules = {path.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): room_of(path)
               for path in files()}
    found: dict[str, set[str]] = {room: set() for room in modules.values()}
    for path in files():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            found[room_of(path)] |= {modules[name] for name in names if name in modules} - {room_of(path)}
    return found


def floors() -> list[list[str]]:
    """The rooms of each floor, the highest first. Raises graphlib.CycleError where rooms import from each other."""
    needs, floor = imports(), {}
    for room in TopologicalSorter(needs).static_order():
        floor[room] = 1 + max((floor[other] for other in needs[room]), default=-1)
    return [sorted(room for room in floor if floor[room] == number) for number in range(max(floor.values()), -1, -1)]


def wrapped(names: list[str], width: float) -> list[str]:
    """The names in lines of at most `width` px."""
    lines = [""]
    for name in names:
        longer = f"{lines[-1]} · {name}" if lines[-1] else name
        if len(longer) * CHARACTER > width and lines[-1]:
            lines.append(name)
        else:
            lines[-1] = longer
    return lines


def draw() -> str:
    """The picture."""
    held, cards, top = rooms(), [], 92.0
    for row in floors():
        width = (WIDTH - 2 * LEFT - 22 - GAP * (len(row) - 1)) / len(row)
        texts = [[] if room == "train.py" else wrapped(held[room], width - 28) for room in row]
        is_wide = len(row) == 1  # the purpose has room beside the name
        height = (26 if is_wide else 44) + LINE * max(map(len, texts)) + 10
        cards += [(LEFT + 22 + (width + GAP) * number, top, width, height, room, texts[number], is_wide)
                  for number, room in enumerate(row)]
        top += height + GAP
    svg = Svg(top + 14, "The packages of the program", [
        "A file imports from its own package and from packages below it, never from one above."])
    svg.line(LEFT + 5, 96, LEFT + 5, top - 14, stroke_width=2)
    svg.curve([(LEFT, top - 22), (LEFT + 5, top - 14), (LEFT + 10, top - 22)], GREY, stroke_width=2)
    turned = f"translate({LEFT - 4} {round(top / 2 + 46)}) rotate(-90)"
    svg.text(0, 0, "imports", "quiet small", "middle", transform=turned)
    for x, y, width, height, room, lines, is_wide in cards:
        colour = COLOURS.get(room, GREY)
        svg.rect(x, y, width, height, colour, fill_opacity=".14", rx=6)
        svg.rect(x, y, 4, height, colour, rx=2)
        svg.text(x + 16, y + 23, room if room.endswith(".py") else f"{room}/", "strong")
        purpose = PURPOSE.get(room, "")
        if is_wide:
            svg.text(x + width - 14, y + 23, purpose, "quiet", "end")
        else:
            svg.text(x + 16, y + 42, purpose, "quiet")
        for number, line in enumerate(lines):
            svg.text(x + 16, y + (44 if is_wide else 62) + LINE * number, line, "mono")
    return str(svg)
