"""Predictions of a trained model for new inputs, as CSV or JSONL.

    python -m models.predict RUN INPUT... [--output FILE] [--format csv|jsonl] [--batch-size N] [--device DEVICE]
    python -m models.predict runs/flowers photos cat.jpg --output predictions.csv
    torchrun --nproc-per-node=8 -m models.predict runs/flowers photos --output predictions.csv

Columns: input, prediction, probability, then the probability of every class under its name, with six decimals. With
several labels: input, prediction (A|B), the probability of every label. Of a regression: input, then each target. Rows
are in the order of the inputs. Model and preprocessing are those of RUN/model; its task decides what an input is.
Images: a file, A,B for several images of a sample, a folder (its images sorted by path), or a table with the image
columns of training. Texts: a table with the text columns of training, a text file, or - for standard input, one text
per line, a pair as A<tab>B. An input that cannot be read is named on standard error and has no row; the exit code is 65
then.

Several processes share the inputs out, and FILE has the same bytes on any number of them: on the CPU, each computes
with one thread. What is done is kept beside FILE, in FILE.parts-*, so the same command continues after a kill. (Several
nodes must share that folder.) Standard input and standard output take one process, which begins anew.

--model NAME or FOLDER instead of RUN: no run is needed, and rows have the input alone; weights as they are give the
features of --embeddings. Of a text encoder that is the mean of its last layer over the tokens.

--embeddings: float32 [rows of FILE, D], the features of each row: what goes into the last layer of the model. That is
the pooled output of a network for images or of a text encoder; of a map, the mean over its positions.
"""

import argparse
import os
import shutil
import signal
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from utils.errors import Exit, Parser, UserError, exit_after


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


# torch is imported inside the function that needs it, so that --help and wrong arguments are answered at once.
PARSER = Parser("models.predict", __doc__)
PARSER.add_argument("run", metavar="RUN", help="a run directory of train.py, or its model folder; not with --model")
PARSER.add_argument("inputs", metavar="INPUT", nargs="*",
                    help="images: files, folders, .csv, .tsv, .jsonl; texts: .csv, .tsv, .jsonl, .txt or -")
PARSER.add_argument("--format", choices=("csv", "jsonl"), help="default: by the ending of FILE, else csv")
PARSER.add_argument("--output", metavar="FILE",
                    help="write to FILE, which appears when it is complete (default: standard output)")
PARSER.add_argument("--embeddings", metavar="FILE.npy", help="write the features of each row to FILE.npy, too")
PARSER.add_argument("--model", metavar="NAME|FOLDER", help="instead of RUN: weights as they are, for --embeddings: a"
                    " text encoder's folder or name, a name of torchvision, timm/NAME, or a name with --weights")
PARSER.add_argument("--weights", metavar="FILE", help="with --model NAME of images: .pth or .safetensors")
PARSER.add_argument("--image-size", metavar="N", type=_count, help="with --model: default: that of the weights")
PARSER.add_argument("--text-column", metavar="A[,B]", default="text", help="with --model, of tables (default: text)")
PARSER.add_argument("--batch-size", metavar="N", type=_count, default=64, help="inputs at once (default: 64)")
PARSER.add_argument("--device", default="auto", help="cpu, cuda, ...; default: the accelerator where there is one")
WAYS_OUT = {"out_of_memory": "use a smaller --batch-size", "killed": "run it again, with a smaller --batch-size"}


def main(arguments: list[str]) -> int:
    """Write one row per readable input. Returns the exit code. Collective.

    Raises UserError: 64 if there is no such device, or for what only one process can do, 65 if an input is damaged, 66
    if the model or an input is missing, 73 if the output cannot be written.
    """
    given = PARSER.parse_args(arguments)
    if not (given.inputs or given.model):
        PARSER.error("the following arguments are required: INPUT")
    if given.model and not given.embeddings:
        PARSER.error("--model gives features alone: add --embeddings FILE.npy and --output FILE")
    if given.model:
        given.inputs.insert(0, given.run)
    if given.weights and not given.model:
        PARSER.error("--weights is for --model NAME")
    given.format = given.format or ("jsonl" if str(given.output).endswith(".jsonl") else "csv")
    try:
        return predict(given)
    except BrokenPipeError:  # | head: the reader has what it wanted
        return 128 + signal.SIGPIPE


def predict(given: argparse.Namespace) -> Exit:
    """See main(). given: the arguments of the command line. Collective."""
    import torch
    from tqdm import tqdm

    from models.features import open_features
    from models.prediction_files import compute_parts, folder_of_parts, require_outputs, write_files
    from models.tasks import find_model, load_task
    from utils.distributed.preflight import require_numbers
    from utils.distributed.signals import end_with_torchrun
    from utils.distributed.world import World
    from utils.hardware.vendor import set_tf32
    from utils.rundir.lock import RunLock

    # model
    require_numbers("predict")
    end_with_torchrun()
    set_tf32(False)
    torch.set_num_threads(1)  # the last bits of what several threads compute depend on how many there are
    folder, task = (None, "") if given.model else find_model(Path(given.run))
    with World.from_env(given.device) as world, closing(RunLock()) as lock:  # Collective.
        has_parts = given.output is not None and "-" not in given.inputs
        if not has_parts and (given.embeddings or world.world_size > 1):
            raise UserError("several processes, and --embeddings, need --output FILE, and inputs other than -")
        parts: Path | None = None

        def is_wanted(number: int) -> bool:
            is_mine = number % world.world_size == world.rank
            return parts is None or (is_mine and not (parts / str(number)).exists())

        found = open_features(given, world, is_wanted) if given.model else world.everywhere(  # Collective.
            lambda: load_task(task).predict(folder, given.inputs, world.device, given.batch_size, is_wanted),
            takes_long=True)
        world.on_rank_zero(partial(require_outputs, given))  # Collective.
        if has_parts:  # once the inputs are known to be there: other parts are removed
            parts = folder_of_parts(given, folder, world, lock)  # Collective.
        is_hidden = not world.is_main or (given.output is None and sys.stdout.isatty())
        found = found._replace(batches=tqdm(  # None: hidden where there is no terminal
            found.batches, "predict", found.num_batches, unit="batch", disable=is_hidden or None))

        # rows
        write = partial(write_files, given, found, parts)
        if parts is None:
            num_inputs, num_bad = write()
        else:
            try:
                compute_parts(given, found, parts)
            finally:
                if world.world_size == 1 and os.listdir(parts) == [".lock"]:  # nothing is done; nobody else writes
                    shutil.rmtree(parts)
            world.everywhere(lambda: None, takes_long=True)  # Collective: all parts are there.
            num_inputs, num_bad = world.on_rank_zero(write, takes_long=True)  # Collective.
    if not num_bad or not world.is_main:  # torchrun ends all processes when one fails
        return Exit.DONE
    print(f"predict: {num_bad} of {num_inputs} inputs could not be read and have no row", file=sys.stderr)
    return Exit.BAD_DATA


if __name__ == "__main__":
    exit_after(partial(main, sys.argv[1:]), "predict", **WAYS_OUT)
