"""What benchmarks share: contenders take turns in one run, and their ratios are written down with the hardware.

    found = in_turn({"ours": measure, "theirs": measure_them}, rounds=7)     # A B B A ...; a figure each
    report("input", "images/s", found, against="theirs")                     # a table, and a line in results.jsonl
"""

import json
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from benchmarks.processes import ROOT
from utils.hardware.cores import available_cores
from utils.numerics.precision import hardware_precision

RESULTS = ROOT / "benchmarks" / "results.jsonl"
FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # of which the first decides how fast matrices are multiplied
RATE_S = 1.0
PACKAGES = ("torch", "torchvision", "timm", "transformers", "accelerate", "lightning")
Figure = TypeVar("Figure")


def in_turn(contenders: Mapping[str, Callable[[], Figure]], rounds: int) -> dict[str, list[Figure]]:
    """A figure of each contender in each round; those of a round before, which fills caches, do not count.

    Every second round goes backwards, so that no contender always follows the same other one.
    """
    found: dict[str, list[Figure]] = {name: [] for name in contenders}
    for number in range(-1, rounds):
        for name in list(contenders)[::-1 if number % 2 else 1]:
            figure = contenders[name]()
            if number >= 0:
                found[name].append(figure)
    return found


def report(what: str, unit: str, found: Mapping[str, list[float]], against: str, *others: str) -> None:
    """Print medians, and ratios to contenders, round by round, with their spread; append the same to RESULTS.

    What is appended has the ratios to `against` alone.
    """
    columns, rates = (against, *others), matrix_rates()
    print(heading(what, len(found[against]), rates)
          + f"| | {unit} | {' | '.join(f'to {other}' for other in columns)} |\n{'|---' * (2 + len(columns))}|")
    for name, figures in found.items():
        cells = [spread(ratios(figures, found[other])) if other != name else "1" for other in columns]
        print(f"| {name} | {median(figures):.4g} | {' | '.join(cells)} |", flush=True)
    append(what, unit, found, against=against, ratios=ranges(found, against), products=rates)


def heading(what: str, rounds: int, rates: Mapping[str, float]) -> str:
    """What stands above a table. rates: those of matrix_rates."""
    return f"\n{what}: n = {rounds}; {about()}; products of matrices: " + ", ".join(
        f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in rates.items()) + "\n\n"


def append(what: str, unit: str, found: Mapping[str, Sequence[float | None]], **facts: object) -> None:
    """Append the figures of each contender, one of each round, to RESULTS, with time, commit, hardware and versions.

    facts: more of the line, or in place of these; of most lines `against`, the contender that the others are compared
    with, `ratios`, the median, lowest and highest of each to it, and `products`, those of matrix_rates.
    """
    line = {"what": what, "unit": unit, "rounds": max(map(len, found.values())),
            "time": datetime.now(UTC).isoformat(), "commit": commit(), "hardware": hardware(), "versions": versions(),
            "figures": found}
    with RESULTS.open("a") as file:
        file.write(json.dumps(line | facts) + "\n")


def ranges(found: Mapping[str, list[float]], against: str) -> dict[str, list[float]]:
    """The median, lowest and highest ratio of each contender to `against`."""
    each = {name: ratios(figures, found[against]) for name, figures in found.items()}
    return {name: [median(values), min(values), max(values)] for name, values in each.items()}


def ratios(mine: list[float], theirs: list[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(mine, theirs, strict=True)]


def spread(values: list[float]) -> str:
    """The median and the range."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def matrix_rates() -> dict[str, float]:
    """FLOP/s of products of matrices on the CPU, now, in the precisions that trainings have here."""
    cpu = torch.device("cpu")
    return {name: matrix_rate(cpu, name) for name in sorted({"fp32", hardware_precision(cpu)})}


def matrix_rate(device: torch.device, precision: str) -> float:
    """FLOP/s of products of square matrices, now: about the most that a model can reach here.

    They go on for RATE_S seconds, of which the second half counts: clocks and temperatures are those of a training.
    """
    side, at_once = (2048, 1) if device.type == "cpu" else (8192, 10)
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    began, ends = time.perf_counter(), [time.perf_counter()]
    while ends[-1] - began < RATE_S or len(ends) < 4:
        for _ in range(at_once):
            matrix @ matrix
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        ends.append(time.perf_counter())
    half = len(ends) // 2
    return 2 * side**3 * at_once * (len(ends) - 1 - half) / (ends[-1] - ends[half])


def about() -> str:
    """Hardware and versions, in a line."""
    return f"{hardware()}; " + ", ".join(f"{name} {number}" for name, number in versions().items())


def commit() -> str:
    """Of this program; with a + if files other than the results are changed. Empty without git or a repository."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    if not shutil.which("git"):
        return ""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results.jsonl")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def hardware(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name, what it computes in, and the cores of this process."""
    lines = cpuinfo.read_text().splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(facts.get("flags", "").split())
    fastest = next((flag for flag in FLAGS if flag in flags), "no AVX2")
    name = facts.get("model name", platform.machine())
    if "cpu family" in facts:  # on x86; one name may stand for several
        name += f" (family {facts['cpu family']}, model {facts.get('model', '?')})"
    return f"{name}, {fastest}, {available_cores()} cores"


def versions() -> dict[str, str]:
    """Of Python and of the packages that are compared."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
