"""recovery.svg: seconds from each kill to the next finished step, and the steps that were computed again."""

from statistics import median

from docs.pictures.measured import load, small_print
from docs.pictures.svg import BLUE, ORANGE, Svg

LEFT, RIGHT, TOP, ROW = 90, 500, 122, 28  # px; bars stand between LEFT and RIGHT, repeated steps right of them


def draw() -> str:
    """The picture."""
    found = load("recovery")
    kills = found["kills"]
    middle, repeated = median(kill["seconds"] for kill in kills), [kill["reached"] - kill["resumed"] for kill in kills]
    bottom = TOP + ROW * len(kills)
    svg = Svg(0, f"{middle:.0f} seconds from a kill to the next finished step", [
        f"{len(kills)} times a random rank of {found['processes']} was killed (SIGKILL) at a random moment. torchrun",
        "restarted both, and the run continued from its newest checkpoint."])
    longest = max(kill["seconds"] for kill in kills)
    stride = next(stride for stride in (1, 2, 5, 10, 20, 50) if longest / stride <= 6)
    limit = stride * -(-longest // stride)

    def x(seconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * seconds / limit

    svg.text(RIGHT + 36, TOP - 12, f"steps repeated (median {median(repeated):g})", "quiet small")
    for number in range(int(limit / stride) + 1):
        seconds = stride * number
        svg.line(x(seconds), TOP, x(seconds), bottom, stroke_opacity=".3")
        svg.text(x(seconds), bottom + 18, f"{seconds}" if seconds else "0 s", "quiet small", "middle")
    for number, (kill, steps) in enumerate(zip(kills, repeated, strict=True)):
        row = TOP + ROW * number + 5
        svg.text(LEFT - 12, row + 13, f"rank {kill['rank']}", "quiet", "end")
        svg.rect(LEFT, row, x(kill["seconds"]) - LEFT, ROW - 10, BLUE)
        svg.text(LEFT + 10, row + 13.5, f"{kill['seconds']:.1f} s", "on small")
        for step in range(steps):
            svg.rect(RIGHT + 36 + 16 * step, row + 3, 12, 12, ORANGE)
        if not steps:
            svg.text(RIGHT + 36, row + 13, "none", "quiet small")
    svg.line(x(middle), TOP - 6, x(middle), bottom, ORANGE, stroke_width=2, stroke_dasharray="5 4")
    svg.text(x(middle), TOP - 12, f"median {middle:.1f} s", "strong small", "middle")
    what = f"MobileNetV3-small, built-in digits, a checkpoint every 3 steps; n = {len(kills)} kills"
    small_print(svg, bottom + 38, found, what)
    return str(svg)
