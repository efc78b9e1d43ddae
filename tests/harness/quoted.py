"""What a page quotes of a command's output: ... stands for what is left out, and losses need only be near."""

import re

import pytest

# Losses differ by rounding, which eight steps enlarge: 1 and 2 processes by 2 % at the end. So may two kinds of CPU.
TOLERANCE = 0.15
LEFT_OUT = "..."


def agrees(quoted: str, printed: str, names: dict[str, str]) -> bool:
    """Whether a line is as the page has it: ... is anything, fractions are near, a hash is that of `names`."""
    parts = re.split(r"(\.\.\.|HOST|HASH|\d+\.\d+)", quoted)
    kinds = {LEFT_OUT: "(.*)", "HOST": r"(\S+)", "HASH": "([0-9a-f]{64})"}
    pattern = "".join(kinds.get(part, r"(\d+\.\d+)") if i % 2 else re.escape(part) for i, part in enumerate(parts))
    if not (match := re.fullmatch(pattern, printed.rstrip())):
        return False
    for part, value in zip(parts[1::2], match.groups(), strict=True):
        if part == "HASH" and names.setdefault("HASH", value) != value:
            return False
        if part not in kinds and float(value) != pytest.approx(float(part), rel=TOLERANCE):
            return False
    return True


def is_printed(quoted: tuple[str, ...], printed: list[str], names: dict[str, str]) -> bool:
    """Whether the lines are found in this order; a line of ... alone stands for any number of lines."""
    left = iter(printed)
    return all(line == LEFT_OUT or any(agrees(line, other, names) for other in left) for line in quoted)
