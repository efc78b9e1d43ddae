"""`python -m benchmarks.audit [--data DIR]`: what audits cost (--audit-every), on two processes of the CPU.

Runs without audits and runs with one in every second step take turns. The same steps of both have the same samples, so
that an audited step is divided by itself without an audit; so is, as a control, a step between two audits. Of an audit
every N steps a step costs an Nth more. Rows: resnet18 at 224 px; sst2, a pretrained MiniLM on sentences, with --data.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.in_turn import append, heading, in_turn, matrix_rates, spread
from benchmarks.processes import output, torchrun
from benchmarks.training import ROWS, of_train
from utils.hardware.cores import available_cores

PROCESSES, WARM_UP = 2, 2  # steps
EVERY = (10, 100)


def main(rows: list[str], strategies: list[str], rounds: int, data: Path | None) -> None:
    """Measure the rows, print a table of each, and append it. data: a folder with sst2."""
    with tempfile.TemporaryDirectory() as temporary:
        for row in rows if data else ["resnet18"]:
            words, steps = of_train(row, Path(temporary), data)
            for strategy in strategies:
                measure = partial(step_seconds, [*words, "--strategy", strategy], steps["batch"], steps["steps"])
                contenders: dict[str, Callable[[], list[float]]] = {
                    "plain": measure, "audited": partial(measure, audit_every=2)}
                report(f"audits, {ROWS[row][0]}, {strategy}, {PROCESSES} processes", in_turn(contenders, rounds))


def step_seconds(words: list[object], batch: int, steps: int, audit_every: int = 0) -> list[float]:
    """Seconds of each of `steps` optimizer steps after those that warm up."""
    with tempfile.TemporaryDirectory() as run:
        output([*torchrun(PROCESSES), "train.py", *words, "--run-dir", run, "--max-steps", WARM_UP + steps,
                "--log-every", 1, "--global-batch-size", batch, "--eval-every", 10**6, "--save-every", 10**6,
                "--device", "cpu", "--audit-every", audit_every], available_cores() // PROCESSES)
        records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [batch / record["samples_per_s"] for record in records if record["split"] == "train"][WARM_UP:]


def report(what: str, found: dict[str, list[list[float]]]) -> None:
    """Print the ratios, round by round, and what audits cost; append them. found: the seconds of each step, by round.
    """
    ratios = {name: [sum(audited[first::2]) / sum(plain[first::2])
                     for audited, plain in zip(found["audited"], found["plain"], strict=True)]
              for name, first in (("between two audits", 0), ("with an audit", 1))}
    cost = median(ratios["with an audit"]) - 1
    rates, costs = matrix_rates(), {f"every {number}": cost / number for number in EVERY}
    print(heading(what, len(found["plain"]), rates) + "| a step | to one without audits |\n|---|---|")
    for name, each in ratios.items():
        print(f"| {name} | {spread(each)} |")
    print("audits cost " + ", ".join(f"{100 * value:.2f} % {name} steps" for name, value in costs.items()), flush=True)
    append(what, "ratio of seconds in a step", ratios, costs=costs, products=rates)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audit")
    parser.add_argument("rows", nargs="*", default=["resnet18", "sst2"], metavar="resnet18, sst2")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "exact"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, help="a folder with sst2, see accuracy.py")
    given = parser.parse_args()
    main(given.rows, given.strategies, given.rounds, given.data)
