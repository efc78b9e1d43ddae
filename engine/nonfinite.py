"""Gradients that are not finite: the step changes nothing, the samples behind it are named, the run ends or continues.

One NaN in one sample would spoil every weight on every rank. Precision.step applies no update where the gradient is not
finite; this module finds out why, and owns --max-nonfinite.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from data.batch import Batch
from engine.corruption import end_if_corrupted
from engine.saving import save, wait_for_save
from engine.step import forward
from engine.training import Training
from utils.errors import Exit, UserError, some
from utils.rundir.state import Progress
from utils.strategies.base import Strategy
from utils.strategies.buffers import Buffers


def end_if_diverged(t: Training) -> None:
    """End the run with 80 if the last step's gradient was not finite; that step has changed nothing.

    The host asks one step late, so that the device never waits for it. Where an unreadable sample made the step void,
    the run ends with 65, saved as it was before the step. Collective if the gradient was not finite.
    """
    # a sum that changed on the way
    if t.flags.corrupted or t.flags.bad_sample:
        end_if_corrupted(t)  # Collective.

    # an unreadable sample
    if t.flags.bad_sample:
        t.state.progress = t.outcome.position
        t.precision.undo()
        save(t)  # Collective.
        wait_for_save(t)  # Collective.
        t.bad_samples.stop(t.world)  # Collective.

    # a gradient that is not finite
    if (at := t.outcome.pop_nonfinite()) is None:
        return
    t.watchdog.enter("looking for what is not finite", t.config.faults.section_timeout)
    named = t.world.gather(nonfinite_names(t, at))  # Collective.
    causes = "; ".join(f"rank {rank}, {some(names)}" for rank, names in enumerate(named) if names)
    found = (f"the gradient of optimizer step {at.step + 1} {t.strategy.not_finite}; it comes from"
             f" {causes or 'the sum: the gradient of every micro-batch is finite'}")
    t.state.progress = progress = replace(t.state.progress, skipped=t.state.progress.skipped + 1)
    most = t.config.faults.max_nonfinite
    if progress.skipped > most:
        raise UserError(f"{found}; the training diverged; this step changed neither weights nor checkpoints; use a"
                        " smaller --lr, --max-grad-norm 1 or --precision fp32, or skip a few such steps with"
                        " --max-nonfinite", Exit.DIVERGED)
    t.log.note(f"{found}; the step changed nothing (--max-nonfinite: {progress.skipped} of {most})")


def nonfinite_names(t: Training, at: Progress) -> list[str]:
    """This rank's samples that make the gradient of the step at `at` non-finite, found by computing the share again.

    Collective if forwards are.
    """
    sampler, samples = t.feed.sampler, t.feed.samples
    normalizer = t.task.normalizer(sampler.indices(at.epoch, at.sample_offset))
    share = [sampler.micro_batch(at.epoch, at.sample_offset, index) for index in sampler.share]

    def loss_of(batch: Batch) -> Tensor:
        return forward(t, t.strategy.module, batch.to(t.world.device), at.step) / normalizer

    found = nonfinite_samples(t.strategy, map(samples.__getitem__, share), len(share), loss_of,
                              lambda index: samples.collated(at.epoch, [index]))  # Collective if forwards are.
    is_all = len(found) == sum(len(wanted.indices) for wanted in share if not wanted.is_stand_in) > 0
    return ["all its samples"] if is_all else [f"sample {index} ({samples.name(index)})" for index in found]


def nonfinite_samples(strategy: Strategy, micro_batches: Iterable[Batch], count: int,
                      loss_of: Callable[[Batch], Tensor], alone: Callable[[int], Batch]) -> list[int]:
    """Indices of the samples in `micro_batches`, of which there are `count`, that make the gradient non-finite.

    loss_of: the loss of a batch as training computes it. alone: a batch of the one sample with that index. Where no
    sample's loss is non-finite by itself, all samples of the micro-batch are named. Leaves gradients, buffers and the
    mode of the module as they are. Collective if forwards are.
    """
    module = strategy.module
    buffers, found, modes = Buffers(module), [], {part: part.training for part in module.modules()}
    batch: Batch | None = None
    buffers.begin()
    for new in strategy.evenly(micro_batches, count):
        # the micro-batch as a whole; the last one again while another rank has more
        batch = new or batch.stand_in()
        is_finite = strategy.is_finite(partial(loss_of, batch))
        buffers.restore()

        # its samples, one by one
        suspects = () if is_finite else batch.indices
        by_themselves = []
        module.eval()  # BatchNorm would refuse one sample
        with torch.no_grad():
            for index in strategy.evenly(suspects, len(suspects)):
                loss = loss_of(batch if index is None else alone(index))
                if index is not None and not torch.isfinite(loss):
                    by_themselves.append(index)
        for part, is_training in modes.items():
            part.training = is_training
        found += by_themselves or suspects
    return found
