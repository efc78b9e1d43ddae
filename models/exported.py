"""An export that predicts what models.predict does, or none: validation samples of the run decide.

Legend: B samples, I images of a sample, H, W height and width in pixels, T tokens of the longest text, C outputs.

Tests: tests/end_to_end/test_export.py
"""

import argparse
import csv
import json
import os
import random
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from torch.export import Dim

from data.tables.table import TABLES
from models.exported_images import RUN, add_run, steps_of
from models.losses import meaning_of
from models.metrics.metric import MAX_SCORES
from models.objectives import answer
from models.tasks import find_model, load_task
from models.vision.classifier import image_set, load_model_folder
from utils.errors import Exit, UserError, counted, explain, first_line, say
from utils.files import read_json, replace_folder
from utils.output_files import TEXT
from utils.rundir.chain import files_in
from utils.rundir.run import command

CPU, ABOUT, FILES = torch.device("cpu"), "export.json", {"onnx": "model.onnx", "torch": "model.pt2"}
BATCHES = (1, 2, 5, 24, 64)  # samples in each batch that is compared
TOLERANCE = 1e-4  # of a probability, or of a number in standard deviations of its target
TIE = 1e-6  # where all of a sample's probabilities agree so closely, another prediction is one of two equal ones
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")  # the last one only where the tokenizer gives it
Inputs = dict[str, Tensor]  # in the order of the network's arguments
Prepare = Callable[[Sequence[str]], Inputs]  # of B paths or texts
Predict = Callable[[Sequence[str]], np.ndarray]  # [B, C] of them


class Exportable(nn.Module):
    """What other programs take: a network with what comes before it and behind it, in evaluation mode.

    logits: a function of the inputs that calls `model`. description: config.json of RUN/model, with `classes`.
    """

    def __init__(self, model: nn.Module, logits: Callable[..., Tensor], description: Mapping[str, Any]):
        super().__init__()
        self.model, self.logits, self.description = model, logits, description
        self.eval().requires_grad_(False)

    def forward(self, *inputs: Tensor) -> Tensor:
        """[B, C]: probabilities, or float64 numbers in the units of the targets."""
        return meaning_of(self.description, self.logits(*inputs))


def load_texts(folder: Path, description: Mapping[str, Any]) -> tuple[Exportable, Prepare]:
    """The network of ids, mask and perhaps types, [B, T] int64 each."""
    from models.text import bert, hub, padding  # they import transformers

    encoder, _ = bert.load_classifier(folder)
    tokenizer, length = hub.load_tokenizer(str(folder)), description["max_tokens"]
    side = padding.find_padding_side(encoder, tokenizer, length)

    def logits(*inputs: Tensor) -> Tensor:
        return encoder(**dict(zip(TEXT_INPUTS, inputs, strict=False))).logits

    def prepare(texts: Sequence[str]) -> Inputs:
        found = padding.encode_texts(tokenizer, length, side, [parts_of(text, description) for text in texts])
        return {"input_ids": found["input_ids"], "attention_mask": torch.ones_like(found["input_ids"])} | found

    return Exportable(encoder, logits, description), prepare


def load_images(folder: Path, description: Mapping[str, Any]) -> tuple[Exportable, Prepare]:
    """The network of uint8 pixels [B, 3 * I, H, W]."""
    model, _ = load_model_folder(folder)
    mean, std = (255 * torch.tensor(description[name] * description.get("num_images", 1)).view(1, -1, 1, 1)
                 for name in ("mean", "std"))                                               # [1, 3 * I, 1, 1]

    def prepare(paths: Sequence[str]) -> Inputs:
        images = image_set(description, paths)
        pixels = torch.stack([images[0, index].image for index in range(len(paths))])       # [B, H, W, 3 * I]
        return {"images": pixels.permute(0, 3, 1, 2).contiguous()}

    return Exportable(model, lambda images: model((images - mean) / std), description), prepare


@torch.no_grad()
def write_file(model: Exportable, inputs: Inputs, about: Mapping[str, Any], file: Path) -> None:
    """The network as a program, for any number of samples, and texts of any length. inputs: of several samples.

    file: its ending says the format. Raises whatever torch and its exporters cannot do.
    """
    batch, length = Dim("batch"), Dim("length", max=about.get("max_tokens"))
    shapes = tuple({0: batch, 1: length} if tensor.ndim == 2 else {0: batch} for tensor in inputs.values())
    program = torch.export.export(model, tuple(inputs.values()), dynamic_shapes=(shapes,))
    if file.suffix == ".pt2":
        content = BytesIO()  # given a path, torch hides the system's error of a full disk
        torch.export.save(program, content, extra_files={ABOUT: json.dumps(about)})
        file.write_bytes(content.getbuffer())
        return
    named = tuple({place: {batch: "batch", length: "tokens"}[dim] for place, dim in each.items()} for each in shapes)
    written = torch.onnx.export(program, input_names=[*inputs], output_names=[about["output"]], dynamic_shapes=named,
                                verbose=False)
    written.model.metadata_props.update({name: json.dumps(value) for name, value in about.items()})
    written.save(file)


