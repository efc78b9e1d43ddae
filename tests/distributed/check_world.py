"""Checks that need ranks, all in one launch: torchrun ... check_world.py FOLDER.

Rank 0 writes FOLDER/on-W.json, test_world.py reads it. Every check returns JSON; the file holds a list by rank. One
process comes first and leaves its gradients in FOLDER as the reference of the others.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from data.batch import Batch
from data.loader import build_loader
from data.plan import BatchPlan
from data.sampler import ElasticDistributedSampler
from engine import resolve
from engine.warm_up import warm_up
from models.output import Output
from models.tasks import load_task
from models.text.hub import find_folder
from models.vision.classifier import build_classifier
from tests.harness.strategies import ACROSS
from utils.distributed.agreement import Agreement
from utils.distributed.world import World, is_folder
from utils.errors import Exit, UserError, exit_after
from utils.hardware import devices
from utils.numerics.optimizers import build_optimizer
from utils.numerics.precision import Precision
from utils.numerics.seed import seed_micro_batch
from utils.rundir import checkpoint
from utils.rundir.chain import NO_RECORDS
from utils.rundir.lock import RunLock
from utils.rundir.resolved import Resolved
from utils.rundir.run import Run
from utils.rundir.snapshot import Beside
from utils.rundir.state import Progress, TrainState
from utils.settings.command_line import parse_command_line
from utils.settings.run_options import DeviceOptions, FaultOptions, OptimOptions, RecordOptions
from utils.strategies import load_strategy
from utils.strategies.base import DEFAULTS

M, CLASSES, SIDE = 6, 10, 32
ONE = torch.ones(())
FLAGS = "stop", "save", "error", "bad_sample", "wrong"


class _Images:
    """A task whose sample i is noise [3, SIDE, SIDE] and a label, functions of i."""

    lengths = None

    def __init__(self, build: Callable[[], nn.Module]):
        self.train_set, self._build = self, build

    def __len__(self) -> int:
        return 67  # batches of 26, 21, 20: nothing divides by 6

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(item[1])
        return torch.randn(3, SIDE, SIDE, generator=generator, dtype=torch.float64), item[1] % CLASSES

    def collate(self, samples: list[tuple[Tensor, int]]) -> Batch:
        images = torch.stack([image for image, _ in samples])
        return Batch({"images": images}, torch.tensor([label for _, label in samples]),
                     torch.ones(len(samples), dtype=torch.float64))

    def normalizer(self, indices: Tensor) -> float:
        return float(len(indices))

    def build_model(self, initial_weights: bool) -> nn.Module:
        return self._build().to(memory_format=torch.channels_last)

    def forward(self, model: nn.Module, batch: Batch) -> Output:
        logits = model(batch.inputs["images"].to(next(model.parameters()).dtype))
        return Output(F.cross_entropy(logits, batch.labels, reduction="none") * batch.sample_weight, logits)


def _text_task(task: str, world: World, folder: Path) -> Any:
    """The real one, with dropout, on the texts in FOLDER; 57 of them: batches of 26, 16, 15."""
    config = parse_command_line(["--task", task, "--data", str(folder / "texts"), "--model", "bert-tiny",
                                 "--vocab-size", "200", "--max-length", "32"], {})
    run = Run(folder, {}, {"start": 1, "cores_per_process": 1}, print, RunLock())
    return load_task(task)(config, run, world)


TASKS = {
    # BatchNorm and dropout
    "mobilenet_v3_small": lambda *_: _Images(lambda: build_classifier("mobilenet_v3_small", CLASSES)),
    # Every forward changes its vectors, which enter the next one: how many a rank does must not matter.
    "spectral-norm": lambda *_: _Images(
        lambda: nn.Sequential(spectral_norm(nn.Conv2d(3, 8, 8, stride=8)), nn.Flatten(), nn.Linear(128, CLASSES))),
    "text-classification": partial(_text_task, "text-classification"),
    "masked-tokens": partial(_text_task, "masked-lm"),  # the weight of a batch is its predicted tokens, not its samples
}


def once_returns_rank_0s_value(world: World, folder: Path) -> Any:
    return world.on_rank_zero(lambda: {"answer": [world.rank, 1.5, None]})


def once_tells_rank_0s_error(world: World, folder: Path) -> Any:
    return _error_of(lambda: world.on_rank_zero(lambda: _refuse("rank 0 refused", Exit.CANNOT_CREATE)))


def once_tells_another_nodes_error(world: World, folder: Path) -> Any:
    # The last rank plays the first process of a second node, on which alone the work fails.
    last = world.world_size - 1
    here = replace(world, local_rank=0 if world.rank in (0, last) else 1)
    return _error_of(lambda: here.on_rank_zero(
        lambda: _refuse("the last node refused", Exit.IO) if world.rank == last else 1, per_node=True))


def once_per_node_returns_the_value_of_its_node(world: World, folder: Path) -> Any:
    is_last = world.rank == world.world_size - 1  # which plays the second node
    here = replace(world, local_rank=0 if is_last else world.rank)
    return here.on_rank_zero(lambda: f"of rank {world.rank}", per_node=True)


def a_name_of_the_hub_on_two_nodes(world: World, folder: Path) -> Any:
    """The commit that each rank reads. The last rank plays a second node, in whose cache another one is the newest."""
    is_last = world.rank == world.world_size - 1
    here = replace(world, local_rank=0 if world.is_main or is_last else 1)
    huggingface_hub.constants.HF_HUB_CACHE = str(folder / f"hub-{world.world_size}-{is_last}")
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    if here.local_rank == 0:
        root = Path(huggingface_hub.constants.HF_HUB_CACHE, "models--org--name")
        for commit in ("a" * 40, "b" * 40):
            (root / "snapshots" / commit).mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs/main").write_text("ab"[is_last and not world.is_main] * 40)
    run = Run(folder, {}, lock=RunLock(), note=print, facts={"start": 1, "cores_per_process": 1})
    return Path(find_folder("org/name", run, here)).name


def once_tells_a_failing_disk(world: World, folder: Path) -> Any:
    return _error_of(lambda: world.on_rank_zero(lambda: Path("/nonexistent/file").read_text()))


def everywhere_gives_each_rank_its_own_result(world: World, folder: Path) -> Any:
    tensor = world.everywhere(lambda: torch.tensor(world.rank))  # which is no JSON
    return int(tensor)


def everywhere_raises_what_failed_on_some(world: World, folder: Path) -> Any:
    """What comes of a missing file on the last rank, on all, and of a bug on the last two."""
    is_last, missing = world.rank == world.world_size - 1, Path("/nonexistent/file")
    lacks = partial(_refuse, "there is no file w.pth", Exit.NO_INPUT)
    return [_error_of(lambda: world.everywhere(lambda: lacks() if is_last else None)),
            _error_of(lambda: world.everywhere(missing.read_text)),
            _error_of(lambda: world.everywhere(lambda: {}["a bug"] if world.rank >= world.world_size - 2 else None))]


def a_folder_that_the_last_rank_lacks(world: World, folder: Path) -> Any:
    name = "/nonexistent" if world.rank == world.world_size - 1 else "/"
    return [_error_of(partial(is_folder, each, world)) for each in ("/", "/nonexistent", name)]


def hardware_that_differs(world: World, folder: Path) -> Any:
    """[precision, notes] of --precision auto in a new run and in one that keeps bf16, and of a given one."""
    has_bf16 = world.rank != world.world_size - 1 or world.world_size == 1
    resolve.hardware_precision = lambda device: "bf16" if has_bf16 else "fp32"
    found = []
    for kept, given in (({}, "auto"), ({"precision": "bf16"}, "auto"), ({}, "bf16")):
        notes: list[str] = []
        run = Run(folder, dict(kept), {"start": 1, "cores_per_process": 1}, notes.append, RunLock())
        found.append([resolve.resolve_arithmetic(DeviceOptions(precision=given), run, world).name, notes])
    return found


def a_device_that_one_rank_lacks(world: World, folder: Path) -> Any:
    """What comes of --device auto where the last rank sees no accelerator; where none does; where it has too few."""
    store, is_last = dist.distributed_c10d._get_default_store(), world.rank == world.world_size - 1

    def ask(name: str, kind: str) -> list[Any]:
        own = dist.PrefixStore(name, store)
        def find() -> torch.device:
            return torch.device(kind) if kind else _refuse("too few devices", Exit.USAGE)

        return _error_of(lambda: devices.resolve_device("auto", find, own, world.rank, world.world_size))

    return [ask("mixed", "cpu" if is_last else "xpu"), ask("none", "cpu"), ask("few", "" if is_last else "xpu")]


def what_differs_between_ranks(world: World, folder: Path) -> Any:
    last = world.world_size - 1
    world.require_same("a", "the data set")
    return _error_of(lambda: world.require_same("b" if world.rank == last else "a", "the data set"))


def gather_is_by_rank(world: World, folder: Path) -> Any:
    return world.gather({"rank": world.rank, "text": "ü" * 10 * world.rank})


def cores_of_a_rank(world: World, folder: Path) -> Any:
    return world.cores


def flags_of(world: World, **raised: Any) -> Agreement:
    """An Agreement in which the last rank raises these flags where {name: question}."""
    return Agreement(world, **{
        name: lambda ask=ask: world.rank == world.world_size - 1 and ask() for name, ask in raised.items()})


def seen_in(flags: Agreement) -> list[bool]:
    return [getattr(flags, name) for name in FLAGS]


def a_flag_of_the_last_rank(world: World, folder: Path) -> Any:
    """What is seen after each of six exchanges; the last rank raises all flags at the third."""
    seen: list[list[bool]] = []
    flags = flags_of(world, **dict.fromkeys(FLAGS, lambda: len(seen) == 2))
    for _ in range(6):
        flags.exchange()
        seen.append(seen_in(flags))
    flags.wait()
    return seen


def one_flag_at_a_time(world: World, folder: Path) -> Any:
    """What is seen of each flag alone, in an Agreement of its own."""
    seen = []
    for name in FLAGS:
        flags = flags_of(world, **{name: lambda: True})
        flags.exchange()
        flags.wait()
        seen.append(seen_in(flags))
    return seen


def a_flag_before_a_wait(world: World, folder: Path) -> Any:
    flags, seen = flags_of(world, stop=lambda: True, save=lambda: True), []
    for work in (flags.exchange, flags.wait, flags.wait):
        work()
        seen.append([flags.stop, flags.save])
    return seen


def a_checkpoint_that_rank_0_alone_sees(world: World, folder: Path) -> Any:
    """[sha256 of what was saved, of what was restored, its best value and step, the error of a folder that is gone]"""
    path = folder / f"saved-{world.world_size}" if world.is_main else Path("/nonexistent")
    states = [_state(world, seed) for seed in (0, 1 + world.rank)]
    for model, batch in states[0].strategy.accumulate(_shares(world), ONE):
        model(batch.inputs["x"]).square().sum().backward()
    states[0].optimizer.step()
    states[0].progress, states[0].best = Progress(step=1), {"step": 1, "metric": "top1", "value": 0.1 + 0.2}
    saving = _checkpoints(path, world)
    saving.save(states[0], Beside(NO_RECORDS))
    saving.flush()
    _checkpoints(path, world).restore(states[1])
    gone = _error_of(lambda: _checkpoints(path, world)._read(lambda: "step-0000000009-g1", states[1].strategy))
    digests = [_sha256(state.strategy.model_state() | {
        f"{name} {key}": value
        for name, values in state.state_dict()["optimizer"].items() for key, value in values.items()})
        for state in states]
    return [*world.gather(digests[0])[:1], digests[1], states[1].best["value"], states[1].progress.step, gone]


def a_nest_on_every_rank(world: World, folder: Path) -> Any:
    """Whether a nest arrives as it was sent: values, types, shapes, strides."""
    images = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors = [images, images[:, 1], images.bfloat16(), torch.tensor(7), torch.tensor([True, False]), torch.zeros(0, 3)]
    nest = {"tensors": {str(i): tensor for i, tensor in enumerate(tensors)},
            "values": [0.1 + 0.2, 2**62, None, "ü", [], {}]}
    found = world.broadcast_nest(nest if world.is_main else None)
    same = [(tensor.dtype, tensor.tolist()) == (sent.dtype, sent.tolist())
            for tensor, sent in zip(found["tensors"].values(), tensors, strict=True)]
    return [all(same), found["values"] == nest["values"], found["tensors"]["0"].stride() == images.stride()]


def a_save_that_fails(world: World, folder: Path) -> Any:
    """Whether each rank knows of the error by itself, and what flush() raises."""
    state, checkpoints = _state(world), _checkpoints(folder / f"failing-{world.world_size}", world)
    state.progress = Progress(step=1)
    checkpoints.save(state, Beside(NO_RECORDS, lambda weights: _refuse("the disk is full", Exit.IO)))
    told = _error_of(checkpoints.flush)
    return [checkpoints.has_failed(), told]


def _checkpoints(path: Path, world: World) -> checkpoint.Checkpoints:
    run = SimpleNamespace(path=path, start=1, note=print, resolved=Resolved())
    return checkpoint.Checkpoints(run, world, RecordOptions())


def _state(world: World, seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    return TrainState(
        load_strategy("ddp")(model, world), build_optimizer(model, OptimOptions(lr=0.001)), torch.amp.GradScaler("cpu"))


def gradients(world: World, folder: Path) -> Any:
    """{case: figures of one step}, over tasks, types, strategies and batches."""
    return {f"{name} {dtype} {step}": figures
            for name, build in TASKS.items() for task in [build(world, folder)]
            for dtype in (torch.float32, torch.float64)
            for step, figures in _steps(name, task, dtype, world, folder).items()}


def _steps(name: str, task: Any, dtype: torch.dtype, world: World, folder: Path) -> dict[str, Any]:
    """The same steps under every strategy.

    Distances are relative L2, of this launch's ddp to one process's, and to exact's.
    """
    plan = BatchPlan(len(task.train_set), global_batch_size=26, num_micro_batches=M)
    positions = {"first": 0, "uneven last": plan.starts[-1]}
    figures, results = {step: {} for step in positions}, {}
    for kind in ACROSS:
        torch.manual_seed(0)
        strategy = load_strategy(kind)(task.build_model(initial_weights=True).to(dtype), world)
        strategy.setup(M)
        for step, start in positions.items():
            results[kind, step] = step_of(task, strategy, plan, start, world)
            figures[step][f"{kind} sha256"] = _sha256(results[kind, step])
    for step in positions:
        file = folder / f"{name} {dtype} {step}.safetensors"
        if world.world_size == 1:
            save_file(results["ddp", step], file)
        if world.is_main:
            figures[step]["ddp to one process"] = distances(results["ddp", step], load_file(file))
        figures[step]["ddp to exact"] = distances(results["ddp", step], results["exact", step])
    return figures


def step_of(task: Any, strategy: Any, plan: BatchPlan, start: int, world: World) -> dict[str, Tensor]:
    """Summed gradients and buffers of one optimizer step at position `start`, as train_step computes them."""
    sampler = ElasticDistributedSampler(plan, world.rank, world.world_size, seed=0, lengths=task.lengths)
    sampler.set_position(0, start)
    items = iter(build_loader(task.train_set, task.collate, sampler, 0, world))
    strategy.module.train()
    for model, batch in strategy.accumulate([*islice(items, len(sampler.share))], ONE):
        seed_micro_batch(0, start, batch.index, world.device)
        (task.forward(model, batch).loss_sum / task.normalizer(sampler.indices(0, start))).backward()
    strategy.commit_buffers(torch.isfinite(strategy.clip_grad_norm_(0.0)))
    strategy.broadcast_buffers()
    result = {f"gradient of {name}": whole(weight.grad).contiguous().clone()
              for name, weight in strategy.module.named_parameters()}
    result |= {f"buffer {name}": buffer.contiguous().clone() for name, buffer in strategy.module.named_buffers()}
    for weight in strategy.module.parameters():
        weight.grad = None
    return result


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def planted_values_make_the_norm_non_finite(world: World, folder: Path) -> Any:
    """{strategy: {what was planted in one or two micro-batches: whether this rank's norm is finite}}"""
    nan, inf = float("nan"), float("inf")
    planted = {"nothing": {}, "NaN": {4: nan}, "inf": {4: inf}, "overflow": {4: 1e9}, "negative overflow": {3: -1e9},
               "two NaN, which as integers add to 0": {1: nan, 5: nan}, "inf and -inf": {1: inf, 2: -inf}}
    return {kind: {what: _is_norm_finite(kind, factors, world) for what, factors in planted.items()}
            for kind in ACROSS}


def _is_norm_finite(kind: str, factors: dict[int, float], world: World) -> bool:
    torch.manual_seed(0)
    strategy = load_strategy(kind)(nn.Linear(5, 3), world)
    strategy.setup(M)
    for model, batch in strategy.accumulate(_shares(world), ONE):
        (model(batch.inputs["x"]).sum() * factors.get(batch.index, 1.0) / M).backward()
    return bool(torch.isfinite(strategy.clip_grad_norm_(0.0)))


def an_unused_weight(world: World, folder: Path) -> Any:
    """{strategy: what warm_up froze and said, and the gradient's norm of the next, real step}"""
    return {kind: _with_an_unused_weight(kind, world) for kind in ACROSS}


def a_layer_that_is_skipped_at_random(world: World, folder: Path) -> Any:
    """{strategy: what warm_up makes of a layer that only the last micro-batch uses}: the error, or what it froze."""
    found = {kind: _error_of(lambda kind=kind: _with_an_unused_weight(kind, world, skips=True)) for kind in ACROSS}
    finding = DeviceOptions(find_unused_parameters=True)
    return found | {"finding": _error_of(lambda: _with_an_unused_weight("ddp", world, skips=True, options=finding))}


def ranks_without_work(world: World, folder: Path) -> Any:
    """sha256 of exact's gradients of two micro-batches, on any number of ranks.

    First each rank computes one, as in warm_up; then the scale of the losses falls, as it may with fp16.
    """
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    strategy = load_strategy("exact")(model, world)
    strategy.setup(2)
    for share, scale in (([_shares(world)[0]], 2 * ONE), ([batch for batch in _shares(world) if batch.index < 2], ONE)):
        for weight in model.parameters():
            weight.grad = None
        for module, batch in strategy.accumulate(share, scale):
            (module(batch.inputs["x"]).square().sum() * scale).backward()
    return [len(share), _sha256({name: weight.grad for name, weight in model.named_parameters()})]


def _with_an_unused_weight(
    kind: str, world: World, skips: bool = False, options: DeviceOptions = DEFAULTS
) -> dict[str, Any]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.left_over = nn.Linear(5, 3), nn.Linear(5, 3)
            self.config, self.index = SimpleNamespace(layerdrop=0.5 if skips else 0.0), 0

        def forward(self, x: Tensor) -> Tensor:
            # as a layer drop: never skipped in evaluation
            is_used = skips and (not self.training or self.index == M - 1)
            return self.used(x) + (self.left_over(x) if is_used else 0)

    class Task:
        def example(self, size: int) -> Batch:
            return _shares(world)[0]

        def forward(self, model: nn.Module, batch: Batch) -> Output:
            logits = model(batch.inputs["x"])
            return Output(logits.square(), logits)

    torch.manual_seed(0)
    task, notes, strategy = Task(), [], load_strategy(kind)(Model(), world, config=options)
    optimizer = torch.optim.SGD(strategy.module.parameters(), lr=0.1, fused=True)
    strategy.setup(M)
    warm_up(SimpleNamespace(
        strategy=strategy, task=task, feed=SimpleNamespace(plan=BatchPlan(67, 26, M)),
        precision=Precision("fp32", world.device), log=SimpleNamespace(note=notes.append),
        evaluation=SimpleNamespace(eval_batch=2), attempts=SimpleNamespace(evaluate=lambda size: None),
        config=SimpleNamespace(run=SimpleNamespace(seed=0), model=SimpleNamespace(model="mine"), device=options,
                               faults=FaultOptions()),
        state=SimpleNamespace(optimizer=optimizer), world=world))
    norms = []
    strategy.module.train()
    for _ in range(2):
        for model, batch in strategy.accumulate(_shares(world), ONE):
            strategy.module.index = batch.index
            task.forward(model, batch).loss_sum.backward()
        norms.append(float(strategy.clip_grad_norm_(0.0)))
        optimizer.zero_grad(set_to_none=True)
    frozen = [name for name, weight in strategy.module.named_parameters() if not weight.requires_grad]
    return {"frozen": frozen, "notes": notes, "norms": norms}


def _shares(world: World) -> list[Batch]:
    """This rank's of M micro-batches of two samples."""
    return [Batch({"x": torch.randn(2, 5, generator=torch.Generator().manual_seed(v))},
                  torch.zeros(2, dtype=torch.int64), torch.ones(2), v)
            for v in range(world.rank, M, world.world_size)]


def _refuse(text: str, code: Exit) -> None:
    raise UserError(text, code)


def _error_of(work: Callable[[], Any]) -> list[Any]:
    """[type, message, code] of the error that `work` raises."""
    try:
        return ["no error", work(), None]
    except Exception as error:
        return [type(error).__name__, str(error), int(getattr(error, "code", -1))]


def distances(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 distance of all gradients together, and of all buffers together."""
    found = {}
    for kind in ("gradient", "buffer"):
        names = [name for name in one if name.startswith(kind)]
        squares = [(float((one[name] - other[name]).double().square().sum()),
                    float(other[name].double().square().sum())) for name in names]
        found[kind] = (sum(difference for difference, _ in squares) / sum(size for _, size in squares)) ** 0.5
    return found


def _sha256(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


CHECKS = (
    once_returns_rank_0s_value, once_tells_rank_0s_error, once_tells_another_nodes_error,
    once_per_node_returns_the_value_of_its_node,
    a_name_of_the_hub_on_two_nodes, once_tells_a_failing_disk, gather_is_by_rank,
    everywhere_gives_each_rank_its_own_result, everywhere_raises_what_failed_on_some, a_folder_that_the_last_rank_lacks,
    cores_of_a_rank, what_differs_between_ranks, a_flag_of_the_last_rank, one_flag_at_a_time, a_flag_before_a_wait,
    a_checkpoint_that_rank_0_alone_sees, a_nest_on_every_rank, a_save_that_fails,
    gradients, planted_values_make_the_norm_non_finite, an_unused_weight, a_layer_that_is_skipped_at_random,
    ranks_without_work, hardware_that_differs, a_device_that_one_rank_lacks)


def work() -> int:
    """All checks, on every rank in the same order."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with World.from_env("cpu") as world:
        told = world.gather({check.__name__: check(world, folder) for check in CHECKS})
        if world.is_main:
            (folder / f"on-{world.world_size}.json").write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    exit_after(work)
