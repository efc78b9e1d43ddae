"""What a run tells people: console, RUN/metrics.jsonl, TensorBoard. Rank 0 only; the other ranks hold a silent object.

    log = open_log(run_dir, world.is_main, resume_step, evaluated_step, total_steps, unit="img", has_ledger=False)

- metrics.jsonl has one JSON object a line, floats with all their digits, a non-finite one as null. After a resume it holds
  what an uninterrupted run would hold; of its fields only TIMING differ from one run of a command to the next.
- x = optimizer step in every TensorBoard chart, so one purge_step hides all that a resumed run does again.
- A terminal gets a progress bar (tqdm), a file or a pipe plain lines.
"""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from utils.errors import say

TIMING = ("samples_per_s", "tokens_per_s", "data_wait", "memory", "time")  # the rest are pure functions of the position
_TAGS = {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "optim/lr", "epoch": "progress/epoch", "samples": "progress/samples",
         **{name: f"perf/{name}" for name in TIMING}}
_LABELLED_CLASSES = 20  # above this a confusion matrix is drawn without names and counts
_SHADES = torch.tensor([(247, 250, 254), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107)]).float()  # light to dark blue
_INK, _PALE = (32, 36, 44), (176, 184, 194)


def open_log(run_dir: Path | None, is_main: bool, resume_step: int, evaluated_step: int, total_steps: int, unit: str,
             has_ledger: bool = False, stream: TextIO | None = None) -> "Log | SilentLog":
    """The run's log on rank 0, a silent one on the others.

    run_dir: None = console only. resume_step: optimizer steps done; later records of an earlier start are dropped, and val
    records after evaluated_step. unit: what a sample is called ("img"). has_ledger: consumed() is called at every step.
    stream: the console; None = standard output.
    """
    return Log(run_dir, resume_step, evaluated_step, total_steps, unit, has_ledger, stream) if is_main else SilentLog()


def json_line(split: str, record: Mapping[str, Any]) -> str:
    """The record as metrics.jsonl holds it, without the line's end."""
    record = {"split": split, **record, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()}
    return json.dumps(finite, allow_nan=False)  # JSON has no NaN; floats are written by repr


def figure(name: str, value: float) -> str:
    """A metric's value for people: shares of samples in percent."""
    return f"{100 * value:.2f} %" if name in ("top1", "top5") else f"{value:.4f}"


