"""engine/records/log.py: what is recorded, where, and what stays of it after a resume."""

import contextlib
import fcntl
import inspect
import io
import json
import math
import os
import pty
import struct
import termios
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.records.log import Log, SilentLog, figure
from utils.rundir.clock import SHARES
from utils.rundir.state import Progress

CLASSES = ("cat", "dog")


def train_record(step, **changed):
    record = {"step": step, "epoch": step / 10, "samples": 8 * step, "loss": 0.1 + 0.2, "grad_norm": 1.234, "lr": 0.05,
              "samples_per_s": 1234.4, "data_wait": 0.03}
    return record | changed


def val_record(step, **changed):
    record = {"step": step, "epoch": step / 10, "samples": 8 * step, "loss": 0.5, "top1": 0.9783, "macro_f1": 0.97}
    return record | changed


def task_of(classes):
    return SimpleNamespace(unit="img", classes=classes, metrics=(SimpleNamespace(percentages=("top1",), quiet=()),))


def open_here(run_dir, resume_step=0, evaluated_step=0, stream=None, classes=CLASSES):
    run_dir.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(stream or io.StringIO()):
        done = Progress(step=resume_step, evaluated_step=evaluated_step)
        return Log(run_dir, task_of(classes), done, 40)


def lines_of(run_dir, name="metrics.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def events_of(run_dir):
    events = EventAccumulator(str(run_dir / "tb"), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    return events


def test_a_record_is_written_with_all_its_digits_between_split_and_time(tmp_path):
    log = open_here(tmp_path)
    record = train_record(10, memory=512)
    log.train(record)
    [line] = lines_of(tmp_path)  # before close: every line is flushed
    log.close()
    assert list(line) == ["split", *record, "time"]
    assert {name: line[name] for name in record} == record


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_becomes_null(tmp_path, value):
    log = open_here(tmp_path)
    log.train(train_record(1, loss=value))
    log.evaluation(val_record(1, top1=value))
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    train, val = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert (train["loss"], val["top1"]) == (None, None)


def test_resume_drops_records_that_will_be_written_again(tmp_path):
    """Also evaluations that will be repeated, and a line that was cut off."""
    log = open_here(tmp_path)
    for step in (10, 20, 30):
        log.train(train_record(step))
        log.evaluation(val_record(step))
    log.close()
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(before) + b'{"split": "train", "step": 5, "ep')
    open_here(tmp_path, resume_step=20, evaluated_step=10).close()
    assert path.read_bytes() == b"".join(before[:3])  # train 10, val 10, train 20, byte for byte
    assert [file.name for file in tmp_path.glob("metrics*")] == ["metrics.jsonl"]


def test_a_resumed_run_leaves_the_records_of_an_uninterrupted_one(tmp_path):
    def run(log, first, last):
        for step in range(first, last + 1):
            log.advance(step)
            log.train(train_record(step, loss=1 / step))
            if step % 5 == 0:
                log.evaluation(val_record(step, loss=1 / step, classes=torch.eye(2)))
        log.close()

    run(open_here(tmp_path / "whole"), 1, 12)
    run(open_here(tmp_path / "killed"), 1, 9)
    run(open_here(tmp_path / "killed", resume_step=7, evaluated_step=5), 8, 12)
    whole, killed = ([{**line, "time": 0} for line in lines_of(tmp_path / name)] for name in ("whole", "killed"))
    assert killed == whole
    points = [(event.step, event.value) for event in events_of(tmp_path / "killed").Scalars("train/loss")]
    assert points == [(event.step, event.value) for event in events_of(tmp_path / "whole").Scalars("train/loss")]


def test_flush_writes_the_records_to_the_disk(tmp_path, monkeypatch):
    log, synced = open_here(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    log.flush()
    log.close()
    assert sorted(synced) == [str(tmp_path / "metrics.jsonl")]


def test_every_chart_has_the_optimizer_step_on_its_x_axis(tmp_path):
    log = open_here(tmp_path)
    log.train(train_record(10, memory=512.0))
    log.train(train_record(20, memory=512.0))
    log.evaluation(val_record(20, classes=torch.eye(2)))
    log.close()
    events = events_of(tmp_path)
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    train = ("train/loss", "train/grad_norm", "train/lr", "wall/samples_per_s", "wall/data_wait", "wall/memory",
             "wall/epoch", "wall/samples")
    val = ("val/loss", "val/top1", "val/macro_f1")
    assert steps == {**{tag: [10, 20] for tag in train}, **{tag: [20] for tag in val}}


def test_after_a_resume_tensorboard_shows_only_the_new_points(tmp_path):
    log = open_here(tmp_path)
    for step in (10, 20, 30):
        log.train(train_record(step, loss=1.0))
    log.close()
    log = open_here(tmp_path, resume_step=15)
    log.train(train_record(20, loss=2.0))
    log.close()
    assert [(event.step, event.value) for event in events_of(tmp_path).Scalars("train/loss")] == [(10, 1.0), (20, 2.0)]


@pytest.mark.parametrize("resume_step, evaluated_step", [(0, 0), (7, 5), (10, 5), (10, 10)])
@pytest.mark.parametrize("behind_s", [0, 3600])
def test_after_a_kill_tensorboard_shows_every_point_once(tmp_path, monkeypatch, resume_step, evaluated_step, behind_s):
    """Also the evaluation that the resumed run repeats, and where the second host's clock is behind."""
    clock = time.time

    def run(log, first, last):
        if first == 1:
            log.show("train/first_batch", lambda: np.zeros((2, 2, 3), np.uint8))
        for step in range(first, last + 1):
            log.train(train_record(step, loss=1 / step))
            if step % 4 == 0:
                log.epoch({**dict.fromkeys(SHARES, 0.1), "step": step, "epoch": 1, "samples": 8, "trained": step})
            if step % 5 == 0:
                log.evaluation(val_record(step, loss=1 / step, classes=torch.eye(2)))
        log.flush()
        log.close()

    run(open_here(tmp_path / "whole"), 1, 15)
    run(open_here(tmp_path / "killed"), 1, 12)
    for start in (1, 2):  # the first of them is killed at once, too
        monkeypatch.setattr(time, "time", lambda behind_s=start * behind_s: clock() - behind_s)
        log = open_here(tmp_path / "killed", resume_step=resume_step, evaluated_step=evaluated_step)
        if start == 1:
            log.close()
    if resume_step > evaluated_step and resume_step % 5 == 0:
        log.evaluation(val_record(resume_step, loss=1 / resume_step, classes=torch.eye(2)))
    run(log, resume_step + 1, 15)
    whole, killed = events_of(tmp_path / "whole"), events_of(tmp_path / "killed")
    assert killed.Tags() == whole.Tags()
    for tag in whole.Tags()["scalars"]:
        assert [(e.step, e.value) for e in killed.Scalars(tag)] == [(e.step, e.value) for e in whole.Scalars(tag)], tag
    for tag in whole.Tags()["images"]:
        assert [e.step for e in killed.Images(tag)] == [e.step for e in whole.Images(tag)], tag


def test_without_a_terminal_the_console_gets_plain_lines(tmp_path, monkeypatch):
    stream = io.StringIO()
    log = open_here(tmp_path, stream=stream)
    monkeypatch.setattr("engine.records.log.time", SimpleNamespace(monotonic=iter(range(100, 1000, 9)).__next__))
    for step in (1, 10):
        log.advance(step)
        log.train(train_record(step))
    log.evaluation(val_record(10))
    log.note("bye")
    log.close()
    first, second, *rest = stream.getvalue().splitlines()
    assert first == "epoch 0.10 step 1/40 loss 0.3000 lr 0.05 grad 1.23 1234 img/s wait 3 %"  # no speed yet
    assert second == "epoch 1.00 step 10/40 loss 0.3000 lr 0.05 grad 1.23 1234 img/s wait 3 % eta 0:01:00"
    assert rest == ["epoch 1.00 step 10/40 validation loss 0.5000 top1 97.83 % macro_f1 0.9700", "bye"]


def on_terminal(run_dir, columns, use):
    """What `use(log)` writes to a terminal that has this number of columns."""
    keyboard, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    with os.fdopen(screen, "w") as stream:
        log = open_here(run_dir, resume_step=20, evaluated_step=20, stream=stream)
        use(log)
        log.close()
        log.note("bye")
    text = b""
    with open(keyboard, "rb", buffering=0) as shown, contextlib.suppress(OSError):  # EIO is a terminal's end of file
        while part := shown.read(1 << 16):
            text += part
    return text.decode().replace("\r\n", "\n")


def test_a_terminal_shows_a_progress_bar(tmp_path):
    """It starts where the run resumes; notes stand above it."""
    def use(log):
        log.advance(21)
        log.note("a note")
        log.train(train_record(40))
        log.advance(40)

    text = on_terminal(tmp_path, 100, use)
    assert "20/40" in text and "\ra note\n" in text
    assert text.endswith("loss 0.3000 1234 img/s wait 3 %]\nbye\n") and "epoch 4.00: 100%" in text and "40/40" in text


def test_a_terminal_without_a_window_gets_plain_lines(tmp_path):
    def use(log):
        log.advance(40)
        log.train(train_record(40))

    text = on_terminal(tmp_path, 0, use)
    assert text == "epoch 4.00 step 40/40 loss 0.3000 lr 0.05 grad 1.23 1234 img/s wait 3 %\nbye\n"


@pytest.mark.parametrize("name", ["top1", "loss"])
def test_a_figure_that_an_earlier_version_recorded_as_null_has_words(name):
    assert figure(task_of(CLASSES), name, None) == "not finite"


def test_a_large_figure_is_short_on_the_console(tmp_path):
    stream = io.StringIO()
    log = open_here(tmp_path, stream=stream)
    log.train(train_record(1, loss=1e300))
    log.evaluation(val_record(2, loss=1e33, perplexity=math.exp(700)))
    log.close()
    assert "loss 1e+300 " in stream.getvalue() and "loss 1e+33 " in stream.getvalue()
    assert "perplexity 1.01423e+304" in stream.getvalue()


def test_a_note_survives_a_closed_pipe(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    log = open_here(tmp_path, stream=stream)
    for step in (1, 2):
        log.note("hello")
        log.train(train_record(step))
        log.advance(step)
    log.evaluation(val_record(2))
    log.close()
    log.note("bye")
    with contextlib.suppress(OSError):
        stream.close()


def test_a_note_survives_a_closed_terminal(tmp_path):
    keyboard, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    stream = os.fdopen(screen, "w")
    log = open_here(tmp_path, stream=stream)
    log.advance(1)
    os.close(keyboard)
    for step in (2, 3):
        log.note("hello")
        log.train(train_record(step))
        log.advance(step)
    log.close()
    log.note("bye")
    with contextlib.suppress(OSError):
        stream.close()


def test_the_silent_log_has_the_methods_of_the_log_and_no_other():
    for name in (name for name, item in vars(Log).items() if inspect.isfunction(item) and name[0] != "_"):
        assert getattr(SilentLog(), name)(1, named=2) is None
    assert not hasattr(SilentLog(), "nothing")


def test_the_log_of_another_rank_prints_nothing(capsys):
    log = SilentLog()
    log.train(train_record(1))
    log.evaluation(val_record(1, classes=torch.eye(2)))
    log.note("hello")
    log.close()
    assert tuple(capsys.readouterr()) == ("", "")
