"""All that one optimizer step computes, as hashes in the order of a step: to find the first thing that differs.

    trace = Trace()
    trace_step(t, batch, trace)                              # train.py's own step, seen by hooks
    key = first_difference(trace.found, another.found)

Tests: tests/unit/ask/test_compare.py
"""

import os
from collections import Counter
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ask.repeat import Instead
from ask.rounding import EPSILON, GROWN
from data.batch import Batch, GlobalBatch
from engine.training import Training
from models.output import Output
from train import train_step
from utils.errors import some
from utils.rundir.chain import leaves, tensor_hash

# stages of a step, in the order in which a difference is looked for
WORDS = ("{name} before step {step}", "{name} of micro-batch {index} of step {step}",
         "the input {name} of micro-batch {index} of step {step}",
         "the output of {name} in micro-batch {index} of step {step}", "the loss of micro-batch {index} of step {step}",
         "the gradient of {name} in micro-batch {index} of step {step}",
         "the gradient of {name}, summed over the micro-batches of step {step}",
         "the norm of the gradient of step {step}", "the learning rate of step {step}", "{name} after step {step}")
BEFORE, SAMPLES, INPUT, OUTPUT, LOSS, GRADIENT, SUM, NORM, RATE, AFTER = range(len(WORDS))
HINTS = {BEFORE: "; a checkpoint is not what was saved: python -m ask.verify RUN --chain-only says which",
         AFTER: "; by the same gradient and learning rate: the optimizer or one of its settings differs"}
Key = tuple[int, int, str]  # stage; micro-batch, 0 where all are meant; name
Found = dict[Key, tuple[str, str]]  # a value in words, and its hash; in the order of computing
MOST_BYTES = 2**30  # of tensors that a trace keeps, to say how much they differ


class Trace:
    """What this rank has computed in a step. kept: the first tensors, as many as there is room for."""

    def __init__(self) -> None:
        self.found: Found = {}
        self.kept: dict[Key, Tensor] = {}
        self.micro_batch = 0  # that is being computed
        self._room, self._times = MOST_BYTES, Counter[Key]()

    def note(self, stage: int, name: str, values: Any) -> None:
        """Write down a value, or all tensors in a nest. Of a name that comes again: for which time."""
        for value in tree_leaves(values):
            key = stage, self.micro_batch if SAMPLES <= stage <= GRADIENT else 0, name
            self._times[key] += 1
            if self._times[key] > 1:
                key = *key[:2], f"{name} (number {self._times[key]})"
            if not isinstance(value, Tensor):
                self.found[key] = str(value), ""
                continue
            shown = repr(value.item()) if value.ndim == 0 else f"{value.dtype} {list(value.shape)}"
            self.found[key] = shown.removeprefix("torch."), tensor_hash(value)
            self._room -= value.nbytes
            if self._room > 0:
                self.kept[key] = value.detach().to("cpu", copy=True)


def trace_step(t: Training, batch: GlobalBatch, trace: Trace) -> None:
    """Compute the step and write down what is computed; the last one with this training. Collective."""
    strategy, module, step = t.strategy, t.strategy.module, t.state.progress.step
    params = [(name, param) for name, param in module.named_parameters() if param.requires_grad]

    def forward(model: nn.Module, micro_batch: Batch) -> Output:
        trace.micro_batch = micro_batch.index
        for number, name in enumerate(names_of(t, micro_batch)):
            trace.note(SAMPLES, f"sample {number}", name)
        for name, tensor in {**micro_batch.inputs, "labels": micro_batch.labels}.items():
            trace.note(INPUT, name, tensor)
        output = t.task.forward(model, micro_batch)
        trace.note(LOSS, "", output.loss_sum)
        return output

    def clip_grad_norm_(max_norm: float) -> Tensor:
        for name, param in reversed(params):  # as the backward pass comes to them
            trace.note(SUM, name, () if param.grad is None else strategy.whole(param.grad))  # Collective.
        return strategy.clip_grad_norm_(max_norm)

    # hooks; a compiled model would be another one with them, and no hook sees a sharded parameter's gradient
    if not t.config.device.compile:
        module.register_forward_pre_hook(lambda part, *given: trace.note(INPUT, "that the model gets", given),
                                         with_kwargs=True)
        for name, part in module.named_modules():
            part.register_forward_hook(lambda part, given, output, name=name or "the model":
                                       trace.note(OUTPUT, name, output))
    for name, param in () if strategy.is_sharded else params:
        param.register_hook(partial(trace.note, GRADIENT, name))

    # the step
    note_state(t, trace, BEFORE)  # Collective.
    watched = {"task": Instead(t.task, forward=forward), "strategy": Instead(strategy, clip_grad_norm_=clip_grad_norm_)}
    _, grad_norm = train_step(replace(t, **watched), batch)  # Collective.
    trace.note(NORM, "", grad_norm)
    trace.note(RATE, "", t.schedule(step))
    note_state(t, trace, AFTER)  # Collective.


