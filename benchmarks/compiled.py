"""`python -m benchmarks.compiled`: the speed of train.py with --compile beside that without, on the CPU.

Rows as in benchmarks/training.py, in fp32 and, where the hardware computes in it, in bf16. Steps alone count: the
first, in which most is compiled, warm up.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.in_turn import in_turn, report
from benchmarks.training import command_line, is_left_out, of_train, ours
from utils.numerics.precision import hardware_precision

ROWS = ("resnet18", "sst2", "mlm")


def main(rows: list[str], rounds: int, data: Path | None) -> None:
    """Measure and report the rows. data: a folder with sst2 and wikitext2, which two of them read."""
    with tempfile.TemporaryDirectory() as temporary:
        for row in rows:
            if is_left_out(row, data):
                continue
            words, steps = of_train(row, Path(temporary), data)
            for precision in sorted({"fp32", hardware_precision(torch.device("cpu"))}):
                own = [*words, "--precision", precision]
                report(f"compiled, {row}, batch {steps['batch']}, {precision}", "samples/s", in_turn({
                    "not compiled": ours(*own, **steps),
                    "--compile": ours(*own, "--compile", **steps)}, rounds), "not compiled")


if __name__ == "__main__":
    arguments = command_line("compiled", ROWS, rounds=3).parse_args()
    main(arguments.rows.split(","), arguments.rounds, arguments.data)
