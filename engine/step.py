"""What an optimizer step computes: for the loop, and for all that computes one of its micro-batches beside it."""

from torch import Tensor, nn

from data.batch import Batch
from engine.start import Start
from utils.hardware.devices import Arriving
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


class Outcome:
    """Where the last step was, whether its gradient was finite, and whether its sum changed on the way to this rank.

    Read one step later, so that the host never waits.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.position: Progress | None = None  # before the last step
        self._strategy, self._arriving = strategy, None  # what is not read yet
        self._nonfinite: Progress | None = None  # the last step, if its gradient was not finite
        self._corrupted: Progress | None = None  # the first step whose sum changed

    def note(self, position: Progress, is_usual: Tensor) -> None:
        """The step at `position` is queued. is_usual: scalar bool on the device, as Precision.is_usual gives it."""
        is_corrupted = self._strategy.is_corrupted
        self.position = position
        self._arriving = Arriving(is_usual, *([] if is_corrupted is None else [is_corrupted]))

    def pop_nonfinite(self) -> Progress | None:
        """Return the position of the last step if its gradient was not finite, once; call it before any save.

        None once a sum has changed: then ranks may differ in what they find, and the run is about to end.
        """
        self._read()
        nonfinite, self._nonfinite = self._nonfinite, None
        return None if self._corrupted else nonfinite

    def corrupted(self) -> Progress | None:
        """The position of the first step whose sum changed on the way to this rank."""
        self._read()
        return self._corrupted

    def _read(self) -> None:
        if self._arriving is not None:
            (is_usual, *is_corrupted), self._arriving = self._arriving.wait(), None
            self._nonfinite = None if is_usual else self.position
            if any(is_corrupted) and self._corrupted is None:
                self._corrupted = self.position