def read_file(file: Path, prepare: Prepare) -> Predict:
    """What a file that was exported predicts, by itself."""
    if file.suffix == ".pt2":
        module = torch.export.load(file).module()
        return lambda names: module(*prepare(names).values()).numpy()
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda names: session.run(None, {name: each.numpy() for name, each in prepare(names).items()})[0]


@contextmanager
def refusing(what: str, code: Exit) -> Iterator[None]:
    """Turn whatever the libraries cannot do into a UserError; a full disk or lack of memory stays what it is."""
    try:
        yield
    except Exception as error:
        if explain(error)[1] != Exit.INTERNAL:
            raise
        raise UserError(f"{what} ({type(error).__name__}: {first_line(error)}). Nothing was written; try the other"
                        " --format", code) from error


def export(given: argparse.Namespace) -> None:
    """Write the folder that models.export is asked for.

    Raises UserError: 64 for a model that cannot be exported so, 65 for an export that is not the model, 66 where the
    run's model or data are missing, 73 if the folder is something else.
    """
    # the model
    run = Path(given.run)
    folder, name = find_model(run)
    description = load_task(name).predict(folder, [], CPU, 1).description
    output = Path(given.output or run / "export" / given.format)
    is_file = output.suffix == Path(FILES[given.format]).suffix  # then what belongs beside it is FILE.json
    beside = output.with_suffix(".json") if is_file else output / ABOUT
    if (output.exists() or (is_file and beside.exists())) and "model_sha256" not in read_json(beside):
        raise UserError(f"--output {output}: {output if output.exists() else beside} exists and is not of an export;"
                        " name another", Exit.CANNOT_CREATE)

    # what it is compared with
    rows = samples_of(run, given.data, description)
    known = predictions(folder, [row["input"] for row in rows], description)
    network, prepare = (load_texts if "max_tokens" in description else load_images)(folder, description)
    example = prepare([*islice(cycle(known), 2)])
    evaluated = next((read_json(path) for path in (run / "eval").glob("*.json")), {})
    about = description | {"inputs": {name: str(tensor.dtype) for name, tensor in example.items()},
                           "output": "numbers" if "target_mean" in description else "probabilities",
                           **({"preparation": steps_of(description)} if "image_size" in description else {}),
                           "step": evaluated.get("step"), "model_sha256": files_in(folder).get("model.safetensors")}

    # the file
    def write(unnamed: Path) -> None:
        file = unnamed / FILES[given.format]
        with refusing(f"--format {given.format}: this model cannot be exported", Exit.USAGE):
            write_file(network, example, about, file)
            predict = read_file(file, prepare)
        found = compare(predict, known, description)
        if "image_size" in description:
            found |= add_run(unnamed, about, prepare, predict, known, description)
        others = shutil.ignore_patterns("config.json", "model.safetensors", "README.md")
        shutil.copytree(folder, unnamed, ignore=others, dirs_exist_ok=True)  # the tokenizer, if there is one
        (unnamed / ABOUT).write_text(json.dumps(about | found, indent=1))

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {output.parent}: {error.strerror}; give --output FOLDER",
                        Exit.CANNOT_CREATE) from None
    try:
        replace_folder(output if not is_file else output.with_name(f".tmp-{output.name}"), write)
        if is_file:
            take_file(output, FILES[given.format], beside)
    finally:
        with suppress(OSError):  # it is there, and not empty
            (run / "export").rmdir()
    texts = "; the tokenizer is that of RUN/model" if "max_tokens" in description else ""
    say(f"{output}, {beside}{texts}" if is_file else f"{output}: {', '.join(sorted(os.listdir(output)))}", sys.stdout)
    if (output / RUN).exists():
        say(f"try it: {command('python')} {shlex.quote(str(output / RUN))} IMAGE", sys.stdout)


def take_file(output: Path, name: str, beside: Path) -> None:
    """An export is a folder; OUTPUT and the file beside it are two of its files. Raises UserError (64) if it has more.
    """
    whole = output.with_name(f".tmp-{output.name}")
    more = [path.name for path in whole.glob(f"{name}?*")]  # of ONNX, beyond 2 GB
    if not more:
        os.replace(whole / ABOUT, beside)
        os.replace(whole / name, output)
    shutil.rmtree(whole)
    if more:
        raise UserError(f"--output {output}: this model takes several files ({more[0]}); name a folder")


