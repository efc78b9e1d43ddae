"""Evaluation: every sample once, the same digits on any number of processes; in training and for --eval-only."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from data.loader import BadSamples, build_loader, num_workers
from data.sampler import EvaluationSampler
from engine.plan import FORMER_EVAL_BATCH
from engine.records import position
from models.metrics import Totals
from models.tasks.base import Task
from utils.distributed.agreement import Agreement
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.errors import Exit
from utils.numerics.precision import Precision
from utils.rundir.checkpoint import Checkpoints
from utils.rundir.log import json_line
from utils.rundir.run import Run
from utils.settings.config import Config
from utils.strategies import load_strategy
from utils.strategies.base import Strategy


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated: a strategy's model on task.eval_set. Built by build_evaluation."""

    task: Task
    strategy: Strategy
    precision: Precision
    loader: DataLoader
    bad_samples: BadSamples
    flags: Agreement
    watchdog: Watchdog
    world: World

    @torch.no_grad()
    def run(self) -> dict[str, Any] | None:
        """The task's metrics by name; None if a stop was agreed. Leaves the model in evaluation mode. Collective.

        Raises UserError on every rank: 65 for a sample that cannot be read, 80 for a metric that is NaN.
        """
        self.strategy.broadcast_buffers()  # Collective.
        model, limit_s = self.strategy.module.eval(), self.world.section_timeout.total_seconds()
        totals = Totals(self.task.metrics, self.loader.sampler.num_batches)
        reading = self.loader.dataset.reading
        for batch in self.watchdog.watch(self.loader, "evaluation", limit_s, limit_s, reading):
            batch = self.bad_samples.check(batch).to(self.world.device)
            with self.precision.autocast():
                output = self.task.forward(model, batch)
            totals.add(batch.index, output, batch)
            self.flags.exchange()  # Collective, read one batch later.
            if is_stopped := self.flags.stop or self.flags.bad_sample:
                break
        self.flags.wait()  # Collective.
        if self.flags.bad_sample:
            self.bad_samples.stop(self.world)  # Collective; raises UserError (65) on every rank.
        return None if is_stopped else totals.values(self.world)  # Collective.


def build_evaluation(config: Config, task: Task, strategy: Strategy, precision: Precision, eval_batch: int,
                     bad_samples: BadSamples, flags: Agreement, watchdog: Watchdog, world: World) -> Evaluation:
    """An evaluation in batches of `eval_batch` samples."""
    sampler = EvaluationSampler(len(task.eval_set), eval_batch, world.rank, world.world_size)
    loader = build_loader(task.eval_set, task.collate, sampler, num_workers(config.data.workers, world), world)
    return Evaluation(task, strategy, precision, loader, bad_samples, flags, watchdog, world)


def evaluate_only(config: Config, task: Task, precision: Precision, run: Run, watchdog: Watchdog, world: World) -> Exit:
    """--eval-only: one JSON line with the best checkpoint's figures on standard output; writes nothing. Collective."""
    model = task.build_model(initial_weights=False).to(world.device)  # Collective.
    if config.device.compile:
        model.compile()
    strategy = load_strategy(config.device.strategy)(model, world)
    checkpoints = Checkpoints(run.path / "checkpoints", world, config.record, run.start, run.note)
    progress = checkpoints.load_best(strategy)  # Collective.
    eval_batch = run.resolve("eval_batch_size", config.batch.eval_batch_size, lambda: FORMER_EVAL_BATCH)
    bad_samples = BadSamples(config.data.bad_samples, None)
    flags = Agreement(world, stop=watchdog.wants_to_stop, bad_sample=bad_samples.has_stopped)
    values = build_evaluation(
        config, task, strategy, precision, eval_batch, bad_samples, flags, watchdog, world).run()  # Collective.
    if values is None:  # a signal has just come, and ends the process
        return Exit.STOPPED
    values.pop("confusion", None)
    if world.is_main:
        print(json_line(config.run.split, position(progress, len(task.train_set)) | values))
    return Exit.DONE
