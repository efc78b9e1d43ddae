"""The log of a run: console, RUN/metrics.jsonl, TensorBoard. Rank 0 only; the other ranks hold a silent object.

    log = Log(run.path, task, state.progress, total_steps, checkpoints.records) if run.writes else SilentLog()

- metrics.jsonl has one JSON object per line, floats with all their digits, a non-finite one as null. After a resume it
  holds what an uninterrupted run would hold; only the fields in TIMING differ from one run of a command to the next.
- x = optimizer step in every TensorBoard chart, so one purge_step hides what a resumed run repeats. What it does not
  repeat of that step is written again. Event files are read in the order of their names, which begin with the clock.
- A terminal shows a progress bar (tqdm), a file or a pipe plain lines.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from engine.records.record_file import RecordFile, last_records
from engine.start import Start
from models.tasks.base import Task
from utils.errors import rounded, say
from utils.files import json_lines
from utils.rundir.chain import NO_RECORDS
from utils.rundir.clock import SHARES
from utils.rundir.identity import identity
from utils.rundir.state import Progress

# the rest of the fields are pure functions of the position
TIMING = ("samples_per_s", "tokens_per_s", "step_s", "slowest_step_s", "slowest_rank", "memory", "time", *SHARES)
EMA = "ema_"  # before the name of a metric: of the average of the weights (--ema-decay)
_POSITION = ("step", "epoch", "samples")  # of a record; the rest are figures
NO_FIGURES = ("split", *_POSITION, "evaluated", "time")  # of a record of an evaluation
# The tag of a figure in TensorBoard, if it is not SPLIT/NAME; None = it is shown by another record. TensorBoard sorts
# the groups by name, and opens on the first ones: loss and metrics.
_NONE = dict.fromkeys(_POSITION)
_TAGS = {
    "train": {"step": None, **{name: f"wall/{name}" for name in ("epoch", "samples", *TIMING)}},
    "val": _NONE,
    "epoch": {**_NONE, "trained": "wall/trained", **{name: f"wall_of_epoch/{name}" for name in SHARES}}}


def json_line(split: str, record: Mapping[str, Any]) -> str:
    """The numbers of the record as metrics.jsonl holds them, without the line's end."""
    record = {"split": split, **record, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value
              for name, value in record.items() if not isinstance(value, Tensor)}
    return json.dumps(finite, allow_nan=False)  # JSON has no NaN; floats are written by repr


def figure(task: Task, name: str, value: float | None) -> str:
    """A metric's value for people: in percent where the metric says so."""
    is_percentage = any(name.removeprefix(EMA) in metric.percentages for metric in task.metrics)
    return f"{100 * value:.2f} %" if is_percentage and value is not None else rounded(value)


def records(run_dir: Path, *splits: str) -> list[dict[str, Any]]:
    """The records of these splits in RUN/metrics.jsonl, "train", "val", "epoch", but for a line that a kill cut off."""
    return [*each_record(run_dir, *splits)]


def each_record(run_dir: Path, *splits: str) -> Iterator[dict[str, Any]]:
    """The same, one by one."""
    return (record for record in json_lines(run_dir / "metrics.jsonl") if record["split"] in splits)


