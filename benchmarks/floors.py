"""`python -m benchmarks.floors`: how fast a training step could be on this machine, beside how fast train.py is.

Each operation of a plain step is looked at. Products (convolutions, matrices, attention) are computed again, alone, and
timed. The others must at least read what they are given and write what they make: bytes, at the rate of a copy.

    products        the products alone, as if all else were free: nothing that calls these kernels is faster
    operations      and the bytes of the others: an estimate of what operations that are not fused can reach, from main
                    memory; what stays in the caches is counted, too, and what works in place is faster than a copy
    step            a bare loop of one batch that is in memory, with train.py's allocator and kernels, and torch's AdamW
    clipped         the same with the gradients clipped, as train.py and the Trainer do by default; texts alone

Rows: resnet18, resnet50 at 224 px; mlm, masked tokens with MiniLM at length 128; sst2, sentences of about 24 tokens.
Batches are those of training.py. A peer of training.py takes turns with them: torchvision's reference, or the Trainer.

sst2 is also measured on two processes with half of the threads each. They are expected to share forward and backward
without a loss, and to do the rest of a step, which is timed alone, both for all parameters: the sum of gradients,
clipping, the update. They can only be faster where the one process computes on one thread, or where the sum hides
behind the backward.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.in_turn import append, in_turn, report
from benchmarks.pretrained import minilm_folder
from benchmarks.processes import output, torchrun
from benchmarks.training import (
    IMAGE_BATCH,
    LENGTH,
    TEXT_BATCH,
    command_line,
    fastest_first,
    is_left_out,
    of_train,
    ours,
    peers_of,
)
from utils.hardware.allocator import keep_freed_memory
from utils.hardware.cores import available_cores
from utils.hardware.vendor import allow_16_bit_attention
from utils.numerics.kernels import replace_kernels
from utils.numerics.precision import hardware_precision

ROWS, FLOORS = ("resnet18", "resnet50", "sst2", "mlm"), ("products", "operations", "step", "clipped")
REFERENCES = ("torchvision", "Trainer")  # the peers that take turns with the floors
REST = ("the sum of the gradients", "clipping", "the update")
PRODUCTS = ("convolution", "mm", "attention")  # in the names of operations
MASKED = 19  # of a text's tokens are predicted
SENTENCE = 24  # tokens: the mean of SST-2's batches, which are grouped by length
REPEATS, COPIED = 5, 2**28  # bytes


class Watch(TorchDispatchMode):
    """Looks at the operations of a step: seconds that its products take alone, and bytes that the others move."""

    def __init__(self) -> None:
        super().__init__()
        self.products_s, self.other_bytes = 0.0, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation of forward, backward and optimizer."""
        kwargs = kwargs or {}
        made = operation(*args, **kwargs)
        name = operation.overloadpacket.__name__
        if any(part in name for part in PRODUCTS):
            self.products_s += median(seconds(lambda: operation(*args, **kwargs)) for _ in range(REPEATS))
            return made
        given = [value for value in tree_leaves([args, kwargs]) if isinstance(value, Tensor)]
        # A fused optimizer writes gradients only where they are scaled, though its schema says that it always does.
        written = [value for value, argument in zip(args, operation._schema.arguments, strict=False)
                   if argument.alias_info and argument.alias_info.is_write and argument.name != "grads"]
        new = [value for value in tree_leaves(written or made) if isinstance(value, Tensor)]
        homes = {value.untyped_storage().data_ptr() for value in given}
        is_view = not written and all(value.untyped_storage().data_ptr() in homes for value in new)
        if name in ("embedding", "fill_", "zero_", "copy_"):  # a few rows of the table; what is there is not read
            given = given[1:]
        if not is_view and "empty" not in name:
            self.other_bytes += sum(value.nbytes for value in given + new)
        return made


