"""parting.svg: two runs that should be the same: where their losses part in bits, and where the eye sees it."""

import math

from docs.pictures.measured import load, small_print
from docs.pictures.svg import BLUE, ORANGE, RED, WIDTH, Svg

LEFT, RIGHT, TOP, MIDDLE, LOWER, BOTTOM = 64, WIDTH - 24, 118, 278, 322, 462  # px; two panels
SHOWN = 48  # steps; later ones look alike
LOWEST = -8  # the decimal exponent at the foot of the lower panel
SEEN = 0.01  # of the loss: what the eye sees in the upper panel


def apart(one: list[float], other: list[float]) -> list[float]:
    """How far the losses of each step are apart, relative to the larger one."""
    return [abs(a - b) / max(a, b) for a, b in zip(one, other, strict=True)]


def draw() -> str:
    """The picture."""
    found = load("parting")
    one, other = found["1"][:SHOWN], found["3"][:SHOWN]
    distances, num_steps = apart(one, other), len(one)
    first = next(step for step, distance in enumerate(distances, 1) if distance)
    seen = next(step for step, distance in enumerate(distances, 1) if distance > SEEN)
    svg = Svg(0, "Two curves, and where they part", [
        "The same run on 1 process and on 3 under --strategy ddp, which sums gradients in another order.",
        "Under --strategy exact both curves are one, to the last bit."])

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / num_steps

    # the losses
    highest = math.ceil(max(one + other))
    for number in range(highest + 1):
        y = MIDDLE - (MIDDLE - TOP) * number / highest
        svg.line(LEFT, y, RIGHT, y, stroke_opacity=".3")
        svg.text(LEFT - 10, y + 4, str(number), "quiet small", "end")
    svg.text(24, TOP - 8, "training loss", "quiet small")
    for losses, colour, width in ((one, BLUE, 4), (other, ORANGE, 1.5)):
        points = [(x(step), MIDDLE - (MIDDLE - TOP) * loss / highest) for step, loss in enumerate(losses, 1)]
        svg.curve(points, colour, stroke_width=width)
    svg.text(RIGHT, TOP + 12, "1 process (blue), 3 processes (orange)", None, "end")

    # how far they are apart
    for exponent in range(LOWEST, 1, 2):
        y = BOTTOM - (BOTTOM - LOWER) * (exponent - LOWEST) / -LOWEST
        svg.line(LEFT, y, RIGHT, y, stroke_opacity=".3")
        svg.text(LEFT - 10, y + 4, f"1e{exponent}" if exponent else "1", "quiet small", "end")
    svg.text(24, LOWER - 8, "distance, relative to the loss", "quiet small")
    points = [(x(step), BOTTOM - (BOTTOM - LOWER) * (max(LOWEST, math.log10(distance)) - LOWEST) / -LOWEST)
              for step, distance in enumerate(distances, 1) if distance]
    svg.curve(points, ORANGE, stroke_width=1.5)
    for step, words, y in ((first, "the first bit", 8), (seen, "1 %, which the eye sees", 32)):
        svg.line(x(step), TOP, x(step), BOTTOM, RED, stroke_dasharray="2 4")
        svg.text(x(step) + 6, BOTTOM - y, f"step {step}: {words}")
    for step in range(0, num_steps + 1, 8):
        svg.text(x(step), BOTTOM + 18, str(step) if step else "step 0", "quiet small", "middle")
    small_print(svg, BOTTOM + 34, found, "MobileNetV3-small, built-in digits, fp32; n = 1 run each")
    return str(svg)
