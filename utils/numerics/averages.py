"""A moving average of the weights, evaluated beside them: it often does better than the weights of the last step.

Source: Polyak and Juditsky, 1992. The formula is torch.optim.swa_utils.get_ema_multi_avg_fn's (a test compares them),
but that one takes its share as a number: the host would have to wait for the device to know whether a step counts. The
decay grows at first, so that a short run forgets its initial weights: tf.train.ExponentialMovingAverage's num_updates.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Averages:
    """value = d * value + (1 - d) * weight after step s = 0, 1, ..., with d = min(decay, (1 + s) / (10 + s))."""

    def __init__(self, weights: dict[str, Tensor], decay: float):
        """weights: a model's own tensors by name; parameters and BatchNorm's statistics are averaged, no counters.

        None are kept if decay is 0.
        """
        self._decay = decay
        self._weights = {name: tensor for name, tensor in weights.items() if decay and tensor.is_floating_point()}
        self.values = {name: tensor.clone() for name, tensor in self._weights.items()}
        self._by_device: dict[torch.device, list[str]] = {}
        for name, value in self.values.items():
            self._by_device.setdefault(value.device, []).append(name)

    @torch.no_grad()
    def update(self, step: int, is_finite: Tensor) -> None:
        """After optimizer step `step`; one that changed nothing moves no average. is_finite: scalar bool on the device.

        No wait for the device, and as few kernels as the optimizer has.
        """
        if not self.values:
            return
        share = is_finite * (1 - min(self._decay, (1 + step) / (10 + step)))  # scalar float32
        for names in self._by_device.values():
            values = [self.values[name] for name in names]
            moves = torch._foreach_sub([self._weights[name] for name in names], values)
            torch._foreach_mul_(moves, share.to(values[0].device))
            torch._foreach_add_(values, moves)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def load(self, values: dict[str, Tensor]) -> None:
        """Continue from `values` of a checkpoint; without them, from the weights that the model has now."""
        for name, value in self.values.items():
            value.copy_(values.get(name, self._weights[name]))

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._weights.items():
            kept = weight.clone()  # one tensor at a time: memory for a second copy may lack
            weight.copy_(self.values[name])
            self.values[name].copy_(kept)
