"""What an optimizer step computes: for the loop, and for all that computes one of its micro-batches beside it."""

from torch import Tensor, nn

from data.batch import Batch
from engine.start import Start
from utils.hardware.devices import Arriving
from utils.numerics.seed import seed_micro_batch
from utils.rundir.state import Progress


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
    """Where the last step was, and whether its gradient was finite: read one step later, so the host never waits."""

    def __init__(self) -> None:
        self.position: Progress | None = None  # before the last step
        self._is_usual: Arriving | None = None  # not read yet

    def note(self, position: Progress, is_usual: Tensor) -> None:
        """The step at `position` is queued. is_usual: scalar bool on the device, as Precision.is_usual gives it."""
        self.position, self._is_usual = position, Arriving(is_usual)

    def pop_nonfinite(self) -> Progress | None:
        """Return the position of the last step if its gradient was not finite, once; call it before any save."""
        is_usual, self._is_usual = self._is_usual, None
        return None if is_usual is None or bool(is_usual.wait()[0]) else self.position
