"""What --strategy fsdp must share with ddp, in one launch: torchrun ... check_fsdp.py FOLDER.

Rank 0 writes FOLDER/fsdp-W.json, a list by rank; test_fsdp.py reads it.
"""

import json
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.batch import Batch
from data.plan import BatchPlan
from models.blocks import blocks_of
from tests.distributed.check_world import ONE, TASKS, M, distances, step_of
from utils.distributed.world import World
from utils.errors import exit_after
from utils.numerics.optimizers import build_optimizer
from utils.numerics.precision import Precision
from utils.settings.run_options import OptimOptions
from utils.strategies import load_strategy
from utils.strategies.base import Strategy

CASES = "mobilenet_v3_small", "text-classification", "masked-tokens"
CHANGES = "ddp", "fsdp", "exact", "ddp"


def task_of(name: str, world: World, folder: Path) -> Any:
    """A task of check_world.py; its images are channels_last, as the program's are."""
    task = TASKS[name](world, folder)
    if name == "mobilenet_v3_small":
        collate = task.collate
        task.collate = lambda samples: replace(batch := collate(samples), inputs={
            "images": batch.inputs["images"].float().contiguous(memory_format=torch.channels_last)})
    return task


def build(kind: str, task: Any, world: World) -> Strategy:
    torch.manual_seed(world.rank)  # rank 0's initial weights are the run's
    strategy = load_strategy(kind)(task.build_model(initial_weights=True), world, blocks_of)
    strategy.setup(M)
    return strategy


def gradients(world: World, folder: Path) -> Any:
    """{case step: relative distance of fsdp's gradients and buffers to ddp's}; no rank has the same micro-batches."""
    found = {}
    for name in CASES:
        task = task_of(name, world, folder)
        plan = BatchPlan(len(task.train_set), global_batch_size=26, num_micro_batches=M)
        strategies = [build(kind, task, world) for kind in ("fsdp", "ddp")]
        for strategy in strategies:
            strategy.module.to(torch.float32)
        for step, start in {"first": 0, "uneven last": plan.starts[-1]}.items():
            found[f"{name} {step}"] = distances(*(step_of(task, each, plan, start, world) for each in strategies))
    return found


def parts_of_parameters(world: World, folder: Path) -> Any:
    """{case: share of the parameters that this rank keeps}"""
    found = {}
    for name in CASES:
        params = list(build("fsdp", task_of(name, world, folder), world).module.parameters())
        own = [param.to_local() if hasattr(param, "to_local") else param for param in params]
        found[name] = sum(map(Tensor.numel, own)) / sum(map(Tensor.numel, params))
    return found


def changes_of_strategy(world: World, folder: Path) -> Any:
    """{case optimizer: whether weights and moments are those of before at each change of CHANGES, with a step between}

    And whether ddp, after its state went through fsdp, takes the same next step as without that.
    """
    found = {}
    for name, optimizer in (("mobilenet_v3_small", "adamw"), ("mobilenet_v3_small", "sgd"), ("masked-tokens", "adamw")):
        task, before, same, seen = task_of(name, world, folder), None, [], []
        plan = BatchPlan(len(task.train_set), global_batch_size=26, num_micro_batches=M)
        for number, kind in enumerate(CHANGES):
            strategy, optim = _load(kind, optimizer, task, before, world)
            if before:
                after = _saved(strategy, optim, world)
                same.append(_is_same(before, after))
            _train(task, strategy, optim, plan, number, world)
            seen.append(before := _saved(strategy, optim, world))
        through, ends = _saved(*_load("fsdp", optimizer, task, seen[0], world), world), []
        for state in (seen[0], through):
            strategy, optim = _load("ddp", optimizer, task, state, world)
            _train(task, strategy, optim, plan, 1, world)
            ends.append(_saved(strategy, optim, world))
        found[f"{name} {optimizer}"] = [*same, _is_same(*ends)]
    return found


def steps_of_the_optimizer(world: World, folder: Path) -> Any:
    """{optimizer: [whether a void step of fsdp changes nothing, how far a step of the same gradient is from ddp's]}

    The distance is relative to that from the weights of before; the moments are not zero.
    """
    found = {}
    for optimizer in ("adamw", "sgd"):
        task = task_of("mobilenet_v3_small", world, folder)
        plan = BatchPlan(len(task.train_set), global_batch_size=26, num_micro_batches=M)
        strategy, optim = _load("ddp", optimizer, task, None, world)
        _train(task, strategy, optim, plan, 0, world)
        state, ends = _saved(strategy, optim, world), {}
        grads = step_of(task, strategy, plan, plan.starts[1 % len(plan.starts)], world)
        for kind in ("ddp", "fsdp"):
            strategy, optim = _load(kind, optimizer, task, deepcopy(state), world)  # whose tensors it may keep
            for name, param in strategy.module.named_parameters():
                param.grad = strategy.placed(grads[f"gradient of {name}"], param.detach())
            Precision("fp32", world.device).void_step(optim)
            is_void = _is_same(_saved(strategy, optim, world)["weights"], state["weights"])
            optim.step()
            ends[kind] = torch.cat([tensor.flatten() for tensor in _saved(strategy, optim, world)["weights"].values()])
        before = torch.cat([tensor.flatten() for tensor in state["weights"].values()])
        found[optimizer] = [is_void, float((ends["fsdp"] - ends["ddp"]).norm() / (ends["ddp"] - before).norm())]
    return found


