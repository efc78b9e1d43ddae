"""loss.svg: the loss of a run left alone, and of the same run killed five times on changing numbers of processes."""

from typing import Any

from docs.pictures.measured import load, small_print
from docs.pictures.svg import BLUE, ORANGE, WIDTH, Svg

LEFT, RIGHT, TOP, BOTTOM, ROW = 64, WIDTH - 24, 106, 306, 27  # px; the curves stand between TOP and BOTTOM


def differences(found: dict[str, Any]) -> list[float]:
    """|loss of the killed run - loss of the other one|, for each step that the killed run computed, again or not."""
    expected = found["undisturbed"]["losses"]
    return [abs(loss - expected[start["resumed"] + number])
            for start in found["killed"]["starts"] for number, loss in enumerate(start["losses"])]


def draw() -> str:
    """The picture."""
    found = load("loss")
    expected, starts = found["undisturbed"]["losses"], found["killed"]["starts"]
    ends = [start["resumed"] + len(start["losses"]) for start in starts]
    num_steps, num_kills = len(expected), len(starts) - 1
    bottom = BOTTOM + 70 + ROW * len(starts)
    svg = Svg(0, f"Killed {num_kills} times, and the same loss curve", [
        f"One run was left alone. The other was killed {num_kills} times (SIGKILL to every process) and",
        "continued on another number of processes each time, under --strategy exact."])

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / num_steps

    def y(loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * loss / highest

    # axes
    highest = 0.5 * (int(2 * max(expected)) + 1)
    for number in range(int(highest) + 1):
        svg.line(LEFT, y(number), RIGHT, y(number), stroke_opacity=".3")
        svg.text(LEFT - 10, y(number) + 4, str(number), "quiet small", "end")
    for step in range(0, num_steps + 1, 10):
        svg.text(x(step), BOTTOM + 18, str(step) if step else "step 0", "quiet small", "middle")
    svg.text(24, TOP - 2, "training loss", "quiet small")

    # kills, from the curve down to the start that they end
    lanes = BOTTOM + 34
    for number, end in enumerate(ends[:-1]):
        for upper, lower in ((y(expected[end - 1]), BOTTOM), (BOTTOM + 24, lanes + ROW * number + 10)):
            svg.line(x(end), upper, x(end), lower, ORANGE, stroke_dasharray="2 4")
    # the curves
    svg.curve([(x(step + 1), y(loss)) for step, loss in enumerate(expected)], BLUE, stroke_width=9, stroke_opacity=".4",
              stroke_linecap="round")
    for start in starts:
        points = [(x(start["resumed"] + 1 + number), y(loss)) for number, loss in enumerate(start["losses"])]
        svg.curve(points, ORANGE, stroke_width=2)
    _legend(svg, x(num_steps // 3), found)

    # the starts of the killed run
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        row, begin, first_new = lanes + ROW * number, x(start["resumed"]), x(ends[number - 1] if number else 0)
        svg.rect(begin, row, x(end) - begin, 19, ORANGE, fill_opacity=".22")
        name = f"{start['processes']} process{'es' if start['processes'] > 1 else ''}"
        svg.text((first_new + x(end)) / 2, row + 14, name, "small", "middle")
        if number:
            repeated = ends[number - 1] - start["resumed"]
            svg.rect(begin, row, first_new - begin, 19, ORANGE, fill_opacity=".5")
            text = f"{repeated} step{'s' if repeated > 1 else ''} repeated"
            svg.text(begin - 8, row + 14, text, "quiet small", "end")
        if number < num_kills:
            svg.cross(x(end), row + 9.5)
    what = "A row is a start of the killed run. It continues from the newest checkpoint; one is saved every 6 steps."
    svg.text(24, bottom + 4, what, "quiet small")
    what = f"MobileNetV3-small, built-in digits, fp32; n = 1 run of {num_steps} steps each"
    small_print(svg, bottom + 18, found, what)
    return str(svg)


def _legend(svg: Svg, left: float, found: dict[str, Any]) -> None:
    """Which curve is which, and how far they are apart."""
    starts, off = found["killed"]["starts"], differences(found)
    repeated = len(off) - len(found["undisturbed"]["losses"])
    weights = "equal" if found["undisturbed"]["weights"] == found["killed"]["weights"] else "UNEQUAL"
    fewest, most = min(start["processes"] for start in starts), max(start["processes"] for start in starts)
    svg.rect(left, TOP + 3, 22, 9, BLUE, fill_opacity=".4")
    svg.text(left + 32, TOP + 12, "left alone, 1 process")
    svg.line(left, TOP + 31, left + 22, TOP + 31, ORANGE, stroke_width=2)
    svg.text(left + 32, TOP + 36, f"killed {len(starts) - 1} times, on {fewest} to {most} processes")
    svg.text(left + 32, TOP + 60, f"max difference {max(off):g}", "strong")
    svg.text(left + 32, TOP + 79, f"in {len(off)} steps, {repeated} of them repeated; {weights} weights", "quiet")