def samples_of(run: Path, data: str | None, description: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rows of RUN/eval/samples.csv, without unreadable samples. data: where the images are now; None = there.

    Raises UserError (66).
    """
    try:
        with (run / "eval" / "samples.csv").open(newline="", **TEXT) as file:
            rows = [row for row in csv.DictReader(file) if row["loss"]]
        old = yaml.safe_load((run / "config.yaml").read_text())["data"]
    except (OSError, csv.Error, yaml.YAMLError, LookupError, TypeError) as error:
        most = f" of at most {MAX_SCORES:,} validation samples x labels: a larger one has no samples.csv"
        raise UserError(f"{run}: the validation samples of the run, on which an export is compared, cannot be read"
                        f" ({type(error).__name__}: {first_line(error)}); name the directory of a run"
                        f"{most if description.get('multi_label') else ''}", Exit.NO_INPUT) from None
    if data and "text_columns" not in description:  # the rows have the paths of images, and the texts themselves
        old, new = (os.path.dirname(root) if root.endswith(TABLES) else root for root in (old, os.path.abspath(data)))
        comma = "," if description.get("num_images", 1) > 1 else "\0"  # no path has this one
        for row in rows:
            paths = row["input"].split(comma)
            row["input"] = comma.join(os.path.join(new, os.path.relpath(path, old)) for path in paths)
    columns = description.get("text_columns", ())
    return [row for row in rows if len(columns) < 2 or row["input"].count("\t") == 1]  # else it is not clear which pair


def parts_of(text: str, description: Mapping[str, Any]) -> list[str]:
    """A text, or the two of a pair."""
    return text.split("\t", len(description["text_columns"]) - 1)


def predictions(folder: Path, names: Sequence[str], description: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What models.predict says of some of these paths or texts: [C] float64. Raises UserError (65, 66)."""
    chosen = inputs = random.Random(0).sample(names, min(len(names), sum(BATCHES)))
    try:
        with TemporaryDirectory() as scratch:
            if columns := description.get("text_columns"):
                inputs = [os.path.join(scratch, "texts.jsonl")]
                rows = (dict(zip(columns, parts_of(text, description), strict=True)) for text in chosen)
                Path(inputs[0]).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            batches = load_task(description["task"]).predict(folder, inputs, CPU, BATCHES[-1]).batches
            found = zip(chosen, [one.values for batch in batches for one in batch], strict=True)
        if known := {name: values for name, values in found if values is not None}:
            return known
        raise UserError(f"none of {len(names)} can be read", Exit.BAD_DATA)
    except UserError as error:
        raise UserError(f"an export is compared on the run's validation samples, and {error}; restore them, or give"
                        " --data PATH if they have moved", error.code) from None


def said_of(values: np.ndarray, description: Mapping[str, Any]) -> str:
    """The prediction in words; "" of a regression. values: [C]."""
    return answer(description, description["classes"], values)[0].get("prediction", "")


def compare(predict: Predict, known: Mapping[str, np.ndarray], description: Mapping[str, Any]) -> dict[str, Any]:
    """For export.json: how far `predict` is from what is known. Raises UserError (65) if that is too far."""
    largest, num_others, names = 0.0, 0, cycle(known)
    for chosen in [[*islice(names, size)] for size in BATCHES]:
        with refusing(f"the export cannot predict {counted(len(chosen), 'sample')} at once", Exit.BAD_DATA):
            for name, found in zip(chosen, predict(chosen), strict=True):
                far = np.max(np.abs(found - known[name]) / description.get("target_std", 1.0))
                largest = np.maximum(largest, far)  # NaN if one of them is
                num_others += said_of(found, description) != said_of(known[name], description) and not far <= TIE
    what = "number, in standard deviations of its target," if "target_std" in description else "probability"
    few = ", which repeat them (a weaker check)" * (len(known) < BATCHES[-1])
    words = (f"{counted(len(known), 'validation sample')} in batches of {BATCHES[0]} to {BATCHES[-1]}{few}: the largest"
             f" difference of a {what} is {largest:.1e}, and {counted(num_others, 'prediction')} differ")
    if num_others or not largest <= TOLERANCE:
        raise UserError(f"the export does not predict what the model of the run does: {words} (allowed: {TOLERANCE:g},"
                        " and none). Nothing was written; try the other --format", Exit.BAD_DATA)
    say(words, sys.stdout)
    return {"samples_compared": len(known), "largest_difference": float(largest)}
