"""Cross-validation: a run of train.py for each fold and seed, one after another; each sample of train is in one fold.

    python -m ask.folds --folds 5 --seeds 3 -- --data FILE.csv --epochs 10        # settings of train.py after --
    python -m ask.folds -- --data FILE.csv --lr 1e-4 --against --lr 3e-4          # is another rate better?
    python -m ask.folds -- --data FILE.csv --nproc-per-node 4                     # each run on four processes
    python -m ask.folds --part 2 8 -- --data FILE.csv                             # an eighth of the runs

A run is trained on all folds but one, and evaluated on that one after its last epoch. With --inner the fold after it
decides which epoch is best, and is not trained on. Classes are spread evenly over the folds, and the groups of
--group-column stay whole. What the data call val or test takes no part. Settings after --against replace those before
it; both are trained on the same folds. The same command continues.
"""

import argparse
import csv
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import extras
from data import demo
from utils.errors import SIGNALS, Exit, Parser, UserError, exit_after, leave, say
from utils.settings.command_line import parse_command_line

PARSER = Parser("ask.folds", __doc__, usage="%(prog)s [options] [-- SETTINGS [--against SETTINGS]]")
PARSER.add_argument("--folds", type=int, default=5, metavar="N", help="how many (default: 5)")
PARSER.add_argument("--seeds", type=int, default=1, metavar="N",
                    help="how often, each time with the next --seed, which shuffles samples, or groups of about one"
                         " size (default: 1)")
PARSER.add_argument("--inner", action="store_true", help="the fold after the reported one decides which epoch is best")
PARSER.add_argument("--part", type=int, nargs=2, default=(1, 1), metavar=("K", "N"),
                    help="train only the K-th of N shares of the runs; then the same command without it reports all")
PARSER.add_argument("--output", default="runs", metavar="FOLDER",
                    help="the results get a folder of their own in it, folds-... (default: runs)")
RUNNING: list[subprocess.Popen] = []  # the newest run, which may have ended
SIGNALLED: list[int] = []  # signals that asked to stop


def begin(argv: Sequence[str]) -> tuple[argparse.Namespace, list[list[str]]]:
    """The arguments, and the words of each list of settings. Exits: 0 after --help, 64 on invalid arguments."""
    own, words = _cut(argv, "--")
    first, second = _cut(words, "--against")
    given = PARSER.parse_args(own)
    least, (part, parts) = 3 if given.inner else 2, given.part
    if given.folds < least or given.seeds < 1 or not 1 <= part <= parts:
        PARSER.error(f"give at least {least} --folds, at least 1 of --seeds, and --part K N with K from 1 to N")
    if "LOCAL_RANK" in os.environ:
        PARSER.error("start it once, without torchrun; -- --nproc-per-node 4 gives each run four processes")
    return given, [first, *([first + second] if "--against" in words else [])]


def _cut(words: Sequence[str], word: str) -> tuple[list[str], list[str]]:
    place = words.index(word) if word in words else len(words)
    return [*words[:place]], [*words[place + 1:]]


