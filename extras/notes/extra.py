"""What the records of a run mean in plain words, said once each, when it first applies.

A pure function of the records in their order: a resumed run goes through those of the starts before it, and says
nothing twice. Only a slow rank is named in each start, by the records of that start. (The notes about timings are
functions of the records, not of the position.)
"""

import math
import shlex
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data.loader import num_workers
from engine.records.log import each_record, figure
from engine.records.waiting import WAIT, waiting
from engine.start import Start
from engine.training import Extra, Training
from models.metrics.metric import MAX_SCORES, share_interval
from models.objectives import Classes, Labels
from utils.errors import counted, rounded
from utils.rundir.identity import identity
from utils.rundir.run import command
from utils.settings.command_line import as_words
from utils.settings.config import Config, settings, types

SETTLED = 100  # optimizer steps until BatchNorm's statistics follow the weights; before, an evaluation says little
RATIO = 10  # of the largest class to the smallest: above, the classes are called imbalanced
NUM_TIMINGS = 5  # train records whose timings are looked at together; WAIT is the mean share of them
SLOW = 1.25  # times the median rank's own time for a step, mean of these
FEW = 2000  # samples of train or val: below, one run on them is not sure
LOSS_ROSE = 1.05  # times the lowest validation loss
TRAIN_FELL, WINDOW = 0.8, 3  # times the training loss this many evaluations before


class EXTRA(Extra):
    """Says each note once."""

    _notes: "Notes | None" = None

    def began(self, t: Training) -> None:
        """What the data say, and from here on what new records say; those that are there have been explained."""
        is_even = t.feed.plan.num_micro_batches % t.world.world_size == 0
        self._notes, first = notes_of(t, t.total_steps, is_even, each_record(t.run.path, "train", "val"))
        for text in first:
            t.log.note(text)

    def recorded(self, record: Mapping[str, Any]) -> Iterable[str]:
        """What a new one says."""
        return self._notes.add(record) if self._notes and record["split"] != "epoch" else ()


    def finished(self, t: Training) -> Mapping[str, str]:
        """For few samples: how sure the best figure is, and the command that trains on other folds."""
        best, num_val, closing_lines = t.state.best, len(t.task.eval_set), {}
        if best["metric"] == "top1" and num_val < FEW and not t.config.data.group_column:  # whose samples are alike
            ends = (figure(t.task, "top1", end) for end in share_interval(best["value"], num_val))
            closing_lines["how sure"] = f"{' to '.join(ends)} (95 %, by {counted(num_val, 'validation sample')})"
        yardstick = t.run.resolved.as_dict().get("yardstick", 0)  # top1
        if best["metric"] == "top1" and best["value"] < yardstick:
            words = shlex.join(["-m", "models.predict", "--model", t.config.model.model, "TABLE"])
            closing_lines["better"] = (
                f"a linear model on frozen features: {figure(t.task, 'top1', yardstick)} by 5 folds of train;"
                f" {command('python')} {words} --embeddings FILE.npy --output FILE.csv")
        if t.task.objective and len(t.task.train_set) < FEW and not t.config.data.without:
            closing_lines["other samples"] = folds_command(t.config)
        return closing_lines


def folds_command(config: Config) -> str:
    """The shell command that trains with these settings on other folds of the training set, and with other seeds."""
    values, usual, kinds = identity(config), identity(type(config)()), types(config)
    words = [word for name, value in values.items() if (value != usual[name] and name != "seed") or name == "task"
             for word in as_words(name, value, kinds[name])]
    return f"{command('python')} -m ask.folds --folds 5 --seeds 3 -- {shlex.join(words)}"


