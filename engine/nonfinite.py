"""Gradients that are not finite: the step changed nothing; the samples behind it are named; the run ends or goes on.

The owner of --max-nonfinite. The step itself: Precision.step, which applies no update where the gradient is not finite.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from data.batch import Batch
from engine.saving import save, wait_for_save
from utils.errors import Exit, UserError, some
from utils.numerics.seed import seed_micro_batch
from utils.rundir.checkpoint import Progress
from utils.strategies.buffers import Buffers

if TYPE_CHECKING:
    from engine.training import Training


def raise_if_diverged(t: "Training") -> None:
    """See that the last step's gradient was finite; if not, the step has changed nothing, and the run ends with 80.

    The host asks one step late, so that no device waits for it. Where an unreadable sample made the step void, the run ends as
    it was before it, saved (65). Collective where the gradient was not finite.
    """
    if t.flags.bad_sample:
        t.state.progress = t.precision.undo()
        save(t)  # Collective.
        wait_for_save(t)  # Collective.
        t.bad_samples.stop(t.world)  # Collective.
    if (at := t.precision.pop_nonfinite()) is None:
        return
    t.watchdog.enter("looking for what is not finite", t.config.faults.section_timeout)
    named = {rank: names for rank, names in enumerate(t.world.gather(nonfinite_names(t, at))) if names}  # Collective.
    t.state.progress = progress = replace(t.state.progress, skipped=t.state.progress.skipped + 1)
    found = (f"the gradient of optimizer step {at.step + 1} {t.strategy.not_finite}; it comes from "
             + ("; ".join(f"rank {rank}, {some(names)}" for rank, names in named.items()) or "the sum, and from no one sample"))
    if progress.skipped > t.config.faults.max_nonfinite:
        raise UserError(f"{found}; the training diverged: weights and checkpoints are as they were before it; use a smaller --lr,"
                        " --max-grad-norm 1, or --precision fp32, or go over a few such steps with --max-nonfinite", Exit.DIVERGED)
    t.log.note(f"{found}; the step changed nothing (--max-nonfinite: {progress.skipped} of {t.config.faults.max_nonfinite})")


def nonfinite_names(t: "Training", at: Progress) -> list[str]:
    """The samples, among this rank's share of the step at `at`, that make its gradient non-finite. Computes the share anew."""
    sampler, samples = t.feed.sampler, t.feed.samples
    normalizer = t.task.normalizer(sampler.indices(at.epoch, at.sample_offset))
    share = [sampler.micro_batch(at.epoch, at.sample_offset, number) for number in sampler.share]

    def loss_of(batch: Batch) -> torch.Tensor:
        seed_micro_batch(t.config.run.seed, at.step, batch.index, t.world.device)
        with t.precision.autocast():
            return t.task.forward(t.strategy.module, batch.to(t.world.device)).loss_sum / normalizer

    found = nonfinite_samples(t.strategy.module, map(samples.__getitem__, share), loss_of,
                              lambda index: samples.collated(at.epoch, [index]), t.strategy.largest)
    is_all = len(found) == sum(len(wanted.indices) for wanted in share if not wanted.is_stand_in) > 0
    return ["all its samples"] if is_all else [f"sample {index} ({samples.name(index)})" for index in found]


def nonfinite_samples(
    module: nn.Module, micro_batches: Iterable[Batch], loss_of: Callable[[Batch], Tensor], alone: Callable[[int], Batch], largest: float
) -> list[int]:
    """Indices of the samples among this rank's micro-batches of a step that make its gradient non-finite.

    loss_of: the loss of a batch as training computes it. alone: a batch of the sample with that index. largest: gradients beyond
    it count as non-finite. Gradients, buffers and the mode of `module` are left as they are. Where no sample's loss is
    non-finite by itself, all of the micro-batch are named.
    """
    buffers, found, modes = Buffers(module), [], {part: part.training for part in module.modules()}
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    buffers.begin()
    for batch in micro_batches:
        loss = loss_of(batch)
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)  # leaves .grad alone, and no hook sees it
        buffers.restore()
        if torch.isfinite(loss) and all(bool((values.abs() <= largest).all()) for values in gradients if values is not None):
            continue
        module.eval()  # BatchNorm would refuse one sample
        with torch.no_grad():
            by_themselves = [index for index in batch.indices if not torch.isfinite(loss_of(alone(index)))]
        for part, is_training in modes.items():
            part.training = is_training
        found += by_themselves or batch.indices
    return found
