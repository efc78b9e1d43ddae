"""The samples behind a gradient that is not finite, found by computing a rank's share of the step once more.

One NaN in one sample would spoil every weight on every rank, if Precision.step applied the update.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from data.batch import Batch
from engine.step import forward
from engine.training import Training
from utils.rundir.state import Progress
from utils.strategies.base import Strategy
from utils.strategies.buffers import Buffers


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