@dataclass
class Notes:
    """See above; add() gets every record. Its fields are what a note needs to know besides."""

    total_steps: int
    majority: float | None  # share of the evaluation set that is of the most frequent class of train; None = no classes
    workers: int  # data loading processes per process
    cores: int  # per process
    is_even: bool  # all ranks have equally many micro-batches
    chosen: Mapping[str, Any] = field(default_factory=dict)  # the settings by name

    def __post_init__(self) -> None:
        self._said: set[str] = set()
        self._evaluations: list[dict[str, Any]] = []  # with the mean training loss since the one before
        self._losses: list[float] = []  # of the train records since the last evaluation
        self._timings: deque[Mapping[str, Any]] = deque(maxlen=NUM_TIMINGS)  # the last train records

    def add(self, record: Mapping[str, Any]) -> list[str]:
        """What to say now. record: as in metrics.jsonl, with `split`."""
        if record["split"] == "train":
            self._losses.append(_number(record["loss"]))
            self._timings.append(record)
            is_enough = len(self._timings) == NUM_TIMINGS
            found = {"data_wait": self._data_wait(), "slow_rank": self._slow_rank()} if is_enough else {}
        else:
            train_loss = float(np.mean(self._losses)) if self._losses else math.nan
            self._evaluations.append({**record, "loss": _number(record.get("loss")), "train_loss": train_loss})
            self._losses = []
            found = {"never_predicted": self._never_predicted(), "majority": self._majority(),
                     "overconfident": self._overconfident(), "memorises": self._memorises()}
        new = {name: text for name, text in found.items() if text and name not in self._said}
        self._said |= set(new)
        return list(new.values())

    def _data_wait(self) -> str:
        wait = sum(each["data_wait"] for each in self._timings) / NUM_TIMINGS
        return waiting(wait, self.workers, self.cores) if wait > WAIT else ""

    def _slow_rank(self) -> str:
        ranks = {each.get("slowest_rank") for each in self._timings}
        if not self.is_even or len(ranks) > 1 or ranks == {None}:
            return ""
        slow_s, usual_s = (sum(each[name] for each in self._timings) / NUM_TIMINGS
                           for name in ("slowest_step_s", "step_s"))
        if slow_s <= SLOW * usual_s:
            return ""
        return (f"rank {ranks.pop()} is slow, and the others wait for it: a step takes it {slow_s:.3g} s, and the"
                f" median rank {usual_s:.3g} s; look at what else runs there, and at its device and its data"
                " (--profile N writes what each rank does)")

    def _settled(self) -> list[dict[str, Any]]:
        """The evaluations that tell what the model has learnt."""
        return [each for each in self._evaluations if each["step"] >= min(SETTLED, self.total_steps)]

    def _never_predicted(self) -> str:
        last = self._settled()[-2:]
        needed = 1 if self._evaluations[-1]["step"] >= self.total_steps else 2
        if len(last) < needed or not all(each.get("never_predicted") for each in last):
            return ""
        return (f"{last[-1]['never_predicted']} of the classes of the validation set are never predicted;"
                " RUN/eval/classes.json has the recall of each class, of the best model so far")

    def _majority(self) -> str:
        now, majority = self._evaluations[-1], self.majority
        if majority in (None, 1) or now["epoch"] < 1 or not self._settled() or now["top1"] > majority + 1e-9:
            return ""  # 1: the validation set has one class, and no model can be above
        return (f"top1 {100 * now['top1']:.2f} % is not above {100 * majority:.2f} %, which always answering the most"
                " frequent class gives: the model has learnt nothing yet; look at --lr and at the labels")

    def _overconfident(self) -> str:
        now, lowest = self._evaluations[-1], min(self._evaluations, key=lambda each: each["loss"])
        if "top1" not in now or now["top1"] <= lowest["top1"] or now["loss"] < LOSS_ROSE * lowest["loss"]:
            return ""
        ways_out = ["; --label-smoothing 0.1 counters it"] if not self.chosen.get("label_smoothing") else []
        ways_out += ["; --best loss keeps the model with the lowest loss"] if self.chosen.get("best") != "loss" else []
        return (f"the validation loss rose from {rounded(lowest['loss'])} at step {lowest['step']} to"
                f" {rounded(now['loss'])}, while top1 rose from {100 * lowest['top1']:.2f} % to"
                f" {100 * now['top1']:.2f} %: this is common, the model becomes too sure of its mistakes"
                f"{''.join(ways_out)}")

    def _memorises(self) -> str:
        if len(self._evaluations) <= WINDOW:
            return ""
        before, *since = self._evaluations[-WINDOW - 1:]
        has_learnt = since[-1]["train_loss"] < TRAIN_FELL * before["train_loss"]
        is_better = min(each["loss"] for each in since) < 0.99 * before["loss"] or (
            max(each.get("top1", 0.0) for each in since) > before.get("top1", 0.0) + 0.005)
        if not has_learnt or is_better or not math.isfinite(before["loss"]):
            return ""
        return (f"over the last {WINDOW} evaluations the training loss fell from {rounded(before['train_loss'])} to"
                f" {rounded(since[-1]['train_loss'])}, but validation did not improve: the model memorises its training"
                " data; more data, stronger augmentation or more --weight-decay counter it, fewer --epochs save time")


def imbalance(counts: Sequence[int], classes: Sequence[str], chosen: Mapping[str, Any]) -> str:
    """A note if the classes of the training set are imbalanced; "" if not. chosen: the settings by name."""
    least, most = int(np.argmin(counts)), int(np.argmax(counts))
    if counts[most] < RATIO * max(1, counts[least]):
        return ""
    ratio = f" ({counts[most] / counts[least]:.0f} to 1)" if counts[least] else ""
    way_out = ("; --class-weights balanced would let every class count as much as any other"
               if ratio and chosen.get("class_weights") == "none" else "")  # it needs a sample of each class
    return (f"the classes are imbalanced: {classes[most]} has {counts[most]} training samples, {classes[least]} has"
            f" {counts[least]}{ratio}; top1 says little about rare classes, see macro_f1 and"
            f" RUN/eval/classes.json{way_out}")


def notes_of(
    start: Start, total_steps: int, is_even: bool, records: Iterable[Mapping[str, Any]]
) -> tuple[Notes, list[str]]:
    """The notes of a run that has these records, and what to say at its start."""
    # the data
    task, world, chosen = start.task, start.world, settings(start.config)
    objective, majority, first = task.objective, None, []
    if isinstance(objective, Classes):
        counts = objective.class_counts
        majority = float(objective.eval_counts[counts.argmax()] / objective.eval_counts.sum())
        first.append(imbalance(counts.tolist(), task.classes, chosen))
    if isinstance(objective, Labels) and len(task.eval_set) * len(objective.names) > MAX_SCORES:
        first.append(f"{len(task.eval_set)} validation samples x {len(objective.names)} labels are more than"
                     f" {MAX_SCORES // 10**6} million: map and RUN/eval are left out, and --best auto is"
                     f" {objective.best}")

    # the records; a run that has some has said what there is to say about the data
    workers = num_workers(chosen["workers"], world)
    notes = Notes(total_steps, majority, workers, world.cores, is_even, chosen)
    for record in records:
        notes.add({**record, "slowest_rank": None})  # a rank of another start: other process, other share of the work
        first = []
    return notes, list(filter(None, first))


def _number(value: float | None) -> float:
    return math.inf if value is None else value  # JSON has no NaN and no infinity