def note_state(t: Training, trace: Trace, stage: int) -> None:
    """Weights, and all that the optimizer keeps. Collective."""
    weights, state = t.state.weights(), {**t.state.state_dict(), "coverage": {}}  # Collective.
    for name, value in leaves({"the weights": weights, **{f"the {part}'s": kept for part, kept in state.items()}}):
        trace.note(stage, name.replace("/", " ", 1), value)


def names_of(t: Training, batch: Batch) -> list[str]:
    """The names of its samples, without the place of the data, if they have one (the built-in ones do not)."""
    data = t.config.data.data
    root = data if os.path.isdir(data) else os.path.dirname(data)
    return [t.task.train_set.name(index).removeprefix(os.path.join(root, "")) for index in batch.indices]


def first_difference(one: Found, two: Found) -> Key | None:
    """The first key, by stage, micro-batch and time, under which two traces are not the same."""
    return next((key for key in sorted({**one, **two}, key=itemgetter(0, 1)) if one.get(key) != two.get(key)), None)


def sentence(key: Key, step: int, one: Found, two: Found) -> str:
    """What differs, with both values, and what that means."""
    stage, index, name = key
    values = [found[key][0] if key in found else "nothing" for found in (one, two)]
    shown = values[0] if values[0] == values[1] else f"{values[0]} in RUN1, {values[1]} in RUN2"
    hint = HINTS.get(stage, "") if stage == AFTER or step > 1 else ""
    return f"{WORDS[stage].format(name=name, index=index, step=step)}: {shown}{hint}"


def far_apart(key: Key, found: Found, kept: tuple[dict[Key, Tensor], dict[Key, Tensor]], precision: str) -> str:
    """How much the tensors of a key differ, and in which samples, in words; "" if they are not both kept.

    found, kept: of the first run; what this rank keeps of both.
    """
    stage, index, _ = key
    if not (key in kept[0] and key in kept[1] and (words := distance(kept[0][key], kept[1][key], stage, precision))):
        return ""
    if stage == INPUT and (INPUT, index, "owners") not in found:  # where no row has several texts
        differ = (kept[0][key] != kept[1][key]).reshape(len(kept[0][key]), -1).any(1)
        names = [found.get((SAMPLES, index, f"sample {row}"), [""])[0] for row in differ.nonzero().flatten().tolist()]
        words += f", of {some(names)}"
    return f"; {words}"


def distance(one: Tensor, two: Tensor, stage: int, precision: str) -> str:
    """How much two tensors differ, in words; "" if the values say it, or have other shapes."""
    if one.shape != two.shape or one.ndim == 0:
        return ""
    words = f"different: {int((one != two).sum())} of {one.numel()} values"
    if not one.is_floating_point():
        return words
    both = torch.stack([one.double(), two.double()])
    relative = float((both[0] - both[1]).abs().max() / both.abs().max())  # one of them may be all zeros
    is_rounding = stage < RATE and relative <= min(100 * EPSILON[precision], GROWN[precision])  # a step is as small
    return f"{words}, by at most {relative:.1e} of the largest{', which rounding may do' if is_rounding else ''}"