class SilentLog:
    """The log of the other ranks: the methods of Log, doing nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        getattr(Log, name)  # raises AttributeError
        return lambda *args, **named: None


class Log:
    """Rank 0's log. Nothing here is slow: the other ranks wait at the next collective meanwhile."""

    def __init__(self, run_dir: Path, task: Task, done: Progress, total_steps: int,
                 kept: Mapping[str, Any] = NO_RECORDS):
        """done: where the run resumes; later records are dropped. kept: the earlier ones, as its checkpoint says."""
        # console
        self._task, self._resume_step, self._total_steps, self._stream = task, done.step, total_steps, sys.stdout
        # A terminal without a window (`script`, `docker run -t` in CI) has 0 rows or columns; tqdm would draw nothing.
        self._is_terminal = self._stream.isatty() and min(os.get_terminal_size(self._stream.fileno())) > 0
        self._bar = None
        self._clock: tuple[float, int] | None = None  # (time, step) that the ETA counts from

        # files
        from torch.utils.tensorboard import SummaryWriter
        self._metrics = RecordFile(run_dir / "metrics.jsonl", done, kept)
        # TensorBoard shows the points of both starts unless the new file says where it takes over.
        _put_first(run_dir / "tb")
        is_repeated = done.evaluated_step < done.step or done.step == 0  # of the last step: its evaluation, first batch
        first = done.step if is_repeated else done.step + 1
        self._writer = SummaryWriter(str(run_dir / "tb"), purge_step=first, max_queue=1000, flush_secs=30)
        for record in last_records(self._metrics.path):
            if record["step"] >= first and record["split"] in _TAGS:
                self._chart(record["split"], {name: record[name] for name in record if name not in ("split", "time")})

    def note(self, text: str) -> None:
        """One line to the console; above the progress bar if there is one."""
        if self._bar is not None:
            with suppress(OSError):  # as in say
                self._bar.write(text, file=self._stream)
        else:
            say(text, self._stream)

    def train(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write a record, and return it as it was written.

        record: step, epoch, samples, loss, grad_norm, lr, samples_per_s, data_wait (0..1); tokens_per_s and memory
        if known.
        """
        loss, step = f"loss {rounded(record['loss'])}", f"step {record['step']}/{self._total_steps}"
        speed = f"{record['samples_per_s']:.0f} {self._task.unit}/s wait {100 * record['data_wait']:.0f} %"
        if self._bar is not None:  # it shows them with the next advance()
            self._bar.set_description_str(f"epoch {record['epoch']:.2f}", refresh=False)
            self._bar.set_postfix_str(f"{loss} {speed}", refresh=False)
            return self._write("train", record)
        memory = f" {record['memory']:.0f} MiB" if "memory" in record else ""
        return self._write("train", record, f"{step} {loss} lr {record['lr']:.4g} grad {record['grad_norm']:.3g}"
                                            f" {speed}{memory}{self._eta(record['step'])}")

    def evaluation(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write a record, and return it as it was written.

        record: step, epoch, samples, then the metrics; those that are tensors are left out.
        """
        quiet = {"evaluated", *_POSITION}.union(*(metric.quiet for metric in self._task.metrics))
        shown = " ".join(f"{name} {figure(self._task, name, value)}" for name, value in record.items()
                         if name not in quiet and not isinstance(value, Tensor))
        return self._write("val", record, f"step {record['step']}/{self._total_steps} validation {shown}")

    def epoch(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write a record, and return it as it was written.

        record: step, epoch, samples; `trained`: the different samples that reached a backward in it; SHARES.
        """
        return self._write("epoch", record)

    def show(self, tag: str, make: Callable[[], np.ndarray | str | None]) -> None:
        """What make() gives for TensorBoard, at step 0: a picture ([H, W, 3] uint8), a text in Markdown, or nothing."""
        made = make()
        if isinstance(made, str):
            self._writer.add_text(tag, made, 0)
        elif made is not None:
            self._writer.add_image(tag, made, 0, dataformats="HWC")

    def advance(self, step: int) -> None:
        """`step` optimizer steps are done: move the bar."""
        self._clock = self._clock or (time.monotonic(), step)
        if self._is_terminal and self._bar is None:
            from tqdm import tqdm
            self._bar = tqdm(initial=self._resume_step, total=self._total_steps, unit="step", file=self._stream,
                             dynamic_ncols=True)
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def written(self) -> dict[str, Any]:
        """The records up to now, as a link of the run's chain has them: {"bytes", "sha256"}."""
        return self._metrics.written()

    def flush(self) -> None:
        """Write the records to the disk: before the checkpoint that refers to them. From any thread."""
        self._metrics.sync()
        self._writer.flush()

    def close(self) -> None:
        """Flush and close; note() still works afterwards."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._metrics.close()
        self._writer.close()

    def _write(self, split: str, record: Mapping[str, Any], words: str = "") -> dict[str, Any]:
        """Write a record, and show it in words. Returns it as it was written."""
        line = json_line(split, record)
        self._metrics.write(line)
        self._chart(split, record)
        if words:
            self.note(f"epoch {record['epoch']:.2f} {words}")
        return json.loads(line)

    def _chart(self, split: str, record: Mapping[str, Any]) -> None:
        """The figures of a record in TensorBoard."""
        for name, value in record.items():
            tag = _TAGS[split].get(name, f"{split}/{name}")
            if tag is not None and not isinstance(value, Tensor):
                self._writer.add_scalar(tag, math.nan if value is None else value, record["step"])

    def show_settings(self, start: Start) -> None:
        """What defines the run, with what auto.json keeps of `auto`, in TensorBoard: as a text and as hparams."""
        from torch.utils.tensorboard.summary import hparams

        values, resolved = identity(start.config), start.run.resolved.as_dict()
        values |= {name: value for name, value in resolved.items() if values.get(name) == "auto"}
        values["micro_batches"] = resolved["micro_batches"]
        plain = {name: value if type(value) in (int, float) else str(value).encode(errors="backslashreplace").decode()
                 for name, value in values.items()}  # a path may be in any encoding
        self._writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in plain.items()),
                              self._resume_step)
        metrics = dict.fromkeys(("val/loss", f"val/{self._task.best}", "train/loss"), 0)  # their names alone count
        experiment, session, _ = hparams(plain, metrics)
        self._writer.file_writer.add_summary(experiment)
        self._writer.file_writer.add_summary(session)

    def _eta(self, step: int) -> str:
        """" eta h:mm:ss" from the steps after the first one, whose warm-up does not count; "" before there are any."""
        now = time.monotonic()
        start, first = self._clock or (now, step)
        if step <= first:
            return ""
        return f" eta {timedelta(seconds=round((now - start) / (step - first) * (self._total_steps - step)))}"


def _put_first(folder: Path) -> None:
    """Rename TensorBoard's event files if the next one would come before them: another host's clock may be behind."""
    files = sorted(folder.glob("events.out.tfevents.*"))
    if files and int(files[-1].name.split(".")[3]) >= int(time.time()):
        for number, file in enumerate(files):  # in their order, so a kill between two does no harm
            file.rename(file.with_name(re.sub(r"(?<=tfevents\.)\d+", f"{number:010d}", file.name)))