def _load(kind: str, optimizer: str, task: Any, state: Any, world: World) -> tuple[Strategy, torch.optim.Optimizer]:
    torch.manual_seed(7)
    strategy = load_strategy(kind)(task.build_model(initial_weights=True).float(), world, blocks_of)
    optim = build_optimizer(strategy.module, OptimOptions(optimizer=optimizer, lr=0.001))
    if state:
        strategy.load_model_state(state["weights"])
        strategy.load_optimizer_state(optim, state["optimizer"])
    strategy.setup(M)
    return strategy, optim


def _train(task: Any, strategy: Strategy, optim: torch.optim.Optimizer, plan: BatchPlan, number: int,
           world: World) -> None:
    """One step; step_of gives whole gradients, so each rank takes its part of them."""
    grads = step_of(task, strategy, plan, plan.starts[number % len(plan.starts)], world)
    for name, param in strategy.module.named_parameters():
        param.grad = strategy.placed(grads[f"gradient of {name}"], param.detach())
    optim.step()
    optim.zero_grad(set_to_none=True)


def _saved(strategy: Strategy, optim: torch.optim.Optimizer, world: World) -> Any:
    """What a checkpoint would hold, on every rank."""
    strategy.broadcast_buffers()
    state = {"weights": strategy.model_state(), "optimizer": strategy.optimizer_state(optim)}
    state = world.broadcast_nest(state)
    return {"weights": {name: tensor.clone() for name, tensor in state["weights"].items()}, "optimizer": {
        name: {key: value.clone() for key, value in values.items()} for name, values in state["optimizer"].items()}}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    return torch.equal(one, other)


def evaluation(world: World, folder: Path) -> Any:
    """{case: whether fsdp's outputs and ddp's of the same weights are the same bits}; a training step comes before."""
    found = {}
    for name in CASES:
        task, outputs = task_of(name, world, folder), []
        plan = BatchPlan(len(task.train_set), global_batch_size=26, num_micro_batches=M)
        for kind in ("fsdp", "ddp"):
            strategy = build(kind, task, world)
            strategy.module.float()
            batch = task.collate([task.train_set[0, index] for index in range(world.rank, 16, world.world_size)])
            step_of(task, strategy, plan, 0, world)
            with torch.no_grad():
                strategy.module.eval()
                outputs.append(task.forward(strategy.module, batch).logits)
        found[name] = torch.equal(*outputs)
    return found


def a_gradient_that_is_infinite_in_one_part(world: World, folder: Path) -> Any:
    """[whether the norm is finite, whether the step changed nothing, the loss scale before and after] by precision."""
    found = {}
    for name in ("fp32", "fp16"):
        torch.manual_seed(0)
        strategy = load_strategy("fsdp")(nn.Linear(5, 8), world)
        strategy.setup(M)
        precision = Precision(name, world.device)
        optim = build_optimizer(strategy.module, OptimOptions(lr=0.001))
        before, scale = _saved(strategy, optim, world)["weights"], float(precision.scale)
        shares = [_batch(index) for index in range(world.rank, M, world.world_size)]
        for model, batch in strategy.accumulate(shares, precision.scale):
            factor = torch.ones(8)
            factor[7] = float("inf")  # in the last rank's part
            (model(batch.inputs["x"]) * factor * batch.sample_weight[:, None]).sum().mul(
                precision.scale).backward()
        precision.unscale_(optim)
        norm = strategy.clip_grad_norm_(1.0)
        precision.step(optim, norm)
        after = _saved(strategy, optim, world)["weights"]
        found[name] = [bool(torch.isfinite(norm)), _is_same(before, after), scale, float(precision.scale)]
    return found


def _batch(index: int) -> Batch:
    return Batch({"x": torch.randn(2, 5, generator=torch.Generator().manual_seed(index))},
                 torch.zeros(2, dtype=torch.int64), torch.ones(2), index)


def _norm(strategy: Strategy, shares: list[Batch]) -> float:
    for model, batch in strategy.accumulate(shares, ONE):
        (model(batch.inputs["x"]).square() * batch.sample_weight[:, None]).sum().backward()
    return float(strategy.clip_grad_norm_(0.0))


CHECKS = (gradients, parts_of_parameters, changes_of_strategy, steps_of_the_optimizer, evaluation,
          a_gradient_that_is_infinite_in_one_part)


def work() -> int:
    """All checks, on every rank in the same order."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with World.from_env("cpu") as world:
        told = world.gather({check.__name__: check(world, folder) for check in CHECKS})
        if world.is_main:
            (folder / f"fsdp-{world.world_size}.json").write_text(json.dumps(told))
    return 0


if __name__ == "__main__":
    exit_after(work)
