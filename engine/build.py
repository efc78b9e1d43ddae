"""Opens a run, and builds what the training loop works with, once.

Tests: tests/distributed/test_world.py
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from data.left_out import require_named
from data.loader import BadSamples, build_loader, num_workers
from data.plan import BatchPlan
from data.sampler import ElasticDistributedSampler
from engine.attempts import try_training
from engine.best import best_metric
from engine.evaluation import Evaluation, build_strategy
from engine.feed import Feed, end_if_samples_changed
from engine.head import begin_with_features
from engine.length import begin_branch, num_steps
from engine.memory import resolve_size
from engine.records.log import Log, SilentLog
from engine.resolve import require_partners, resolve_arithmetic, resolve_eval_batch, resolve_optim, resolve_plan
from engine.start import Start
from engine.step import Outcome
from engine.training import Extra, Extras, Training
from models.blocks import lr_factors, undecayed
from models.tasks import load_task
from utils.distributed.agreement import Agreement
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.errors import UserError, counted
from utils.hardware.compiling import compile_model
from utils.numerics.averages import Averages
from utils.numerics.optimizers import build_optimizer, build_schedule
from utils.rundir.checkpoint import Checkpoints
from utils.rundir.clock import Clock
from utils.rundir.coverage import Coverage
from utils.rundir.digests import MOST, Digests
from utils.rundir.identity import weights_digest
from utils.rundir.run import open_run
from utils.rundir.starts import note_start
from utils.rundir.state import Progress, TrainState
from utils.settings.config import Config
from utils.settings.option import Interval
from utils.settings.run_options import OptimOptions


class Feeds(NamedTuple):
    """What brings samples to the training and its evaluations, and what the ranks agree on meanwhile."""

    feed: Feed
    evaluation: Evaluation
    flags: Agreement
    outcome: Outcome
    bad_samples: BadSamples
    clock: Clock


@contextmanager
def open_start(config: Config, world: World, watchdog: Watchdog, note: Callable[[str], None]) -> Iterator[Start]:
    """What a start of the run that `config` names has before there is a model. Collective.

    note: prints a line for the user; on rank 0 alone. Raises UserError on every rank.
    """
    on_device = "" if world.device.type == "cpu" else f" on {world.device}"
    with open_run(config, world, note) as run, watchdog.watch_run(  # Collective.
        lambda: f"step {run.progress.step}{on_device}" if run.progress else "starting", run.end):
        precision = resolve_arithmetic(config.device, run, world)  # Collective.
        task = load_task(config.run.task)(config, run, world)  # Collective.
        require_named(config.data, task.train_set)
        for text in task.notes:
            note(text)
        run.require_same_data(task.fingerprint, world)  # Collective.
        yield Start(config, world, run, task, precision, watchdog)


@contextmanager
def open_training(start: Start, extras: Sequence[Extra] = (),
                  kind: type[Checkpoints] = Checkpoints) -> Iterator[Training]:
    """What the loop works with, closed afterwards; its checkpoints are of this kind. Collective."""
    training = build_training(start, extras, kind)  # Collective.
    with closing(training.log), ExitStack() as stack:
        stack.callback(training.extras.closed, training)
        stack.enter_context(closing(training.checkpoints))  # closed before the extras: its thread may export a model
        yield training


def build_training(start: Start, extras: Sequence[Extra], kind: type[Checkpoints]) -> Training:
    """Build what the loop works with, and load the newest checkpoint. Collective."""
    # what learns
    config, world, run = start.config, start.world, start.run
    best_metric(start)  # raises UserError
    for extra in extras:
        extra.asked(start)  # Collective. Raises UserError
    if held := world.on_rank_zero(partial(weights_digest, config), takes_long=True):  # Collective.
        run.require_same("weights", held, f"what {getattr(config.model, 'weights', None) or config.model.model} holds")
    checkpoints = kind(run, world, config.record)
    is_new = checkpoints.is_empty()  # Collective.
    start, optim, state = build_state(start, is_new)  # Collective.
    strategy = state.strategy
    plan = _plan_that_fits(start, state, is_new)  # Collective.
    eval_batch = resolve_eval_batch(start, strategy, plan)
    total_steps = num_steps(run, plan, config.run.max_steps)
    begin_with_features(start, state, eval_batch, is_new, total_steps)  # Collective.
    run.follow(state)
    checkpoints.restore(state)  # Collective: loads the newest one, if there is any.
    begin_branch(run, state, config.run.early_stop_patience)
    note_start(config, run, world, state.progress.step)  # Collective.
    run.keep_resolved()
    checkpoints.follow(state, total_steps)  # Collective.
    if config.device.compile:
        compile_model(strategy.module)
    strategy.setup(plan.num_micro_batches)  # Collective: wraps the model in DistributedDataParallel, say.

    # what it learns from
    feeds = build_data(start, state, plan, eval_batch, checkpoints)  # Collective.

    # how long, and what is written down
    stop = config.run.stop_after or Interval(f"{sys.maxsize}")
    start.watchdog.stop_after(stop.seconds)
    log = build_log(start, state.progress, plan, optim, total_steps, checkpoints.records)
    return Training(
        **vars(start), **feeds._asdict(), log=log, strategy=strategy, state=state,
        schedule=build_schedule(optim, total_steps), checkpoints=checkpoints,
        extras=Extras(extras), total_steps=total_steps, last_step=min(total_steps, state.progress.step + stop.steps))


def build_state(start: Start, is_new: bool) -> tuple[Start, OptimOptions, TrainState]:
    """A new run's model, optimizer and averages; with the precision and the rates that it trains in. Collective.

    is_new: else a checkpoint will replace the weights. Raises UserError (64, 66) for what the settings do not allow.
    """
    start, strategy = build_strategy(start, is_new, trains=True)  # Collective.
    model, optim = strategy.module, resolve_optim(start)
    optimizer = build_optimizer(model, optim, lr_factors(model, optim.layer_decay, start.run.resolved.head_lr_factor),
                                undecayed(model))
    if optim.ema_decay and strategy.is_sharded:
        raise UserError(f"--ema-decay {optim.ema_decay}: this --strategy keeps no averages; use --strategy ddp, or"
                        " leave it out (the averages of a run that had them are lost then)")
    averages = Averages(strategy.model_state() if optim.ema_decay else {}, optim.ema_decay)
    sets = {"train": start.task.train_set, "val": start.task.eval_set}
    if max(map(len, sets.values())) > MOST:
        start.run.note(f"there are more than {MOST} samples, so it is not noticed if one of them changes")
    return start, optim, TrainState(
        strategy, optimizer, start.precision.scaler, averages=averages, coverage=Coverage(len(start.task.train_set)),
        digests={name: Digests(len(samples), samples.name) for name, samples in sets.items() if len(samples) <= MOST})


def build_data(start: Start, state: TrainState, plan: BatchPlan, eval_batch: int, checkpoints: Checkpoints) -> Feeds:
    """The samples, from the run's position on, if those that it used are what they were. Collective.

    The room on the disk is looked at first.
    """
    config, world, run, task = start.config, start.world, start.run, start.task
    clock = Clock(world.device, state.strategy.communication)
    bad_samples = BadSamples(config.data.bad_samples, run.path / "bad_samples.txt", state.digests)
    end_if_samples_changed(start, state, bad_samples)  # Collective.
    outcome = Outcome(state.strategy, start.precision)
    flags = Agreement(world, start.watchdog.wants_to_stop, checkpoints.is_due_by_clock, checkpoints.has_failed,
                      bad_samples.has_stopped, outcome.is_wrong)
    sampler = ElasticDistributedSampler(plan, world.rank, world.world_size, config.run.seed, task.lengths)
    checkpoints.warn_of_small_disk()
    loader = build_loader(task.train_set, task.collate, sampler, num_workers(config.data.workers, world), world)
    feed = Feed(start, loader, state.progress, bad_samples, clock)
    evaluation = Evaluation(start, state.strategy, eval_batch, bad_samples, flags)
    return Feeds(feed, evaluation, flags, outcome, bad_samples, clock)


def build_log(start: Start, done: Progress, plan: BatchPlan, optim: OptimOptions, total_steps: int,
              records: Mapping[str, Any]) -> Log | SilentLog:
    """The log from the position `done` on; it has said in words what this start trains. records: Checkpoints.records"""
    config, world, run, task = start.config, start.world, start.run, start.task
    log = Log(run.path, task, done, total_steps, records) if run.writes else SilentLog()
    log.note(f"{run.path}: {len(task.train_set)} training and {counted(len(task.eval_set), 'validation sample')},"
             f" {config.model.model} {task.origin}, {start.precision.name} on {_place(world)}"
             f"{', compiled' if config.device.compile else ''};"
             f" {counted(total_steps, 'step')} of {counted(plan.num_micro_batches, 'micro-batch')}, learning rate"
             f" {_rates(optim.lr, run.resolved.head_lr_factor)};"
             f" {f'resumed at step {done.step}' if done.step or records['bytes'] else 'a new run'}")
    log.show_settings(start)
    return log


def _place(world: World) -> str:
    """What the run computes on, in words."""
    each = len(world.devices)
    inside = f" in {counted(world.world_size, 'process')}" if each > 1 else ""
    return f"{world.world_size * each} x {world.device.type}{inside}"


def _rates(lr: float, head_lr_factor: float) -> str:
    """The learning rate, in words."""
    return f"{lr:g}" + (f" (head {lr * head_lr_factor:g})" if head_lr_factor != 1 else "")


def _plan_that_fits(start: Start, state: TrainState, is_new: bool) -> BatchPlan:
    """The plan of this run; if its micro-batches do not fit into memory and may change, a finer one. Collective."""
    strategy, world = state.strategy, start.world
    plan = resolve_plan(start, strategy)
    attempt = partial(try_training, start, strategy.module, optimizer=state.optimizer,
                      bytes_per_param=strategy.bytes_per_param)
    is_free = is_new and start.config.batch.micro_batch_size == "auto" and not strategy.is_invariant  # else bits differ
    start.watchdog.enter("looking for sizes that fit", start.config.faults.section_timeout)
    world.all_reduce_sum(torch.zeros((), device=world.device))  # Collective: allocates what collectives need, first
    largest = plan.sizes[1]
    if not strategy.is_sharded and (fit := resolve_size(largest, attempt, is_free, world)) < largest:  # Collective.
        plan = resolve_plan(start, strategy, fit)
    require_partners(start, strategy, plan)
    start.watchdog.enter("starting", math.inf)
    return plan
