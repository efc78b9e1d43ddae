"""train.py with one rank on which one thing is wrong, in one step: FAULT='{"rank": 1, "step": 4, ...}' torchrun ...

what: "loss" of its first micro-batch; "gradient" of that, before the sum; "sum", as it arrives (under fsdp its part of
it); "norm" of the sum; "scale" of the loss (fp16); "flags" that arrive. factor: what it is multiplied by ("nan", "inf",
2, ...); flags: the number of the one that changes.
"""

import json
import os
import sys
from functools import partial

import torch
from torch.distributed.tensor import DTensor

import extras
import train
from data import demo
from utils.distributed.agreement import Agreement
from utils.distributed.watchdog import Watchdog
from utils.errors import exit_after
from utils.settings.command_line import parse_command_line
from utils.strategies.replicated import Replicated

FAULT, RANK = json.loads(os.environ["FAULT"]), int(os.environ["RANK"])
WHAT, FACTOR = FAULT["what"], float(FAULT["factor"])
now = {"step": 0}


class Steeper(torch.autograd.Function):
    """The same loss; its gradient is multiplied."""

    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * FACTOR


def is_due(what):
    """Whether this is wrong now; once."""
    is_so = (what, RANK, now["step"]) == (WHAT, FAULT["rank"], FAULT["step"]) and "done" not in now
    if is_so:
        now["done"] = True
    return is_so


def train_step(compute, t, batch):
    now["step"] = t.state.progress.step + 1
    if is_due("scale"):
        t.precision.scaler._scale.mul_(FACTOR)
    return compute(t, batch)


def forward(compute, start, model, micro_batch, step):
    loss = compute(start, model, micro_batch, step)
    return loss * FACTOR if is_due("loss") else Steeper.apply(loss) if is_due("gradient") else loss


def clip_grad_norm_(compute, strategy, max_norm):
    if is_due("sum"):
        for param in strategy.trainable:
            (param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad).mul_(FACTOR)
    norm = compute(strategy, max_norm)
    return norm * FACTOR if is_due("norm") else norm


def wait(read, flags):
    if flags._pending is not None and is_due("flags"):
        flags._pending.wait()
        flags._counts[int(FACTOR)] ^= 1
    read(flags)


if __name__ == "__main__":
    watchdog = Watchdog()
    for name in ("train_step", "forward"):
        setattr(train, name, partial(globals()[name], getattr(train, name)))
    clip, read = Replicated.clip_grad_norm_, Agreement.wait
    Replicated.clip_grad_norm_ = lambda strategy, max_norm: clip_grad_norm_(clip, strategy, max_norm)
    Agreement.wait = lambda flags: wait(read, flags)
    exit_after(partial(train.main, parse_command_line(sys.argv[1:], demo.SETTINGS, extras.pages()), watchdog))