def seconds(work: Callable[[], object]) -> float:
    """That `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def bytes_per_s() -> float:
    """Of a copy: those read and those written."""
    source, target = torch.zeros(COPIED, dtype=torch.uint8), torch.zeros(COPIED, dtype=torch.uint8)
    return 2 * COPIED / median(seconds(lambda: target.copy_(source)) for _ in range(REPEATS))


def floor(row: str, kind: str, precision: str) -> float:
    """Samples per second at the floor."""
    keep_freed_memory()  # this and the next two as train.py does
    replace_kernels()
    allow_16_bit_attention(precision == "bf16")
    loss, params = step_of(row)
    optimizer = torch.optim.AdamW(params, 1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            value = loss()
        value.backward()
        if kind == "clipped":
            nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    if kind in ("step", "clipped"):
        taken_s = median(seconds(step) for _ in range(4 * REPEATS))
    else:
        with Watch() as watch:
            step()
        taken_s = watch.products_s + (watch.other_bytes / bytes_per_s() if kind == "operations" else 0.0)
    return (IMAGE_BATCH if row.startswith("resnet") else TEXT_BATCH) / taken_s


def step_of(row: str) -> tuple[Callable[[], Tensor], list[nn.Parameter]]:
    """The loss of a batch of noise, and what it trains."""
    if row == "sst2":
        from transformers import AutoModelForSequenceClassification
        model = AutoModelForSequenceClassification.from_pretrained(minilm_folder()).train()
        sentences, classes = torch.randint(1000, 30000, (TEXT_BATCH, SENTENCE)), torch.randint(0, 2, (TEXT_BATCH,))
        return lambda: F.cross_entropy(model(sentences).logits.float(), classes), list(model.parameters())
    if row == "mlm":
        from transformers import AutoModelForMaskedLM
        model = AutoModelForMaskedLM.from_pretrained(minilm_folder()).train()
        ids = torch.randint(1000, 30000, (TEXT_BATCH, LENGTH))
        targets = torch.randint(1000, 30000, (TEXT_BATCH * MASKED,))

        def of_tokens() -> Tensor:
            hidden = model.bert(ids).last_hidden_state[:, :MASKED].flatten(0, 1)  # only these are predicted
            return F.cross_entropy(model.cls(hidden).float(), targets)

        return of_tokens, list(model.parameters())
    from torchvision import models
    net = models.get_model(row, num_classes=100).to(memory_format=torch.channels_last).train()
    images = torch.randn(IMAGE_BATCH, 3, 224, 224).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 100, (IMAGE_BATCH,))
    return lambda: F.cross_entropy(net(images).float(), labels), list(net.parameters())


def rest_s() -> list[float]:
    """Seconds of what does not depend on the batch, for MiniLM: those of REST. Collective."""
    from transformers import AutoModel
    params = list(AutoModel.from_pretrained(minilm_folder()).parameters())
    gradients = torch.randn(sum(param.numel() for param in params))
    for param, gradient in zip(params, gradients.split([param.numel() for param in params]), strict=True):
        param.grad = gradient.view_as(param)
    optimizer = torch.optim.AdamW(params, 1e-4, fused=True)
    dist.init_process_group("gloo")

    parts = (lambda: dist.all_reduce(gradients), lambda: nn.utils.clip_grad_norm_(params, 1.0), optimizer.step)
    taken = [[seconds(part) for part in parts] for _ in range(4 * REPEATS)]
    dist.destroy_process_group()
    return [median(part) for part in zip(*taken, strict=True)]


def rest_of(processes: int) -> list[float]:
    """Those of rest_s on this many processes: of the slowest of them."""
    lines = output([*torchrun(processes), "-m", "benchmarks.floors", "--rest"], available_cores() // processes)
    return max((list(map(float, line.split())) for line in lines.splitlines()), key=sum)


def compare_processes(words: list[object], steps: dict[str, int], precision: str, rounds: int) -> None:
    """MiniLM on SST-2, on two processes and on one."""
    found = in_turn({
        "ours, 1 process": ours(*words, **steps), "ours, 2 processes": ours(*words, **steps, processes=2),
        "rest of 1": partial(rest_of, 1), "rest of 2": partial(rest_of, 2)}, rounds)
    rests = {number: found.pop(f"rest of {number}") for number in (1, 2)}  # of each: [rounds, REST]
    found["expected of 2"] = [
        TEXT_BATCH / (TEXT_BATCH / speed - sum(of_one) + sum(of_two))
        for speed, of_one, of_two in zip(found["ours, 1 process"], rests[1], rests[2], strict=True)]
    report(f"floor, MiniLM on SST-2 on two processes, {precision}", "samples/s", found,
           "expected of 2", "ours, 1 process")
    parts = {f"{name}, {number} x": [1000 * taken[at] for taken in rest]
             for number, rest in rests.items() for at, name in enumerate(REST)}
    for name, taken in parts.items():
        print(f"{name}: {median(taken):.1f} ms")
    append("parts of a step of MiniLM, by the number of processes", "ms", parts)


def main(rows: list[str], rounds: int, data: Path | None) -> None:
    """Measure and report the rows."""
    precision = hardware_precision(torch.device("cpu"))

    def of(row: str, kind: str) -> Callable[[], float]:
        words = [sys.executable, "-m", "benchmarks.floors", "--rows", row, "--floor", kind, "--precision", precision]
        return lambda: float(output(words, available_cores()).split()[-1])

    with tempfile.TemporaryDirectory() as temporary:
        for row in rows:
            if is_left_out(row, data):
                continue
            words, steps = of_train(row, Path(temporary), data)
            if row == "sst2":
                compare_processes(words, steps, precision, rounds)
            kinds = [kind for kind in FLOORS if kind != "clipped" or row in ("sst2", "mlm")]
            peers = {name: peer for name, peer in peers_of(row, words, steps, precision).items()
                     if name.startswith(REFERENCES)}
            found = in_turn({"ours": ours(*words, **steps)} | {kind: of(row, kind) for kind in kinds} | peers, rounds)
            report(f"floor, {row}, {precision}", "samples/s", found, *kinds[1:], fastest_first(found, peers)[0])


if __name__ == "__main__":
    parser = command_line("floors", ROWS, rounds=3)
    internal = parser.add_argument_group("internal", "Of the processes that this benchmark starts.")
    internal.add_argument("--rest", action="store_true", help="print the seconds of rest_s, and nothing else")
    internal.add_argument("--floor", choices=FLOORS, help="print this floor of the first row, and nothing else")
    internal.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of --floor")
    arguments = parser.parse_args()
    if arguments.rest:
        print(" ".join(map(str, rest_s())) + "\n", end="")  # at once: two processes write into one pipe
    elif arguments.floor:
        print(floor(arguments.rows.split(",")[0], arguments.floor, arguments.precision))
    else:
        main(arguments.rows.split(","), arguments.rounds, arguments.data)
