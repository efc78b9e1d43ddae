"""What all the safety of a step costs: epochs of the digits with it and without alternate in one run.

Without: no watchdog, no flags, no norm of the gradient, no look at whether it is finite, no digests compared or noted,
no checkpoints in between. (The digest of a sample is made where it is read, in both.)

    OMP_NUM_THREADS=1 torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 -m tests.harness.cost_of_safety
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import extras
from data import demo
from data.loader import BadSamples, build_loader
from engine.build import open_start, open_training
from engine.feed import Feed
from engine.training import Training
from engine.warm_up import warm_up
from train import train_one_epoch
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.numerics.precision import Precision
from utils.settings.command_line import parse_command_line
from utils.settings.option import Interval

ROUNDS = 12


class NoWatchdog:
    """Nobody watches."""

    def watch(self, items: Iterable[Any], *ignored: Any) -> Iterator[Any]:
        """The items."""
        return iter(items)

    def wants_to_stop(self) -> bool:
        """Never."""
        return False

    def enter(self, *ignored: Any, **options: Any) -> None:
        """Nothing."""


class NoAgreement:
    """Nothing is said and nothing is heard."""

    stop = save = error = bad_sample = wrong = False

    def exchange(self) -> None:
        """Nothing."""

    wait = exchange


class NoOutcome:
    """Nobody looks."""

    def note(self, *ignored: Any) -> None:
        """Nothing."""


class Unguarded(Precision):
    """The update is applied, whatever it is."""

    def step(self, optimizer: torch.optim.Optimizer, *ignored: Any) -> torch.Tensor:
        """A plain optimizer step."""
        optimizer.grad_scale = optimizer.found_inf = None
        optimizer.step()
        return torch.ones((), dtype=torch.bool)


def main() -> None:
    """Print the ratio on rank 0. Run under torchrun."""
    watchdog = Watchdog()
    with tempfile.TemporaryDirectory() as folder, World.from_env("cpu", watchdog=watchdog) as world:
        [folder] = world.gather(folder)[:1]
        config = parse_command_line(
            ["--run-dir", f"{folder}/run", "--epochs", "1000", "--eval-every", "100000", "--log-every", "100000",
             "--workers", "0", "--save-every", "6", "--threads", "1"], demo.SETTINGS, extras.pages())
        with open_start(config, world, watchdog, lambda text: None) as start, open_training(start) as safe:
            unguarded = Unguarded(safe.precision.name, world.device)
            bare = replace(safe, watchdog=NoWatchdog(), flags=NoAgreement(), outcome=NoOutcome(), precision=unguarded,
                           bad_samples=BadSamples("stop", None),
                           config=replace(config, record=replace(config.record, save_every=Interval("100000"))))
            compare(safe, bare, watchdog, world)
    sys.stdout.flush()
    os._exit(0)


def compare(safe: Training, bare: Training, watchdog: Watchdog, world: World) -> None:
    """Epochs in turn; the table."""
    warm_up(safe)
    norm, save_is_due, store = safe.strategy.clip_grad_norm_, safe.checkpoints.is_due, watchdog._peers._store
    times: dict[str, list[float]] = {"with": [], "with, and a checkpoint every 6 steps": [], "without": []}
    for i in range(ROUNDS + 1):
        for name, found in times.items():
            t = bare if name == "without" else safe
            loader = build_loader(safe.task.train_set, safe.task.collate, safe.feed.sampler, 0, world)
            t = replace(t, feed=Feed(t, loader, t.state.progress, t.bad_samples, t.clock))
            is_safe = name != "without"
            safe.strategy.clip_grad_norm_ = norm if is_safe else lambda limit: torch.zeros(())
            watchdog._peers._store = store if is_safe else None  # no signs of life either
            safe.checkpoints.is_due = save_is_due if "checkpoint" in name else lambda step: False
            dist.barrier()
            began = time.perf_counter()
            train_one_epoch(t)
            safe.checkpoints.flush()
            dist.barrier()
            if i:
                found.append(time.perf_counter() - began)
    if world.is_main:
        steps = safe.feed.plan.steps_per_epoch
        print(f"the built-in digits, resnet18, {safe.precision.name}, {world.world_size} processes,"
              f" {ROUNDS} rounds of {steps} steps,"
              f" torch {torch.__version__}; a checkpoint of {saved_mib(safe):.0f} MiB,"
              f" {1000 * safe.checkpoints.stall_s / safe.checkpoints.count:.1f} ms of the training's time")
        for name, seconds in times.items():
            ratios = [mine / theirs for mine, theirs in zip(seconds, times["without"], strict=True)]
            print(f"{name:<36} {1000 * statistics.median(seconds) / steps:7.1f} ms a step"
                  f"  {statistics.median(ratios):.3f} x without"
                  f" (rounds: {min(ratios):.3f} to {max(ratios):.3f})")


def saved_mib(t: Training) -> float:
    """Size of the newest checkpoint."""
    newest = max((t.run.path / "checkpoints").glob("step-*"))
    return sum(file.stat().st_size for file in newest.iterdir()) / 2**20


if __name__ == "__main__":
    main()
