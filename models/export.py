"""A trained model as one file for other programs, ONNX or torch.export's .pt2; refused if it predicts something else.

    python -m models.export RUN --format onnx

In go uint8 pixels, already of the right size, or token ids and a mask; out come the probabilities that models.predict
writes, of a regression the numbers. Normalisation is inside. The folder has the model, export.json (names of the
classes, size, interpolation, mean, std, ...) and, of texts, the tokenizer's files.

The folder appears once the file has predicted validation samples of the run, in batches of several sizes and lengths,
and agreed with models.predict in fp32 on the CPU. If a probability differs by more than 1e-4, or a prediction is
another one and not a tie within 1e-6, this ends with 65 and writes nothing.

Tests: tests/end_to_end/test_export.py
"""

import argparse
import logging
import sys
import warnings
from functools import partial
from importlib.util import find_spec

from utils.errors import Exit, Parser, UserError, exit_after, some

NEEDS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}  # packages that requirements.txt does not have

PARSER = Parser("models.export", __doc__)
PARSER.add_argument("run", metavar="RUN", help="a run directory of train.py")
PARSER.add_argument("--format", choices=NEEDS, required=True, help="onnx = model.onnx; torch = model.pt2")
PARSER.add_argument("--output", metavar="PATH",
                    help="a folder, or FILE.onnx (FILE.pt2) with FILE.json beside it; default: RUN/export/FORMAT;"
                         " an export there is replaced")
PARSER.add_argument("--data", metavar="PATH", help="where the data of the run are now; default: where they were")


def main(given: argparse.Namespace) -> Exit:
    """Export. Raises UserError: 64 where a package is missing, and what models.exported.export raises."""
    if missing := [name for name in NEEDS[given.format] if find_spec(name) is None]:
        raise UserError(f"--format {given.format} needs {some(missing)}: {sys.executable} -m pip install"
                        f" {' '.join(missing)}; or use --format torch, which needs no other package")
    from models.exported import export  # imports torch

    export(given)
    return Exit.DONE


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the exporters' own words, to those who call them
    warnings.simplefilter("ignore")
    exit_after(partial(main, PARSER.parse_args(sys.argv[1:])), "export", killed="run it again",
               out_of_memory="use a machine with more memory")
