"""Where a gradient that is not finite comes from: the step computed once more, micro-batch by micro-batch, sample by sample."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from utils.parallel.base import Buffers


def nonfinite_samples(
    module: nn.Module, micro_batches: Iterable[Any], loss_of: Callable[[Any], Tensor], alone: Callable[[int], Any], largest: float
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
