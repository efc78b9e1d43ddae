"""`make bench`: time of an optimizer step under `ddp` and `exact`, two processes, in one run.

Rows: ResNet-18 at 224 px, and a BERT of MiniLM's size with sentences of 24 tokens. The floor, `alone`, is a step that
sums nothing over ranks. `int64` is `ddp` that sums integers of 64 bits, as `exact` does, but neither rounds nor checks:
what these bytes cost in DDP's buckets. `unchecked` is `exact` without checksums. Steps alternate (A B C C B A ...).
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.in_turn import in_turn, report
from models.vision.classifier import build_classifier
from utils.cpu.allocator import keep_freed_memory
from utils.distributed.world import World
from utils.hardware.cores import available_cores
from utils.numerics.optimizers import build_optimizer
from utils.numerics.precision import Precision, hardware_precision
from utils.settings.run_options import OptimOptions
from utils.strategies.ddp import DDP
from utils.strategies.exact import Exact
from utils.strategies.replicated import Replicated

ROUNDS, MICRO_BATCH, SIDE, TOKENS = 12, 32, 224, 24


class Alone(Replicated):
    """The floor: every rank keeps its own gradients."""

    def setup(self, num_micro_batches: int) -> None:
        """Nothing to prepare."""

    grad_sync = DDP.grad_sync


class Integers(DDP):
    """DDP that sends 8 bytes a value: gradients cut off to integers, which are mostly 0, as only the time counts."""

    @staticmethod
    def sum_bucket(strategy: DDP, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """In place of DDP's. Collective."""
        strategy.communication.start()
        gradients = bucket.buffer()
        future = dist.all_reduce(gradients.long(), async_op=True).get_future()
        return future.then(lambda done: gradients.copy_(done.value()[0]))


class Unchecked(Exact):
    """`exact` whose checksums are those of no values."""

    def setup(self, num_micro_batches: int) -> None:
        """As that of Exact. Collective."""
        super().setup(num_micro_batches)
        for bucket in self._buckets:
            nothing = bucket._checksum.new_zeros(())
            bucket._weighed = lambda nothing=nothing: nothing
            for group in bucket.groups:
                group._chunks = [(sums, rows[:0], columns) for sums, rows, columns in group._chunks]


KINDS = {"alone": Alone, "ddp": DDP, "int64": Integers, "unchecked": Unchecked, "exact": Exact}


def build_resnet() -> nn.Module:
    """ResNet-18 of 1,000 classes."""
    return build_classifier("resnet18", 1000)


def build_bert() -> nn.Module:
    """MiniLM's architecture with a head of two classes; its weights do not matter to the time."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536))


def images(device: torch.device) -> dict[str, Tensor]:
    """What a ResNet takes, the same in every micro-batch."""
    return {"x": torch.randn(MICRO_BATCH, 3, SIDE, SIDE, device=device).to(memory_format=torch.channels_last)}


def sentences(device: torch.device) -> dict[str, Tensor]:
    """What a BERT takes, the same in every micro-batch."""
    return {"input_ids": torch.randint(1000, 30000, [MICRO_BATCH, TOKENS], device=device)}


ROWS = {f"resnet18 at {SIDE} px": (build_resnet, images), f"MiniLM's size, {TOKENS} tokens": (build_bert, sentences)}


@dataclass(frozen=True)
class Indexed:
    """A MicroBatch without samples: all that a strategy must know."""

    index: int

    def to(self, device: torch.device) -> "Indexed":
        """Itself: it has nothing to copy."""
        return self


def time_step(strategy: Replicated, optimizer: torch.optim.Optimizer, precision: Precision,
              inputs: dict[str, Tensor], micro_batches: int) -> float:
    """Seconds of one optimizer step with `micro_batches` per rank, until all ranks are done. Collective.

    inputs: of the model, the same in every micro-batch.
    """
    world = strategy.world
    dist.barrier()
    began = time.perf_counter()
    share = [Indexed(world.rank + i * world.world_size) for i in range(micro_batches)]
    for model, _ in strategy.accumulate(share, precision.scale):
        with precision.autocast():
            output = model(**inputs)
        logits = getattr(output, "logits", output).float()
        F.cross_entropy(logits, torch.zeros(MICRO_BATCH, dtype=torch.int64, device=logits.device)).backward()
    is_finite = precision.step(optimizer, strategy.clip_grad_norm_(0))
    strategy.commit_buffers(is_finite)
    optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    return time.perf_counter() - began


def main() -> None:
    """Report on rank 0. Run under torchrun. Arguments: a device as in --device, micro-batches per rank."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as train.py does
    micro_batches = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with World.from_env(sys.argv[1] if len(sys.argv) > 1 else "cpu") as world:
        precision = Precision(hardware_precision(world.device), world.device)
        for row, (build, make_inputs) in ROWS.items():
            inputs = make_inputs(world.device)
            contenders: dict[str, Callable[[], float]] = {}
            for name, kind in KINDS.items():
                model = build().to(world.device, memory_format=torch.channels_last)
                strategy = kind(model, world)
                strategy.setup(micro_batches * world.world_size)
                optimizer = build_optimizer(model, OptimOptions(lr=0.01))
                contenders[name] = partial(time_step, strategy, optimizer, precision, inputs, micro_batches)
                contenders[name]()  # after the first step DDP lays its buckets out anew
            times = in_turn(contenders, ROUNDS)
            if world.is_main:
                torch.set_num_threads(available_cores())  # for the speed of products, which is reported
                report(f"exact, {row}, {precision.name}, {world.world_size} x {world.device.type},"
                       f" {micro_batches} x {MICRO_BATCH} samples each", "s a step", times, "ddp", "unchecked")
                torch.set_num_threads(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
