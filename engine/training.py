"""What the training loop works with, built once. The loop itself: train.py."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from data.loader import BadSamples, build_loader, num_workers
from data.plan import BatchPlan
from data.sampler import ElasticDistributedSampler
from engine.evaluation import Evaluation, build_evaluation
from engine.feed import Feed
from engine.memory import Attempts, resolve_size
from engine.plan import resolve_eval_batch, resolve_plan
from models.tasks.base import Task
from utils.distributed.agreement import Agreement
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.numerics.optimizers import build_optimizer, build_schedule
from utils.numerics.precision import Precision
from utils.numerics.seed import derive_seed, seeded
from utils.rundir.checkpoint import Checkpoints, TrainState
from utils.rundir.log import Log, SilentLog, open_log
from utils.rundir.room import Room, warn_of_room
from utils.rundir.run import Run
from utils.rundir.throughput import Throughput
from utils.settings.config import Config
from utils.settings.option import Interval
from utils.strategies import load_strategy
from utils.strategies.base import Strategy


@dataclass(frozen=True)
class Training:
    """What the loop works with; one name for each concern. All that changes while it runs is in `state`.

    A reader of train.py needs this list alone: everything that a step touches is reached from here by name.
    """

    config: Config
    world: World
    run: Run
    log: Log | SilentLog
    task: Task
    strategy: Strategy
    precision: Precision
    state: TrainState
    schedule: Callable[[int], float]  # the learning rate of an optimizer step
    feed: Feed
    evaluation: Evaluation
    checkpoints: Checkpoints
    flags: Agreement
    watchdog: Watchdog
    bad_samples: BadSamples
    attempts: Attempts
    throughput: Throughput
    total_steps: int  # of the run
    last_step: int  # of this start: total_steps, or earlier by --stop-after


def build_training(
    config: Config, task: Task, precision: Precision, run: Run, watchdog: Watchdog, world: World
) -> Training:
    """Build what the loop works with, and load the newest checkpoint. Collective."""
    # model and optimizer
    checkpoints = Checkpoints(run.path / "checkpoints", world, config.record, run.start, run.note)
    is_new = checkpoints.is_empty()  # Collective.
    with seeded(derive_seed(config.run.seed, "initial weights")):
        model = task.build_model(initial_weights=is_new).to(world.device)  # Collective.
    strategy = load_strategy(config.device.strategy)(model, world)  # may shard the model
    optimizer = build_optimizer(model, config.optim)

    # micro-batches that fit into memory
    attempts = Attempts(task, model, optimizer, precision, strategy.bytes_per_param, world.device)
    plan = _plan_that_fits(config, task, strategy, attempts, is_new, run, watchdog, world)  # Collective.
    eval_batch = resolve_eval_batch(config.batch, plan, run)
    _note_idle_cores(config, strategy, plan, run, world)

    # state: new, or that of the newest checkpoint
    state = TrainState(strategy, optimizer, precision.scaler)
    run.follow(state)
    is_resumed = checkpoints.restore(state)  # Collective.
    run.keep_resolved()
    if config.device.compile:
        model.compile()
    strategy.setup(plan.num_micro_batches)  # Collective: wraps the model in DistributedDataParallel, say.

    # data
    throughput = Throughput(world.device)
    bad_samples = BadSamples(config.data.bad_samples, run.path / "bad_samples.txt")
    flags = Agreement(world, watchdog.wants_to_stop, checkpoints.is_due_by_clock, checkpoints.has_failed,
                      bad_samples.has_stopped)
    sampler = ElasticDistributedSampler(plan, world.rank, world.world_size, config.run.seed, task.lengths)
    workers = num_workers(config.data.workers, world)
    item_bytes = task.example(plan.sizes[1]).nbytes + task.example(eval_batch).nbytes  # both pools read ahead
    weight_bytes = sum(param.nbytes for param in model.parameters())
    warn_of_room(Room(weight_bytes, config.record.keep, item_bytes, workers), run, world)  # Collective.
    loader = build_loader(task.train_set, task.collate, sampler, workers, world)
    feed = Feed(task, loader, state.progress, config.run.epochs - state.progress.epoch, bad_samples, throughput,
                watchdog, config.faults, config.device.compile)
    evaluation = build_evaluation(
        config, task, strategy, precision, eval_batch, bad_samples, flags, watchdog, world)

    # length, log
    done = state.progress
    total_steps = min(config.run.epochs * plan.steps_per_epoch, config.run.max_steps or sys.maxsize)
    stop = config.run.stop_after or Interval(f"{sys.maxsize}")
    watchdog.stop_after(stop.seconds)
    log = open_log(run, task, done, total_steps, config.record.ledger)
    log.note(f"{run.path}: {len(task.train_set)} training and {len(task.eval_set)} validation samples,"
             f" {config.model.model}, {precision.name} on {world.world_size} x {world.device.type}; {total_steps} steps"
             f" of {plan.num_micro_batches} micro-batches;"
             f" {f'resumed at step {done.step}' if is_resumed else 'a new run'}")
    return Training(
        config, world, run, log, task, strategy, precision, state, build_schedule(config.optim, total_steps), feed,
        evaluation, checkpoints, flags, watchdog, bad_samples, attempts, throughput, total_steps,
        last_step=min(total_steps, done.step + stop.steps))


def _plan_that_fits(config: Config, task: Task, strategy: Strategy, attempts: Attempts, is_new: bool, run: Run,
                    watchdog: Watchdog, world: World) -> BatchPlan:
    """The plan of this run; where its micro-batches do not fit into memory and may change, a finer one. Collective."""
    resolve = partial(resolve_plan, config.batch, len(task.train_set), strategy, run, world)
    plan = resolve()
    is_auto = config.batch.micro_batch_size == "auto"
    is_free = is_auto and is_new and not strategy.is_invariant  # else bits depend on it
    watchdog.enter("looking for sizes that fit", config.faults.start_timeout)
    world.all_reduce_sum(torch.zeros((), device=world.device))  # Collective: allocates what collectives need, first
    if (fit := resolve_size(plan.sizes[1], attempts, is_free, world)) < plan.sizes[1]:  # Collective.
        plan = resolve(fit)
    watchdog.enter("starting", math.inf)
    return plan


def _note_idle_cores(config: Config, strategy: Strategy, plan: BatchPlan, run: Run, world: World) -> None:
    useful = min(plan.num_micro_batches, world.world_size * run.cores_per_process)
    if strategy.is_invariant and run.start == 1 and run.kept["threads"] == 1 and useful > world.world_size:
        run.note(f"--strategy {config.device.strategy} computes with one thread per process, whatever their number:"
                 f" {useful} processes use the cores")
