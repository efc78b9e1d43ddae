"""`python -m benchmarks.exactness`: three questions about what a run computes, to train.py and to its peers; a table.

1. Does an evaluation of the same weights give the same digits on 1 to 4 processes?
2. Does a run that is killed in the middle of an epoch, and started again, end with the weights of one that was not?
   On as many processes as before (two), and on another number (one).
3. Do four micro-batches in turn make the same step as one batch of their samples (one process, without dropout), and as
   four processes with one each (with dropout)? The last batch of an epoch is smaller. What is shown is the norm of the
   difference of the weights after four epochs, by their norm.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from benchmarks.exactness_peers import EPOCHS, LR, SAVE_EVERY, TRAIN, VAL, VOCABULARY, samples
from benchmarks.in_turn import about
from benchmarks.processes import ROOT, torchrun

BATCH, KILL_AT = 16, 26  # samples of a step; the step, of 16 an epoch, after which a run is killed; its save is older
STEPS = ceil(TRAIN / BATCH)  # of an epoch
SAVES = ("checkpoints/step-*", "checkpoint-*", "last.ckpt")
HEADER = ("digits on 1, 2, 3, 4 processes", "killed, resumed on 2 of 2", "on 1 of 2", "4 x 4 beside 16",
          "1 process beside 4")


@dataclass(frozen=True)
class Contender:
    """How to start it. words: (folders of the run and the model, micro-batch size, processes, whether to evaluate)."""

    name: str
    words: Callable[[Path, Path, int, int, bool], list[object]]
    steps: Callable[[Path], int]  # that are done
    weights: Callable[[Path], dict[str, Tensor]]
    models: Path  # model folders by the probability of dropout: 0.0, 0.1

    def start(self, folder: Path, processes: int, micro: int = 4, dropout: float = 0.1,
              evaluate: bool = False) -> subprocess.Popen:
        """A live run of `processes`."""
        folder.mkdir(exist_ok=True)
        words = self.words(folder, self.models / str(dropout), micro, processes, evaluate)
        return subprocess.Popen(
            [*torchrun(processes), *map(str, words)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *where: object, **how: object) -> str:
        """The same to its end; what it prints. Exits if it fails."""
        process = self.start(*where, **how)
        text, _ = process.communicate()
        if process.returncode:
            sys.exit(f"{self.name}: exit code {process.returncode}\n{text[-3000:]}")
        return text

    def row(self, root: Path) -> list[str]:
        """Its answers."""
        self.run(straight := root / "straight", 2)
        figures = [self.evaluation(straight, processes) for processes in (1, 2, 3, 4)]
        cells = [spread(figures)]
        for processes in (2, 1):
            killed = self.start(folder := root / f"killed-{processes}", 2)
            while self.steps(folder) < KILL_AT and killed.poll() is None:
                time.sleep(0.01)
            if killed.poll() is not None:
                sys.exit(f"{self.name}: ended before it was killed\n{killed.communicate()[0][-3000:]}")
            kill(folder)
            killed.communicate()
            done, is_saved = self.steps(folder), any(any(folder.rglob(name)) for name in SAVES)
            if done % STEPS == 0 or done >= EPOCHS * STEPS or not is_saved:
                sys.exit(f"{self.name}: killed at step {done}, the end of an epoch, or without a checkpoint")
            self.run(folder, processes)
            cells.append(self.difference(straight, folder))
        for name, processes, micro, dropout in (("turns", 1, 4, 0.0), ("one", 1, 16, 0.0), ("alone", 1, 4, 0.1),
                                                ("four", 4, 4, 0.1)):
            self.run(root / name, processes, micro=micro, dropout=dropout)
        return [*cells, self.difference(root / "turns", root / "one"), self.difference(root / "alone", root / "four")]

    def evaluation(self, folder: Path, processes: int) -> dict[str, float]:
        """Of its weights, on as many processes."""
        text = self.run(folder, processes, evaluate=True)
        if (file := folder / "evaluation.json").exists():
            return json.loads(file.read_text())
        return {name: json.loads(text.splitlines()[-1])[name] for name in ("loss", "top1")}

    def difference(self, one: Path, other: Path) -> str:
        """Of their weights."""
        first, second = (torch.cat([tensor.double().flatten() for name, tensor in sorted(self.weights(folder).items())
                                    if tensor.is_floating_point()]) for folder in (one, other))
        return "same bits" if torch.equal(first, second) else f"{float((first - second).norm() / first.norm()):.0e}"


def ours(strategy: str, data: Path, models: Path) -> Contender:
    """train.py under a strategy."""
    def words(folder: Path, model: Path, micro: int, processes: int, evaluate: bool) -> list[object]:
        if evaluate:
            return ["train.py", "--eval-only", "--run-dir", folder / "run"]
        return ["train.py", "--task", "text-classification", "--data", data, "--model", model, "--epochs", EPOCHS,
                "--global-batch-size", BATCH, "--micro-batch-size", micro, "--optimizer", "sgd", "--lr", LR,
                "--schedule", "constant", "--momentum", 0, "--weight-decay", 0, "--max-grad-norm", 0,
                "--warmup-steps", 0,
                "--save-every", SAVE_EVERY, "--eval-every", 10**6, "--log-every", 1, "--strategy", strategy,
                "--device", "cpu", "--threads", 1, "--precision", "fp32", "--run-dir", folder / "run"]

    def steps(folder: Path) -> int:
        with suppress(FileNotFoundError):
            return (folder / "run/metrics.jsonl").read_text().count('"split": "train"')
        return 0

    return Contender(f"train.py, `{strategy}`", words, steps,
                     lambda folder: load_file(folder / "run/model/model.safetensors"), models)


def peer(name: str, title: str, models: Path) -> Contender:
    """One of exactness_peers.py."""
    def words(folder: Path, model: Path, micro: int, processes: int, evaluate: bool) -> list[object]:
        return ["-m", "benchmarks.exactness_peers", name, "--folder", folder, "--model", model, "--batch", micro,
                "--accumulate", BATCH // micro // processes or 1, *(["--evaluate"] if evaluate else [])]

    def steps(folder: Path) -> int:
        with suppress(FileNotFoundError, ValueError):
            return int((folder / "steps").read_text())
        return 0

    return Contender(title, words, steps, lambda folder: torch.load(folder / "weights.pt"), models)


def spread(figures: list[dict[str, float]]) -> str:
    """Whether all are the same digits; else how far apart they are, as a share of the first."""
    if all(each == figures[0] for each in figures):
        return "yes"
    apart = {name: max(abs(each[name] / figures[0][name] - 1) for each in figures) for name in figures[0]}
    return "no: " + ", ".join(f"{name} by {value:.0e}" for name, value in apart.items())


def kill(folder: Path) -> None:
    """Kill every process that was started with it, at once."""
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.fsencode(folder) in (directory / "cmdline").read_bytes() and int(directory.name) != os.getpid():
                os.kill(int(directory.name), signal.SIGKILL)


def write_texts(root: Path) -> Path:
    """The peers' samples as tables."""
    root.mkdir()
    for split, count, seed in (("train", TRAIN, 0), ("val", VAL, 1)):
        lines = [f"{' '.join(f'w{token}' for token in row['input_ids'])},{row['labels']}"
                 for row in samples(count, seed)]
        (root / f"{split}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    return root


def write_models(root: Path) -> Path:
    """Small BERTs of random weights, with and without dropout, and a tokenizer that gives a word w17 the token 17."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = BertTokenizerFast({name: at for at, name in enumerate(
        [*names, *(f"w{at}" for at in range(len(names), VOCABULARY))])})
    for dropout in (0.0, 0.1):
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(
            vocab_size=VOCABULARY, id2label={0: "0", 1: "1", 2: "2"}, hidden_size=64, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=128,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout))
        model.save_pretrained(root / str(dropout))
        tokenizer.save_pretrained(root / str(dropout))
    return root


def main() -> None:
    """Print the table, a row at a time."""
    print(about())
    print(f"| | {' | '.join(HEADER)} |\n|{'---|' * (len(HEADER) + 1)}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        data, models = write_texts(Path(temporary) / "texts"), write_models(Path(temporary) / "models")
        for number, contender in enumerate((
                ours("exact", data, models), ours("ddp", data, models),
                peer("trainer", "transformers.Trainer", models), peer("lightning", "Lightning", models))):
            (root := Path(temporary) / f"contender-{number}").mkdir()
            print(f"| {contender.name} | {' | '.join(contender.row(root))} |", flush=True)


if __name__ == "__main__":
    main()