def listen() -> None:
    """From here on `stop` answers the signals that ask to stop."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, stop)


def stop(number: int, _: object) -> None:
    """Pass a signal that asks to stop on to the run, and start no other. Before the first run, end here: 75."""
    SIGNALLED.append(number)
    if not RUNNING:
        leave("folds: stopped before its first run; the same command starts it", Exit.STOPPED)
    RUNNING[0].send_signal(number)


if __name__ == "__main__":  # before torch is imported; one process: it is the runs that --nproc-per-node is for
    listen()
    GIVEN, WORDS = begin(sys.argv[1:])
    CONFIGS = [parse_command_line([*words, "--nproc-per-node", "1"], demo.SETTINGS, extras.pages()) for words in WORDS]

import numpy as np

from ask.labelled import read_samples
from ask.resampling import estimate, mislabelled, partition
from ask.samples import Rows, table, write_rows
from data.labels import lacking
from engine.records.log import NO_FIGURES
from models.metrics.metric import MAX_SCORES
from utils.distributed.signals import end_with_parent
from utils.files import read_json, write_atomically
from utils.output_files import TEXT
from utils.rundir.identity import run_path
from utils.settings.config import Config, flag, settings

TRAIN = Path(__file__).parents[1] / "train.py"
OWN = dict.fromkeys(("run_dir", "fresh", "eval_only", "check"), "each run has a directory of its own; leave it out")
OWN["without"] = "the folds take all samples; make a table of those that stay"
CHOOSING = dict.fromkeys(("early_stop_patience", "ema_decay"),
                         "the fold that is reported would choose the model; with --inner another fold chooses it")
FEWEST_RUNS = 5  # of an interval: one of two runs is 13 of their standard deviations wide on each side
NO_BOUNDS = -math.inf, math.inf
BOUNDS = {r"(macro|weighted|micro)_(precision|recall|f1)|top1|top5|map|auroc": (0.0, 1.0),  # of figures, by their names
          "loss|mae|rmse": (0.0, math.inf), "r2": (-math.inf, 1.0), "pearson|spearman": (-1.0, 1.0)}
NEVER = 10**9  # steps: the only evaluation is the one at the end of the run, so none chooses the model


@dataclass(frozen=True, eq=False)
class Fold:
    """A run, and the fold that it is not trained on."""

    config: Config
    words: list[str]  # the settings as typed
    lines: list[str]  # of a table, one for each sample
    run: Path
    seed: int
    number: int  # of the fold, from 1
    parts: dict[str, np.ndarray]  # indices of samples by split
    split: str  # what the run calls the fold: val, or test where another one is val

    @property
    def indices(self) -> np.ndarray:
        """Of its samples."""
        return self.parts[self.split]

    def train(self) -> int:
        """Train and evaluate, from where it stands. Returns the exit code."""
        # the tables; the name of the folder holds all that decides them
        data = self._beside("-data")
        data.mkdir(parents=True, exist_ok=True)
        for name, indices in self.parts.items():
            if not (file := data / f"{name}.jsonl").exists():
                write_atomically(file, "".join(self.lines[index] for index in indices))

        # the run
        usual = demo.SETTINGS.get(self.config.run.task, {}) if self.config.data.data == "demo" else {}
        words = [word for name, value in usual.items() for word in (flag(name), *np.ravel(value))]
        words += [*self.words, "--data", data, "--seed", self.seed, "--run-dir", self.run]
        if self.split == "val":
            return run_command(*words, "--eval-every", NEVER)[0]
        code, _ = run_command(*words)
        if code or self._beside(".json").exists():
            return code
        code, figures = run_command("--eval-only", "--run-dir", self.run, "--split", self.split,
                                    "--output", self._beside(".csv"), stdout=subprocess.PIPE)
        if not code:
            write_atomically(self._beside(".json"), figures)
        return code

    def figures(self) -> dict[str, float]:
        """Those of the fold by name, if they are finite."""
        path = self.run / "summary.json" if self.split == "val" else self._beside(".json")
        return {name: value for name, value in read_json(path).items()
                if isinstance(value, int | float) and name not in NO_FIGURES}

    def predictions(self) -> Rows:
        """A row for each sample of the fold, as in RUN/eval/samples.csv."""
        path = self.run / "eval" / "samples.csv" if self.split == "val" else self._beside(".csv")
        with path.open(newline="", **TEXT) as file:
            return [{"sample": int(index), "seed": self.seed, "fold": self.number, **row}
                    for index, row in zip(self.indices, csv.DictReader(file), strict=True)]

    def _beside(self, ending: str) -> Path:
        return self.run.with_name(self.run.name + ending)


def run_command(*words: object, stdout: int | None = None) -> tuple[int, str]:
    """The exit code of train.py with these words, as a shell has it; and its standard output, if that is a pipe.

    It does not outlive this process. After a signal that asks to stop nothing is started: 75.
    """
    if SIGNALLED:
        return Exit.STOPPED, ""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # in the run, too: they wait until it fetches them
    process = subprocess.Popen(  # in a group of its own: it would get the Ctrl-C of a terminal twice
        [sys.executable, TRAIN, *map(str, words)], stdout=stdout, text=True, process_group=0,
        preexec_fn=partial(end_with_parent, signal.SIGTERM))
    RUNNING[:] = [process]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if SIGNALLED:  # one came while it started
        process.send_signal(SIGNALLED[-1])
    output, _ = process.communicate()
    return process.returncode if process.returncode >= 0 else 128 - process.returncode, output


def main(given: argparse.Namespace, words: Sequence[list[str]], configs: Sequence[Config]) -> int:
    """Train what is not trained yet; then say what all runs found. Returns the exit code."""
    # the runs
    folds = [[*folds_of(given, *each)] for each in zip(words, configs, strict=True)]
    if len(folds) > 1 and folds[0][0].run == folds[1][0].run:
        raise UserError("--against: the settings after it change no run; give one that does, such as --lr")
    if any(not np.array_equal(one.indices, two.indices) for one, two in zip(folds[0], folds[-1], strict=True)):
        raise UserError("--against: these settings change samples, labels, groups or seeds, so the folds cannot be"
                        " compared; leave them out")
    runs, (part, num_parts) = [fold for pair in zip(*folds, strict=True) for fold in pair], given.part
    for number, fold in [*enumerate(runs, 1)][part - 1::num_parts]:
        say(f"folds: run {number} of {len(runs)}, {fold.run}", sys.stdout)
        if code := fold.train():
            is_transient = code in (Exit.STOPPED, Exit.HARDWARE, Exit.LOST_PEERS) or code > 128
            before = "" if is_transient else "correct what it says, and "
            say(f"folds: ended at {fold.run} with exit code {code}; {before}the same command continues")
            return code
    if num_parts > 1:
        return Exit.DONE

    # what they found
    if SIGNALLED:
        say("folds: stopped before the report; the same command continues")
        return Exit.STOPPED
    figures = [[fold.figures() for fold in each] for each in folds]
    for each, found in zip(folds, figures, strict=True):
        folder = each[0].run.parent
        report(folder, "runs", [{"run": fold.run.name, **one} for fold, one in zip(each, found, strict=True)])
        predictions = [row for fold in each for row in fold.predictions()]
        report(folder, "predictions", predictions, shown=3)
        values = settings(each[0].config)
        if values["loss"] == "bce":
            say("\nno label is examined: with --loss bce a row does not say how probable its label is", sys.stdout)
        elif "probability" in predictions[0] and not values["multi_label"]:
            doubted = mislabelled(predictions)
            report(folder, "mislabelled", doubted, shown=5)
            if not doubted:
                say("\nno label is doubted", sys.stdout)
            elif 5 * len(doubted) * given.seeds > len(predictions):
                say("too many labels (over 20 %) look wrong: the model is too weak; do not trust this list", sys.stdout)
        report(folder, "figures", [{name: value for name, value in row.items() if name != "p"}
                                   for row in estimates(found, each[0])])
        if len(found) < FEWEST_RUNS:
            say(f"{len(found)} runs are too few for an interval; {FEWEST_RUNS} are enough: more --folds or --seeds",
                sys.stdout)
    if len(folds) > 1:
        differences = [{name: two[name] - one[name] for name in one if name in two}
                       for one, two in zip(*figures, strict=True)]
        report(folder, "differences", estimates(differences, each[0], are_differences=True))
    return Exit.DONE


def estimates(found: Sequence[dict[str, float]], fold: Fold, are_differences: bool = False) -> Rows:
    """A row for each figure that all runs have. fold: one of them. Of fewer than FEWEST_RUNS there is no interval."""
    share, rows = len(fold.indices) / len(fold.parts["train"]), []
    for name in [name for name in found[0] if all(name in one for one in found)]:
        row = estimate([one[name] for one in found], share)
        if len(found) < FEWEST_RUNS:
            del row["low"], row["high"]
        elif not are_differences:
            least, most = next((ends for names, ends in BOUNDS.items() if re.fullmatch(names, name)), NO_BOUNDS)
            row |= {"low": max(least, row["low"]), "high": min(most, row["high"])}
        rows.append({"figure": name, **row})
    return rows


def folds_of(given: argparse.Namespace, words: list[str], config: Config) -> Iterator[Fold]:
    """All folds of all seeds. Raises UserError: 64 for settings or a number of folds that do not fit, 65, 66, 74."""
    # settings
    values = settings(config)
    for name, reason in (OWN | ({} if given.inner else CHOOSING)).items():
        if values.get(name):
            raise UserError(f"{flag(name)}: {reason}")
    if "label_column" not in values:
        raise UserError(f"--task {config.run.task}: folds are for the tasks with labels")

    # samples
    lines, names, labels, groups = read_samples(config)
    digest = sha256("".join([*lines, f"{given.folds} {given.inner}"]).encode()).hexdigest()[:8]
    folder = Path(given.output) / f"folds-{run_path(config).name}-{digest}"
    away = {"val": 1, "test": 0} if given.inner else {"val": 0}  # by split: which fold after the reported one it is
    for seed in range(config.run.seed, config.run.seed + given.seeds):
        places = partition(labels, given.folds, seed, groups)
        if len(np.unique(places)) < given.folds:
            raise UserError(f"--folds {given.folds}: there are fewer samples or groups; give fewer folds")
        for number in range(given.folds):
            distances = (places - number) % given.folds
            parts = {"train": np.flatnonzero(distances >= len(away)),
                     **{split: np.flatnonzero(distances == distance) for split, distance in away.items()}}
            for note in lacking(names, labels[parts["train"]], "what is left to train on"):
                raise UserError(f"--folds {given.folds}: without fold {number + 1} of seed {seed}, {note}; add samples,"
                                " or leave these out", Exit.BAD_DATA)
            fold = Fold(config, words, lines, folder / f"seed{seed}-fold{number + 1}", seed, number + 1, parts,
                        "test" if given.inner else "val")
            if values.get("multi_label") and len(fold.indices) * len(names) > MAX_SCORES:
                raise UserError(f"--folds {given.folds}: a fold has {len(fold.indices):,} samples x {len(names):,}"
                                f" labels, and above {MAX_SCORES:,} a run writes no row for each sample; give more"
                                " folds")
            yield fold


def report(folder: Path, name: str, rows: Rows, shown: int = 20) -> None:
    """Write the rows into FOLDER/NAME.csv and NAME.json, and say the first ones; without rows, remove the files."""
    for old in folder.glob(f"{name}.*"):
        old.unlink()
    if rows:
        write_rows(rows, str(folder / name))
        say("\n".join([f"\n{folder / name}.csv", *table(rows, shown)]), sys.stdout)


if __name__ == "__main__":
    exit_after(partial(main, GIVEN, WORDS, CONFIGS), PARSER.name)
