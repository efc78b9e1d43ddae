"""`python -m benchmarks.padding --data DIR`: how much of what a text run computes is padding.

The texts are tokenized and put into batches as train.py does, by its own sampler: grouped by length for a classifier,
packed for masked tokens (wikitext2). Beside it: in widths that are multiples of 8, as for some GPUs; in micro-batches
of 8 samples; grouped, packed and neither, whichever the task uses. Nothing is trained. DIR holds sst2, agnews and
wikitext2, as in benchmarks/accuracy.py. What is appended to results.jsonl are shares of 1.
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.in_turn import about, append
from benchmarks.pretrained import minilm_folder
from data.plan import cut
from data.sampler import WINDOW, ElasticDistributedSampler, Lengths
from data.texts.text_set import first_fit
from utils.hardware.vendor import TILE

MICRO = 8  # samples
ROWS = (("sst2", 128, 32), ("agnews", 128, 32), ("wikitext2", 128, 64), ("wikitext2", 512, 64))  # tokens, batch


def texts(data: Path, name: str) -> list[str]:
    """The training texts."""
    if name == "sst2":
        return [line.split("\t")[0] for line in (data / name / "train.tsv").read_text().splitlines()[1:]]
    if name == "agnews":
        with (data / name / "train.csv").open(newline="") as file:
            return [f"{row['title']} {row['description']}" for row in csv.DictReader(file)]
    return [line for line in (data / name / "train.txt").read_text().splitlines() if line.strip()]


def lengths(lines: list[str], most: int, splits: bool) -> Tensor:
    """[N] tokens of the samples; a longer text is cut off, or split into several samples."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder(), model_max_length=10**9)
    inner = [len(ids) for ids in tokenizer(lines, add_special_tokens=False)["input_ids"]]
    room = most - 2  # [CLS] and [SEP]
    if not splits:
        return torch.tensor([min(number, room) + 2 for number in inner])
    return torch.tensor([min(room, number - at) + 2 for number in inner for at in range(0, number, room)])


def padded_share(number: Tensor, batches: Iterable[list[int]], multiple: int = 1, is_packed: bool = False) -> float:
    """Padding as a share of the tokens that are computed, 0 to 1. number: [N] tokens of the samples.

    The width of a batch is rounded up to a multiple of `multiple` tokens. is_packed: several samples in a row.
    """
    computed = 0
    for batch in batches:
        of_batch = number[batch].tolist()
        width = -(-max(of_batch) // multiple) * multiple
        computed += width * (first_fit(of_batch, width)[1] if is_packed else len(of_batch))
    return 1 - int(number.sum()) / computed


def micro_batches(number: Tensor, batch: int, micro_batch: int, window: int) -> list[list[int]]:
    """The micro-batches of an epoch. number: [N] tokens of the samples, sorted in a window of `window` batches."""
    sampler = ElasticDistributedSampler(cut(len(number), batch, micro_batch), 0, 1, 0, Lengths(number, window))
    return [list(request.indices) for request in sampler]


def main(data: Path) -> None:
    """Print the table, and append its rows."""
    print(about())
    columns = ("padding", "in widths of 8", f"in micro-batches of {MICRO}", "grouped", "packed", "neither")
    print(f"| texts | tokens at most | batch | {' | '.join(columns)} |\n|" + "---|" * (3 + len(columns)))
    for name, most, batch in ROWS:
        number = lengths(texts(data, name), most, splits=name == "wikitext2")
        is_packed = name == "wikitext2"
        grouped, mixed = (micro_batches(number, batch, batch, window) for window in (WINDOW, 1))
        ours = mixed if is_packed else grouped
        cut_up = micro_batches(number, batch, MICRO, 1 if is_packed else WINDOW)
        shares = dict(zip(columns, (
            padded_share(number, ours, 1, is_packed), padded_share(number, ours, TILE, is_packed),
            padded_share(number, cut_up, 1, is_packed), padded_share(number, grouped),
            padded_share(number, mixed, is_packed=True), padded_share(number, mixed)), strict=True))
        print(f"| {name} | {most} | {batch} | {' | '.join(f'{share:.1%}' for share in shares.values())} |")
        append(f"padding, {name}, {most} tokens at most, batch {batch}", "of the tokens computed",
               {column: [share] for column, share in shares.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.padding")
    parser.add_argument("--data", type=Path, required=True)
    main(parser.parse_args().data)
