"""What an optimizer step computes: for the loop, and for all that computes one of its micro-batches beside it."""

import socket
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data.batch import Batch
from engine.start import Start
from utils.hardware.devices import Arriving
from utils.numerics.precision import Precision
from utils.numerics.seed import seed_micro_batch
from utils.rundir.state import Progress
from utils.strategies.base import Strategy


def forward(start: Start, model: nn.Module, micro_batch: Batch, step: int) -> Tensor:
    """The loss of a micro-batch as optimizer step `step` computes it, summed over its samples: scalar float32.

    micro_batch: on the device of `model`. The loss is on the first device of the process. All ranks or none where the
    strategy is_sharded.
    """
    seed_micro_batch(start.config.run.seed, step, micro_batch.index, micro_batch.device)  # never from the rank
    with start.precision.autocast():
        output = start.task.forward(model, micro_batch)
    return output.loss_sum.to(start.world.device)


class Facts(NamedTuple):
    """What a rank saw of a step, as JSON."""

    place: str
    is_finite: bool  # the gradient, after the sum
    is_usual: bool  # see Precision.is_usual
    is_own_finite: bool  # its own losses, and its gradient before the sum where the strategy looks at it
    is_corrupted: bool  # the sum changed on its way to this rank
    loss_scale: str


class Outcome:
    """What this rank saw of the last steps: read one step later, so that the host never waits for more."""

    def __init__(self, strategy: Strategy, precision: Precision) -> None:
        self.position: Progress | None = None  # before the last step
        self.seen: list[tuple[Progress, Facts]] = []  # of the last two steps that were read, unless they are judged
        self._strategy, self._precision = strategy, precision
        self._place = f"rank {strategy.world.rank} on {socket.gethostname()}"
        self._arriving: Arriving | None = None  # what is not read yet

    def note(self, position: Progress, losses: Tensor, is_finite: Tensor) -> None:
        """The step at `position` is queued. losses: this rank's. is_finite: scalar bool, as Precision.step returns it.
        """
        strategy, precision, self.position = self._strategy, self._precision, position
        is_own_finite = losses.isfinite().all() & strategy.is_own_finite
        facts = torch.stack([is_finite, precision.is_usual(is_finite), is_own_finite, strategy.is_corrupted])
        self._arriving = Arriving(facts, precision.scale)

    def is_wrong(self) -> bool:
        """Whether this rank saw something that all ranks must judge (wrong.py). The host waits for the last step."""
        if self._arriving is not None:
            (facts, scale), self._arriving = self._arriving.wait(), None
            self.seen = [*self.seen[-1:], (self.position, Facts(self._place, *facts.tolist(), f"{float(scale):g}"))]
        return any(facts.is_corrupted or not facts.is_finite for _, facts in self.seen)
