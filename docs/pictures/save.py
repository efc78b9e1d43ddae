"""save.svg: a save beside the training, to scale: what the main thread does, and what the writer does meanwhile."""

from statistics import median
from typing import Any

from docs.pictures.measured import load, small_print
from docs.pictures.svg import BLUE, GREY, ORANGE, TEAL, VIOLET, WIDTH, Svg

LEFT, RIGHT, MAIN, WRITER, LANE = 24, WIDTH - 24, 132, 226, 34  # px; MAIN and WRITER: the tops of the lanes
KINDS = {  # of the writer's spans, by the first word of their names
    "write": (BLUE, "write: weights, optimizer state, position"),
    "fsync": (VIOLET, "fsync: records, files, folders"),
    "sha256": (TEAL, "sha256 of every file, into the manifest"),
    "rename": (ORANGE, "rename: from here on the checkpoint exists"),
    "remove": (GREY, "read back what was saved, remove an older checkpoint")}


def kind_of(span: dict[str, Any]) -> str:
    """The first word of a span's name."""
    return span["name"].split()[0]


def length_of(span: dict[str, Any]) -> float:
    """In ms."""
    return span["end"] - span["begin"]


def writer_spans(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What the writer did, in order; the removal of old checkpoints is one span, the one around all is left out."""
    removal = next(span for span in found["spans"] if span["name"] == "remove")
    spans = [span for span in found["spans"] if kind_of(span) in KINDS and span["name"] != "write"]
    outer = [span for span in spans if span["begin"] < removal["begin"] or span is removal]
    return sorted(outer, key=lambda span: span["begin"])


def draw() -> str:
    """The picture."""
    found = load("save")
    usual, spans = found["usual_step_ms"], writer_spans(found)
    copy = next(span for span in found["spans"] if span["name"] == "copy")
    saved = next(span["end"] for span in spans if kind_of(span) == "rename")
    copies, saves = (median(save[name] for save in found["saves"]) for name in ("copy", "save"))
    svg = Svg(0, "A save runs beside the training", [
        f"The training waits for {copies:.0f} ms, while the state is copied. A thread of rank 0 writes the"
        f" {found['mib']} MiB",
        f"during the next steps; that takes {saves:.0f} ms. (Medians; the save below took about as long.)"])
    begin, end = -usual, spans[-1]["end"] + usual

    def x(ms: float) -> float:
        return LEFT + (RIGHT - LEFT) * (min(max(ms, begin), end) - begin) / (end - begin)

    def bar(span: dict[str, Any], top: float, colour: str, **values: object) -> float:
        width = max(x(span["end"]) - x(span["begin"]) - 1, 1.5)  # 1 px between neighbours
        svg.rect(x(span["begin"]), top, width, LANE, colour, rx=2, **values)
        return width

    # main thread
    svg.text(LEFT, MAIN - 10, "main thread", "strong")
    svg.text(LEFT + 100, MAIN - 10, "steps, in ms", "quiet")
    for step in found["steps"]:
        if step["begin"] >= end or step["end"] <= begin:
            continue
        width, is_whole = bar(step, MAIN, BLUE, fill_opacity=".28"), step["begin"] >= begin and step["end"] <= end
        if is_whole and width > 28:
            svg.text(x(step["begin"]) + width / 2, MAIN + 21, f"{length_of(step):.0f}", "small", "middle")
    bar(copy, MAIN, ORANGE)
    svg.text(x(copy["begin"]), MAIN + LANE + 18, f"copy of the state, {length_of(copy):.0f} ms: the training waits",
             "small")

    # writer thread
    svg.text(LEFT, WRITER - 10, "writer thread", "strong")
    for span in spans:
        bar(span, WRITER, KINDS[kind_of(span)][0])
    svg.line(x(saved), WRITER - 8, x(saved), WRITER + LANE + 8, ORANGE, stroke_width=2)
    svg.text(x(saved), WRITER - 14, "rename: the checkpoint exists", "small", "middle")

    # time
    axis = WRITER + LANE + 16
    svg.line(LEFT, axis, RIGHT, axis)
    stride = next(stride for stride in (50, 100, 200, 500, 1000, 2000) if (end - begin) / stride <= 8)
    for ms in range(0, int(end), stride):
        svg.line(x(ms), axis, x(ms), axis + 5)
        svg.text(x(ms), axis + 20, f"{ms}{'' if ms else ' ms'}", "quiet small", "middle")

    # what the colours are, and how long each took
    for number, (kind, (colour, text)) in enumerate(KINDS.items()):
        row = axis + 54 + 23 * number
        total = sum(length_of(span) for span in spans if kind_of(span) == kind)
        svg.rect(LEFT, row - 11, 13, 13, colour, rx=2)
        svg.text(LEFT + 104, row, text)
        svg.text(LEFT + 84, row, f"{total:.0f} ms" if total >= 1 else f"{total:.2f} ms", "quiet", "end")
    what = f"{found['model']}, one process, steps of {usual:.0f} ms (median); n = {len(found['saves'])} saves"
    small_print(svg, axis + 164, found, what)
    return str(svg)
