"""The contract of a strategy: how the ranks that compute one step share it. A strategy knows no task.

Those that exist: __init__.py. What they have in common: replicated.py, buffers.py.

The order of calls: Strategy(module, world), build_optimizer(module, ...), load_model_state and load_optimizer_state if
the run continues, setup, a warm-up step, require_all_grads; then per step: accumulate, clip_grad_norm_, commit_buffers.

Tests: tests/distributed/test_world.py
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from utils.distributed.world import World
from utils.hardware.devices import Stopwatch
from utils.settings.run_options import DeviceOptions


class MicroBatch(Protocol):
    """What a strategy must know about a data.batch.Batch: its index in the global batch. Rank 0 computes index 0."""

    @property
    def index(self) -> int:
        """0 to num_micro_batches - 1."""

    def to(self, device: torch.device) -> Self:
        """The same samples on `device`."""

    def stand_in(self) -> Self:
        """The same samples, of which none counts."""


AnyMicroBatch = TypeVar("AnyMicroBatch", bound=MicroBatch)


class MicroBatches(Protocol[AnyMicroBatch]):
    """This rank's micro-batches of one step: a list, or a data.batch.GlobalBatch, which can be read once."""

    def __iter__(self) -> Iterator[AnyMicroBatch]: ...

    def __len__(self) -> int: ...


class Block(Protocol):
    """What a strategy must know about a block of a model (models/blocks.py)."""

    @property
    def parts(self) -> list[nn.Module]:
        """Modules that follow one another."""

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Their parameters by name; a tied one in its first block only."""


DEFAULTS = DeviceOptions()
BlocksOf = Callable[[nn.Module], Sequence[Block]]  # the blocks of a model, from its input to its head


def no_blocks(module: nn.Module) -> Sequence[Block]:
    """For a strategy that asks for none."""
    return ()


class Strategy(ABC):
    """What the program asks of a strategy. `module` is the plain model; a training step computes with what accumulate
    yields.

    The attributes below are what others must know about a strategy. Nobody asks for its name.
    """

    max_processes = sys.maxsize  # of a run
    min_devices = max_devices = 1  # of a process; require_possible
    is_invariant = False  # sums have the same bits on any number of ranks; asked in engine/ and rundir/run.py
    needs_every_grad = False  # a step hangs or fails if a parameter has no gradient on some rank; engine/warm_up.py
    is_split = False  # no device has all weights: the strategy takes the model in host memory; rundir/checkpoint.py
    is_sharded = False  # a forward of `module` is collective: no rank can try one alone; asked in engine/
    can_audit = False  # another rank can compute a rank's micro-batch again to the same bits; extras/audit
    is_audited = False  # in the next step `entered` becomes the checksum of what this rank's first micro-batch adds
    finds_unused = False  # has --find-unused-parameters
    bytes_per_param = 0  # device memory per parameter, besides it and its gradient; engine/build.py
    not_finite = "is not finite"  # what a message says about such a gradient; engine/wrong.py

    def __init__(self, module: nn.Module, world: World, blocks_of: BlocksOf = no_blocks,
                 config: DeviceOptions = DEFAULTS):
        """module: in host memory if is_split, else on the device. The optimizer is built afterwards.

        blocks_of: for a strategy that puts the blocks of the model into different places.
        """
        self.module, self.world, self.config = module, world, config
        self.model: nn.Module = module  # that computes a training step
        # what a step waits for other ranks, apart from work at the same time; None = cannot be told
        self.communication: Stopwatch | None = Stopwatch(world.device)
        # of the last step, scalar bool on the device: a sum changed on its way; this rank's part of it was finite, as
        # far as the strategy looks at that
        self.is_corrupted = torch.zeros((), dtype=torch.bool, device=world.device)
        self.is_own_finite = ~self.is_corrupted
        self.place(blocks_of)

    def place(self, blocks_of: BlocksOf) -> None:  # noqa: B027
        """Bring `module` to where it computes, if it is not there; before the optimizer is built. All ranks or none."""

    @property
    def lanes(self) -> int:
        """How many micro-batches a process computes at a time."""
        return 1

    @abstractmethod
    def setup(self, num_micro_batches: int) -> None:
        """Prepare `model` for training from the parameters that rank 0's `module` has now. Collective.

        num_micro_batches: per global batch, over all ranks. Called after a checkpoint is loaded, and again if the
        warm-up froze parameters.
        """

    @abstractmethod
    def require_all_grads(self) -> None:
        """From now on every trainable parameter gets a gradient in each step: zeros if no micro-batch used it.

        Called after the warm-up, which froze the parameters that are never used.
        """

    @abstractmethod
    def accumulate(self, micro_batches: MicroBatches[AnyMicroBatch],
                   scale: Tensor) -> Iterator[tuple[nn.Module, AnyMicroBatch]]:
        """Yield what computes each of this rank's micro-batches of one step, and the micro-batch on its device.

        The caller runs forward and backward on each. Collective. micro_batches: len() and one iteration, maybe of none.
        scale: scalar, the power of two that losses are multiplied by. Where a forward is collective, a stand-in follows
        if another rank has one more: the last one again, with its index, and of weight 0. After the loop every
        param.grad is the sum over all micro-batches of all ranks, times scale (this rank's part of it, if the
        parameter is sharded), and has the strides of its parameter: fused optimizers read memory in order.
        """

    @abstractmethod
    def again(self, loss: Tensor, scale: Tensor) -> Tensor:
        """The checksum of what the gradient of a micro-batch would put into the sums: scalar int64. It changes nothing.

        For where can_audit; between the loop over accumulate and commit_buffers. loss: scalar, times scale as yet.
        The same as the `entered` of the rank that has the micro-batch, if both devices work.
        """

    @abstractmethod
    def weights_checksum(self) -> Tensor:
        """The checksum of parameters and of the buffers that all ranks have alike: scalar int64. It waits for nothing.
        """

    @abstractmethod
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the summed gradient to max_norm, in place; 0 clips nothing. All ranks or none.

        Returns its L2 norm before clipping: scalar, the same on every rank, not finite if any gradient is not.
        """

    @abstractmethod
    def commit_buffers(self, is_finite: Tensor) -> None:
        """End the step for buffers: keep what micro-batch 0 left, or the old ones if not is_finite. Collective.

        is_finite: scalar bool on the device, as Precision.step returns it; reading it on the host would wait.
        """

    @abstractmethod
    def broadcast_buffers(self) -> None:
        """Copy rank 0's buffers, which are the run's, to every rank; called before an evaluation. Collective."""

    @abstractmethod
    def model_state(self) -> dict[str, Tensor]:
        """Full parameters and buffers by their plain names, a tied one by its first name only. All ranks or none.

        The checkpoint takes rank 0's.
        """

    @abstractmethod
    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Load what model_state returned. All ranks or none.

        Raises KeyError if a name is missing or unknown, or a shape differs.
        """

    @abstractmethod
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """Full optimizer state by parameter name, as {name: {"exp_avg": tensor, ...}}. All ranks or none.

        Group options (lr, betas, ...) are functions of the settings and the step; they are not state.
        """

    @abstractmethod
    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Any]]) -> None:
        """Load what optimizer_state returned. All ranks or none."""
