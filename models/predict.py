"""Predictions of a trained model for new inputs, as CSV or JSONL.

    python -m models.predict RUN INPUT... [--output FILE] [--format csv|jsonl] [--batch-size N] [--device DEVICE]
    python -m models.predict runs/flowers photos cat.jpg --output predictions.csv

Columns: input, prediction, probability, then the probability of every class under its name, with six decimals. With
several labels: input, prediction (A|B), the probability of every label. Of a regression: input, then each target. Rows
are in the order of the inputs. Model and preprocessing are those of RUN/model; its task decides what an input is.
Images: a file, A,B for several images of a sample, a folder (its images sorted by path), or a table with the image
columns of training. Texts: a table with the text columns of training, a text file, or - for standard input, one text
per line, a pair as A<tab>B. An input that cannot be read is named on standard error and has no row; the exit code is 65
then.
"""

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from utils.errors import Exit, Parser, explain
from utils.output_files import csv_writer, open_output

# torch is imported inside the functions that need it, so that --help and wrong arguments are answered at once.


def main(arguments: list[str]) -> int:
    """Predict as the command line says; returns the exit code."""
    # arguments
    parser = Parser("python -m models.predict", description=__doc__, allow_abbrev=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run directory of train.py, or its model folder")
    parser.add_argument("inputs", metavar="INPUT", nargs="+",
                        help="images: files, folders, .csv, .tsv, .jsonl; texts: .csv, .tsv, .jsonl, .txt or -")
    parser.add_argument("--format", choices=sorted(FORMATS), help="default: by the ending of FILE, else csv")
    parser.add_argument("--output", metavar="FILE",
                        help="write to FILE, which appears when it is complete (default: standard output)")
    parser.add_argument("--batch-size", metavar="N", type=_count, default=64,
                        help="inputs classified at once (default: 64)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; default: the accelerator where there is one")
    given = parser.parse_args(arguments)

    # work
    try:
        given.format = given.format or ("jsonl" if str(given.output).endswith(".jsonl") else "csv")
        return predict(given)
    except BrokenPipeError:  # | head: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush would fail
        return 128 + signal.SIGPIPE
    except Exception as error:
        message, code = explain(error, out_of_memory="use a smaller --batch-size",
                                killed="run it again, with a smaller --batch-size")
        if code == Exit.INTERNAL:
            traceback.print_exc()
        else:
            print(f"predict: {message}", file=sys.stderr)
        return code


def predict(given: argparse.Namespace) -> Exit:
    """Write one row per readable input. given: the arguments of the command line.

    Raises UserError: 64 if there is no such device, 66 if the model or an input is missing, 73 if the output cannot be
    written.
    """
    from models.tasks import find_model, load_task
    from utils.hardware.devices import find_device
    from utils.hardware.vendor import set_tf32

    # model
    set_tf32(False)
    folder, task = find_model(Path(given.run))
    description, batches = load_task(task).predict(folder, given.inputs, find_device(given.device), given.batch_size)

    # rows
    num_inputs = num_bad = 0
    with open_output(given.output) as file:
        write_row = FORMATS[given.format](file, description)
        for batch in batches:
            for one in batch:
                num_inputs += 1
                if one.values is None:
                    num_bad += 1
                    print(f"predict: cannot read {one.bad}", file=sys.stderr)
                else:
                    write_row(one.input, one.values.tolist())
            file.flush()
    if num_bad:
        print(f"predict: {num_bad} of {num_inputs} inputs could not be read and have no row", file=sys.stderr)
    return Exit.BAD_DATA if num_bad else Exit.DONE


def _csv_rows(file: TextIO, description: Mapping[str, Any]) -> Callable[[str, list[float]], Any]:
    from models.objectives import answer

    names, write_row = description["classes"], csv_writer(file)
    write_row(["input", *answer(description, names, [0.0] * len(names))[0], *names])

    def write(name: str, values: list[float]) -> None:
        said, by_name = answer(description, names, values)
        write_row([name, *said.values(), *by_name.values()])

    return write


def _jsonl_rows(file: TextIO, description: Mapping[str, Any]) -> Callable[[str, list[float]], Any]:
    from models.objectives import answer

    def write(name: str, values: list[float]) -> None:
        said, by_name = answer(description, description["classes"], values)
        row = {"input": name, **said} | ({"probability": float(said["probability"])} if "probability" in said else {})
        row["probabilities" if said else "predictions"] = {name: float(value) for name, value in by_name.items()}
        is_text = name.encode("utf-8", "ignore").decode() == name  # a file's name may be in any encoding
        file.write(json.dumps(row, ensure_ascii=not is_text) + "\n")

    return write


FORMATS = {"csv": _csv_rows, "jsonl": _jsonl_rows}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
