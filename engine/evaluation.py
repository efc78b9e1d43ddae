"""Evaluation: every sample once, the same figures on any number of processes; in training and for --eval-only."""

from functools import partial
from typing import Any

import torch

from data.loader import BadSamples, build_loader, num_workers
from data.sampler import EvaluationSampler
from engine.head import resolve_head
from engine.records.evaluation_files import require_writable, write_output
from engine.records.log import json_line
from engine.resolve import EVAL_BATCH, with_possible_precision
from engine.start import Start
from models.activations import checkpoint_activations
from models.blocks import blocks_of, freeze
from models.metrics.metric import Totals
from utils.distributed.agreement import Agreement
from utils.errors import Exit
from utils.hardware.compiling import compile_model
from utils.numerics.seed import derive_seed, seeded
from utils.rundir.checkpoint import Checkpoints
from utils.rundir.coverage import Coverage
from utils.rundir.state import Progress
from utils.strategies import load_strategy
from utils.strategies.base import Strategy


class Evaluation:
    """Evaluates a strategy's model on task.eval_set, in batches of `eval_batch` samples."""

    def __init__(self, start: Start, strategy: Strategy, eval_batch: int, bad_samples: BadSamples, flags: Agreement):
        world, samples, self.eval_batch = start.world, start.task.eval_set, eval_batch
        sampler = EvaluationSampler(len(samples), eval_batch, world.rank, world.world_size)
        workers = num_workers(start.config.data.workers, world)
        self._loader = build_loader(samples, start.task.collate, sampler, workers, world)
        self._start, self._strategy, self._bad_samples, self._flags = start, strategy, bad_samples, flags

    @torch.no_grad()
    def run(self) -> dict[str, Any] | None:
        """The task's metrics by name; None if a stop was agreed. Leaves the model in evaluation mode. Collective.

        Raises UserError on every rank: 65 for a sample that cannot be read or has changed, 80 for a metric that is not
        finite.
        """
        task, world, flags = self._start.task, self._start.world, self._flags
        self._strategy.broadcast_buffers()  # Collective.
        model, limit_s = self._strategy.module.eval(), world.section_timeout.total_seconds()
        totals = Totals(task.metrics, self._loader.sampler.num_batches, len(task.eval_set))
        reading, covered = self._loader.dataset.reading, Coverage(len(task.eval_set))
        for batch in self._start.watchdog.watch(self._loader, "evaluation", limit_s, limit_s, reading):
            batch = self._bad_samples.check(batch, "val")
            self._bad_samples.note(batch.counted, "val")
            covered.add(batch.counted)
            batch = batch.to(world.device)
            with self._start.precision.autocast():
                output = task.forward(model, batch)
            totals.add(batch.index, output, batch)
            flags.exchange()  # Collective, read one batch later.
            if is_stopped := flags.stop or flags.bad_sample:
                break
        flags.wait()  # Collective.
        if flags.bad_sample:
            self._bad_samples.stop(world)  # Collective; raises UserError (65) on every rank.
        return None if is_stopped else totals.values(world) | {"evaluated": covered.count(world)}  # Collective.


def build_strategy(start: Start, initial_weights: bool, trains: bool) -> tuple[Start, Strategy]:
    """The strategy with its model, and `start` in a precision that the model can compute in. Collective.

    trains: some blocks may be frozen, or compute their activations again.
    """
    config, world = start.config, start.world
    with seeded(derive_seed(config.run.seed, "initial weights")):
        model = start.task.build_model(initial_weights)  # Collective.
    kind = load_strategy(config.device.strategy)
    model = model if kind.is_split else model.to(world.device)
    if trains:
        if words := freeze(model, config.optim.freeze):
            start.run.note(words)
        checkpoint_activations(model, config.device)
        resolve_head(start, model)
    is_here = not kind.is_split or world.device.type == "cpu"  # else the strategy brings it to the devices, first
    if is_here:
        start = with_possible_precision(start, model, trains, initial_weights)  # Collective.
    strategy = kind(model, world, blocks_of, config.device)  # may shard it
    if not (is_here or strategy.is_sharded):  # no rank can try a forward that is collective
        start = with_possible_precision(start, strategy.module, trains, initial_weights)  # Collective.
    return start, strategy


def evaluate_only(start: Start) -> Exit:
    """--eval-only: one JSON line with the figures on standard output; writes nothing but --output. Collective."""
    # the weights
    config, world, run, task = start.config, start.world, start.run, start.task
    start, strategy = build_strategy(start, initial_weights=not run.is_there, trains=False)  # Collective.
    if config.device.compile:
        compile_model(strategy.module)
    progress, source = Progress(), f"the weights of {getattr(config.model, 'weights', None) or config.model.model}"
    if run.is_there:
        progress, is_average = Checkpoints(run, world, config.record).load_best(strategy)  # Collective.
        of_average = "the average of the weights in " if is_average else ""
        source = f"{of_average}the best checkpoint of {run.path}, at step {progress.step}"
    run.note(f"evaluating {source}")

    # where the figures go
    if output := config.run.output:
        world.on_rank_zero(lambda: require_writable(task, output))  # Collective.

    # their figures
    eval_batch = run.resolve("eval_batch_size", config.batch.eval_batch_size, lambda: EVAL_BATCH)
    bad_samples = BadSamples(config.data.bad_samples, None)
    flags = Agreement(world, stop=start.watchdog.wants_to_stop, bad_sample=bad_samples.has_stopped)
    values = Evaluation(start, strategy, eval_batch, bad_samples, flags).run()  # Collective.
    if values is None:  # a signal has just come, and ends the process
        return Exit.STOPPED
    if output:
        work = partial(write_output, task, progress.step, values, output)
        world.on_rank_zero(work, takes_long=True)  # Collective.
    if world.is_main:
        print(json_line(config.run.split, progress.position(len(task.train_set)) | values))
    return Exit.DONE