def last_record(run_dir: Path, split: str) -> dict[str, Any]:
    """The last record of "train" or "val" in RUN/metrics.jsonl."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["split"] == split][-1]


class SilentLog:
    """The log of the other ranks: the methods of Log, doing nothing."""

    def note(self, text: str) -> None: pass
    def train(self, record: Mapping[str, Any]) -> None: pass
    def evaluation(self, record: Mapping[str, Any], confusion: Tensor | None, class_names: Sequence[str]) -> None: pass
    def advance(self, step: int) -> None: pass
    def consumed(self, step: int, epoch: int, samples: Sequence[Sequence[int]]) -> None: pass
    def flush(self) -> None: pass
    def close(self) -> None: pass


class Log:
    """Rank 0's log. The other ranks wait at the next collective meanwhile, so nothing here is slow."""

    def __init__(self, run_dir: Path | None, resume_step: int, evaluated_step: int, total_steps: int, unit: str,
                 has_ledger: bool, stream: TextIO | None):
        self._resume_step, self._total_steps, self._unit = resume_step, total_steps, unit
        self._stream = stream or sys.stdout
        # A terminal without a window (`script`, `docker run -t` in CI) has 0 rows or columns, and tqdm would draw nothing there.
        self._is_terminal = self._stream.isatty() and min(os.get_terminal_size(self._stream.fileno())) > 0
        self._bar = self._metrics = self._ledger = self._writer = None
        self._clock: tuple[float, int] | None = None  # (time, step) that the ETA counts from
        if run_dir is not None:
            from torch.utils.tensorboard import SummaryWriter
            self._metrics = _continued(run_dir / "metrics.jsonl", resume_step, evaluated_step)
            self._ledger = _continued(run_dir / "ledger.jsonl", resume_step, evaluated_step) if has_ledger else None
            # The Python reader shows the points of both starts unless the new file says where it takes over.
            self._writer = SummaryWriter(str(run_dir / "tb"), purge_step=resume_step + 1, max_queue=1000, flush_secs=30)

    def note(self, text: str) -> None:
        """One line to the console; above the progress bar if there is one."""
        if self._bar is not None:
            with suppress(OSError):  # as in say
                self._bar.write(text, file=self._stream)
        else:
            say(text, self._stream)

    def train(self, record: Mapping[str, Any]) -> None:
        """record: step, epoch, samples, loss, grad_norm, lr, samples_per_s, data_wait (0..1), tokens_per_s and memory where known."""
        self._write("train", record, {name: _TAGS.get(name, f"train/{name}") for name in record if name != "step"})
        step, eta = record["step"], self._eta(record["step"])
        speed = f"{record['samples_per_s']:.0f} {self._unit}/s wait {100 * record['data_wait']:.0f} %"
        if self._is_terminal:
            self._show_bar()
            self._bar.set_description_str(f"epoch {record['epoch']:.2f}", refresh=False)
            self._bar.set_postfix_str(f"loss {record['loss']:.4f} {speed}", refresh=False)  # shown with the next advance()
        else:
            memory = f" {record['memory']:.0f} MiB" if "memory" in record else ""
            self.note(f"epoch {record['epoch']:.2f} step {step}/{self._total_steps} loss {record['loss']:.4f} lr {record['lr']:.4g}"
                      f" grad {record['grad_norm']:.3g} {speed}{memory}{eta}")

    def evaluation(self, record: Mapping[str, Any], confusion: Tensor | None, class_names: Sequence[str]) -> None:
        """record: step, epoch, samples, then the metrics. confusion: [classes, classes] counts, a row per true class."""
        figures = {name: value for name, value in record.items() if name not in ("step", "epoch", "samples")}
        self._write("val", record, {name: f"val/{name}" for name in figures})
        if self._writer is not None and confusion is not None:
            import numpy
            picture = _confusion_picture(confusion, class_names, f"step {record['step']}, shade = share of the true class")
            self._writer.add_image("val/confusion", numpy.asarray(picture), record["step"], dataformats="HWC")
        shown = " ".join(f"{name} {figure(name, value)}" for name, value in figures.items())
        self.note(f"epoch {record['epoch']:.2f} step {record['step']}/{self._total_steps} validation {shown}")

    def advance(self, step: int) -> None:
        """`step` optimizer steps are done: move the bar."""
        self._clock = self._clock or (time.monotonic(), step)
        if self._is_terminal:
            self._show_bar()
            self._bar.update(step - self._bar.n)

    def consumed(self, step: int, epoch: int, samples: Sequence[Sequence[int]]) -> None:
        """A line of RUN/ledger.jsonl: the samples that optimizer step `step` was computed from, by micro-batch."""
        self._ledger.write(json.dumps({"split": "train", "step": step, "epoch": epoch, "samples": samples}) + "\n")
        self._ledger.flush()

    def flush(self) -> None:
        """Records on disk: before a checkpoint is, so that a resume never finds fewer than its position has. From any thread."""
        for file in filter(None, (self._metrics, self._ledger)):
            os.fsync(file.fileno())
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush and close; note() still works afterwards."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        for file in filter(None, (self._metrics, self._ledger, self._writer)):
            file.close()
        self._metrics = self._ledger = self._writer = None

    def _write(self, split: str, record: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        if self._metrics is None:
            return
        self._metrics.write(json_line(split, record) + "\n")
        self._metrics.flush()
        for name, tag in tags.items():
            self._writer.add_scalar(tag, record[name], record["step"])

    def _eta(self, step: int) -> str:
        """" eta h:mm:ss" from the steps since the first one, whose warm-up does not count; "" before there are any."""
        now = time.monotonic()
        self._clock = self._clock or (now, step)
        start, first = self._clock
        if step <= first:
            return ""
        return f" eta {timedelta(seconds=round((now - start) / (step - first) * (self._total_steps - step)))}"

    def _show_bar(self) -> None:
        if self._bar is None:
            from tqdm import tqdm
            self._bar = tqdm(initial=self._resume_step, total=self._total_steps, unit="step", file=self._stream, dynamic_ncols=True)


def _continued(path: Path, resume_step: int, evaluated_step: int) -> TextIO:
    """The file, to append to, without what the resumed run writes again or a kill cut short. It is complete at every moment."""
    kept = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["step"] <= (evaluated_step if record["split"] == "val" else resume_step):
            kept.append(line + b"\n")
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return path.open("a", encoding="utf-8")


def _confusion_picture(confusion: Tensor, class_names: Sequence[str], title: str) -> Any:
    """A PIL image of the matrix: rows = true class, shaded by their share of the row; counts where names are shown."""
    from PIL import Image, ImageDraw, ImageFont
    counts = confusion.cpu()  # [C, C]
    shares = (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).float()
    font, gap, line = ImageFont.load_default(14), 8, 18
    labelled = len(counts) <= _LABELLED_CLASSES
    names = [_shortened(name) for name in class_names] if labelled else []
    widest_count = math.ceil(max((font.getlength(str(int(count))) for count in counts.flatten()), default=0)) if labelled else 0
    cell = max(44, 320 // len(shares), widest_count + 2 * gap) if labelled else max(1, 600 // len(shares))
    side = cell * len(shares)
    longest = math.ceil(max(map(font.getlength, names), default=0))
    upright = longest > cell - gap  # names too long for a column stand on end
    left, top = 2 * gap + line + (longest + gap if labelled else 0), 2 * gap + line
    below = (longest if upright else line) + gap if labelled else 0
    picture = Image.new("RGB", (left + side + 2 * gap + 12 + gap + 48, top + side + gap + below + line + gap), "white")
    draw = ImageDraw.Draw(picture)

    def write(x: int, y: int, text: str, anchor: str, colour: tuple[int, int, int] = _INK) -> None:
        draw.text((x, y), text, fill=colour, font=font, anchor=anchor)

    def write_upwards(x: int, y: int, text: str, anchor: str) -> None:
        """Centred on column x; y is where the text ends ("r") or its middle ("m")."""
        tile = Image.new("L", (math.ceil(font.getlength(text)), line))
        ImageDraw.Draw(tile).text((0, line // 2), text, fill=255, font=font, anchor="lm")
        tile = tile.transpose(Image.Transpose.ROTATE_90)
        picture.paste(_INK, (x - line // 2, y if anchor == "r" else y - tile.height // 2), tile)

    def paint(values: Tensor, x: int, y: int, width: int, height: int) -> None:
        picture.paste(Image.fromarray(_shaded(values).numpy()).resize((width, height), Image.Resampling.NEAREST), (x, y))
        draw.rectangle((x - 1, y - 1, x + width, y + height), outline=_PALE)

    write(left, gap + line // 2, title, "lm")
    paint(shares, left, top, side, side)
    bar = left + side + 2 * gap
    paint(torch.linspace(1, 0, side)[:, None], bar, top, 12, side)
    write(bar + 12 + gap, top, "100 %", "lt")
    write(bar + 12 + gap, top + side, "0 %", "ls")
    write_upwards(gap + line // 2, top + side // 2, "true class", "m")
    write(left + side // 2, top + side + gap + below + line // 2, "predicted class", "mm")
    for row, name in enumerate(names):
        middle = row * cell + cell // 2
        write(left - gap, top + middle, name, "rm")
        if upright:
            write_upwards(left + middle, top + side + gap, name, "r")
        else:
            write(left + middle, top + side + gap + line // 2, name, "mm")
        for column, count in enumerate(counts[row].tolist()):
            colour = _PALE if not count else (255, 255, 255) if shares[row, column] > 0.5 else _INK
            write(left + column * cell + cell // 2, top + middle, str(count), "mm", colour)
    return picture


def _shaded(shares: Tensor) -> Tensor:
    """[H, W] in 0..1 -> [H, W, 3] uint8, linear between the shades."""
    position = shares * (len(_SHADES) - 1)
    lower = position.long().clamp(max=len(_SHADES) - 2)
    return torch.lerp(_SHADES[lower], _SHADES[lower + 1], (position - lower)[..., None]).round().byte()


def _shortened(name: str, most: int = 24) -> str:
    name = " ".join(name.split())
    return name if len(name) <= most else name[: most - 1] + "…"
