"""What benchmarks share: contenders take turns in one run, and their ratios are written down with the hardware.

    found = in_turn({"ours": measure, "theirs": measure_them}, rounds=7)     # A B A B ...; a figure each
    report("input", "images/s", found, against="theirs")                     # a table, and a line in results.jsonl
"""

import json
import platform
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from utils.hardware.cores import available_cores

RESULTS = Path(__file__).with_name("results.jsonl")
FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # of which the first decides how fast matrices are multiplied
PACKAGES = ("torch", "torchvision", "timm", "transformers", "accelerate", "lightning")


def in_turn(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """A figure of each contender in each round; those of a round before, which fills caches, do not count."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, rounds):
        for name, measure in contenders.items():
            figure = measure()
            if number >= 0:
                found[name].append(figure)
    return found


def report(what: str, unit: str, found: Mapping[str, list[float]], against: str) -> None:
    """Print medians, and ratios to one contender's, round by round, with their spread; append the same to RESULTS."""
    rounds = len(found[against])
    ratios = {name: [mine / theirs for mine, theirs in zip(figures, found[against], strict=True)]
              for name, figures in found.items()}
    print(f"\n{what}: {hardware()}, n = {rounds}\n\n| | {unit} | to {against} |\n|---|---|---|")
    for name, each in ratios.items():
        spread = f" ({min(each):.2f} to {max(each):.2f})" if name != against else ""
        print(f"| {name} | {median(found[name]):.4g} | {median(each):.2f}{spread} |", flush=True)
    line = {"what": what, "unit": unit, "against": against, "rounds": rounds, "time": datetime.now(UTC).isoformat(),
            "hardware": hardware(), "versions": versions(), "figures": found,
            "ratios": {name: [median(each), min(each), max(each)] for name, each in ratios.items()}}
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def hardware() -> str:
    """The CPU's name, what it computes in, and the cores of this process."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(facts.get("flags", "").split())
    fastest = next((flag for flag in FLAGS if flag in flags), "no AVX2")
    return f"{facts.get('model name', platform.machine())}, {fastest}, {available_cores()} cores"


def versions() -> dict[str, str]:
    """Of Python and of the packages that are compared."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
