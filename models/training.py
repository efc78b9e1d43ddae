"""What the training loop works with: built once, warmed up, its numbers checked, its steps recorded. The loop itself: train.py."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader

from data.loader import BadSamples, build_loader, num_workers
from data.sampler import BatchPlan, ElasticDistributedSampler, EvaluationSampler, settle_eval_batch, settle_plan
from models.feed import Feed
from models.memory import Attempts, largest_fit, settle_size, way_out
from models.tasks.base import Batch, Task
from utils.checkpoint import Checkpoints, Progress, TrainState
from utils.config import Config, duration_or_steps
from utils.devices import Arriving
from utils.distributed import Agreement, World
from utils.errors import Exit, RankError, UserError, some
from utils.log import Log, SilentLog, figure, last_record, open_log
from utils.nonfinite import nonfinite_samples
from utils.optim import build_optimizer, build_schedule
from utils.parallel import load_strategy
from utils.parallel.base import Strategy
from utils.precision import Precision
from utils.preflight import warn_of_room
from utils.run import Run, command
from utils.seed import derive_seed, seed_micro_batch, seeded
from utils.throughput import Throughput
from utils.watchdog import Watchdog


@dataclass(frozen=True)
class Training:
    """What the loop works with; built once."""

    config: Config
    world: World
    run: Run
    log: Log | SilentLog
    task: Task
    plan: BatchPlan
    strategy: Strategy
    precision: Precision
    state: TrainState
    checkpoints: Checkpoints
    agreement: Agreement
    watchdog: Watchdog
    attempts: Attempts
    bad_samples: BadSamples
    throughput: Throughput
    feed: Feed
    eval_loader: DataLoader
    schedule: Callable[[int], float]
    first_step: int  # of this start: steps that were done before it
    total_steps: int  # of the run
    last_step: int  # of this start: total_steps, or earlier by --stop-after


def prepare(config: Config, task: Task, precision: Precision, run: Run, watchdog: Watchdog, world: World) -> Training:
    """Build what the loop works with, and load the newest checkpoint. Collective."""
    checkpoints = Checkpoints(run.path / "checkpoints", world, config.record, run.start, run.note)
    is_new = checkpoints.are_none()  # Collective.
    with seeded(derive_seed(config.run.seed, "initial weights")):
        model = task.build_model(initial_weights=is_new).to(world.device)  # Collective.
    strategy_class = load_strategy(config.device.strategy)
    optimizer = build_optimizer(model, config.optim)
    settle = partial(settle_plan, config.batch, len(task.train_set), model, strategy_class.is_invariant, run, world)
    attempts = Attempts(task, model, optimizer, precision, strategy_class, world.device)
    plan, is_auto = settle(), config.batch.micro_batch_size == "auto"
    is_free = is_auto and is_new and not strategy_class.is_invariant  # else the size decides about bits
    watchdog.expect("looking for sizes that fit", config.faults.start_timeout)
    world.all_reduce_sum(torch.zeros((), device=world.device))  # Collective: it allocates what collectives need, first
    if (fit := settle_size(plan.sizes[1], attempts, is_free, world)) < plan.sizes[1]:  # Collective.
        plan = settle(fit)
    watchdog.expect("starting", math.inf)
    eval_batch = settle_eval_batch(config.batch, plan, run)
    strategy = strategy_class(model, world, plan.num_micro_batches)
    useful = min(plan.num_micro_batches, world.world_size * run.cores_per_process)
    if strategy_class.is_invariant and run.start == 1 and run.kept["threads"] == 1 and useful > world.world_size:
        run.note(f"--strategy {config.device.strategy} computes with one thread per process, whatever their number:"
                 f" {useful} processes use the cores")
    state = TrainState(strategy, optimizer, precision.scaler)
    run.where = lambda: state.progress
    watchdog.where = lambda: f"step {state.progress.step}{'' if world.device.type == 'cpu' else f' on {world.device}'}"
    is_resumed = checkpoints.restore(state)  # Collective.
    run.keep_settled()
    if config.device.compile:
        model.compile()
    strategy.setup()  # Collective: wraps the model in DistributedDataParallel, say.

    sampler = ElasticDistributedSampler(plan, world.rank, world.world_size, config.run.seed, task.lengths)
    eval_sampler = EvaluationSampler(len(task.eval_set), eval_batch, world.rank, world.world_size)
    workers = num_workers(config.data.workers, world)
    item_bytes = task.example(plan.sizes[1]).nbytes + task.example(eval_batch).nbytes  # both pools of processes read ahead
    warn_of_room(run.path, sum(weight.nbytes for weight in model.parameters()), config.record.keep, item_bytes, workers, world, run.note)
    done = state.progress
    total_steps = min(config.run.epochs * plan.steps_per_epoch, config.run.max_steps or sys.maxsize)
    stop_steps, stop_s = duration_or_steps("stop_after", config.run.stop_after or f"{sys.maxsize}")
    watchdog.stop_after(stop_s or math.inf)
    log = open_log(run.path, world.is_main, done.step, done.evaluated_step, total_steps, task.unit, config.record.ledger)
    log.note(f"{run.path}: {len(task.train_set)} training and {len(task.eval_set)} validation samples, {config.model.model},"
             f" {precision.name} on {world.world_size} x {world.device.type}; {total_steps} steps of {plan.num_micro_batches}"
             f" micro-batches; {f'resumed at step {done.step}' if is_resumed else 'a new run'}")
    throughput = Throughput(world.device)
    train_loader = build_loader(task.train_set, task.collate, sampler, workers, world)
    return Training(
        config, world, run, log, task, plan, strategy, precision, state, checkpoints, Agreement(world), watchdog, attempts,
        bad_samples=BadSamples(config.data.bad_samples, run.path / "bad_samples.txt"),
        throughput=throughput,
        feed=Feed(task, train_loader, done, config.run.epochs - done.epoch, throughput, watchdog, config.faults, config.device.compile),
        eval_loader=build_loader(task.eval_set, task.collate, eval_sampler, workers, world),
        schedule=build_schedule(config.optim, total_steps),
        first_step=done.step,
        total_steps=total_steps,
        last_step=min(total_steps, done.step + stop_steps) if stop_steps else total_steps)


def warm_up(t: Training) -> None:
    """One throw-away step of the largest micro-batch and one evaluation batch, before the first step of a start. Collective.

    It freezes parameters that get no gradient, on all ranks alike; it lets DDP lay out its buckets anew, which it does after the
    first backward (gloo's sums depend on offsets: a resumed run would differ in bits); it allocates what the optimizer keeps;
    and memory runs out here, if it does.
    """
    module = t.strategy.module
    if t.strategy.model is not module and skips_layers(module):
        raise UserError(f"--model {t.config.model.model} skips layers at random (layerdrop in its config.json), and"
                        " DistributedDataParallel cannot sum what is left over several processes: use --strategy exact, or one process,"
                        " or a layerdrop of 0")
    while True:
        module.train()
        for batch in t.strategy.share([t.task.example(t.plan.sizes[1])], 1, t.precision.scale):
            seed_micro_batch(t.config.run.seed, 0, 0, t.world.device)
            with t.precision.autocast():
                output = t.task.forward(t.strategy.model, batch.to(t.world.device))
            (output.loss_sum / len(batch.weight) * t.precision.scale).backward()
        t.precision.void_step(t.state.optimizer)
        without = {name: param for name, param in module.named_parameters() if param.requires_grad and param.grad is None}
        t.state.optimizer.zero_grad(set_to_none=True)
        module.eval()
        if not without or not (unused := names_unused(t, without)):
            break
        t.log.note(f"{len(unused)} parameters get no gradient and are frozen: {some(unused)}")
        for name in unused:
            without[name].requires_grad_(False)
        t.strategy.setup()
    t.strategy.expect_all()
    with torch.no_grad(), t.precision.autocast():
        t.task.forward(module, t.task.example(t.eval_loader.sampler.batch_size).to(t.world.device))


def names_unused(t: Training, without: dict[str, nn.Parameter]) -> list[str]:
    """Of parameters that got no gradient in training mode, those that get none in evaluation mode either: no layer is skipped there."""
    with t.precision.autocast():
        output = t.task.forward(t.strategy.module, t.task.example(t.plan.sizes[1]).to(t.world.device))
    gradients = torch.autograd.grad(output.loss_sum, list(without.values()), allow_unused=True)
    return [name for name, gradient in zip(without, gradients, strict=True) if gradient is None]


def skips_layers(module: nn.Module) -> bool:
    """Whether a transformers model leaves out layers at random in training: a layerdrop above 0 in its config."""
    config = getattr(module, "config", None)
    return config is not None and any(name.endswith("layerdrop") and value for name, value in vars(config).items())


def memory_error(lack: str, t: Training) -> RankError:
    """The error (64) of a rank whose device ran out of memory: which checkpoint stands, and a size that fits now.

    lack: what lack_of_memory returned.
    """
    t.watchdog.expect("looking for a size that fits", t.config.faults.section_timeout)
    flag, attempt, size = ("--micro-batch-size", t.attempts.train, t.plan.sizes[1]) if t.strategy.module.training else (
        "--eval-batch-size", t.attempts.evaluate, t.eval_loader.sampler.batch_size)
    t.state.optimizer.zero_grad(set_to_none=True)
    t.attempts.bytes_per_weight = 0  # the strategy has its sums
    fit, _ = largest_fit(attempt, size // 2)
    t.checkpoints.close()  # the save under way
    step = t.checkpoints.newest_step()
    saved = "nothing is saved yet" if step is None else f"the checkpoint of step {step} stands"
    return RankError(f"out of memory on {t.world.device} of rank {t.world.rank} at step {t.state.progress.step} ({lack});"
                     f" {saved}; {way_out(flag, fit)}")


def wait_for_save(t: Training) -> None:
    """Wait until what was saved is on disk. Collective."""
    t.watchdog.expect("waiting for the save", t.checkpoints.limit_s, drains=False)
    t.checkpoints.flush()  # Collective.


def check_last_step(t: Training) -> None:
    """See that the last step's gradient was finite; if not, the step has changed nothing, and the run ends with 80.

    The host asks one step late, so that no device waits for it. Where an unreadable sample made the step void, the run ends as
    it was before it, saved (65). Collective where the gradient was not finite.
    """
    if t.agreement.bad_sample:
        t.state.progress = t.precision.undo()
        t.watchdog.expect("saving", t.checkpoints.limit_s, drains=False)
        t.checkpoints.save(t.state, lambda weights: t.log.flush())  # Collective.
        wait_for_save(t)  # Collective.
        t.bad_samples.stop(t.world)  # Collective.
    if (at := t.precision.take_nonfinite()) is None:
        return
    t.watchdog.expect("looking for what is not finite", t.config.faults.section_timeout)
    named = {rank: names for rank, names in enumerate(t.world.gather(nonfinite_names(t, at))) if names}  # Collective.
    t.state.progress = progress = replace(t.state.progress, skipped=t.state.progress.skipped + 1)
    found = (f"the gradient of optimizer step {at.step + 1} is not finite (under exact: or beyond 2^12 / micro-batches); it comes from "
             + ("; ".join(f"rank {rank}, {some(names)}" for rank, names in named.items()) or "the sum, and from no one sample"))
    if progress.skipped > t.config.faults.max_nonfinite:
        raise UserError(f"{found}; the training diverged: weights and checkpoints are as they were before it; use a smaller --lr,"
                        " --max-grad-norm 1, or --precision fp32, or go over a few such steps with --max-nonfinite", Exit.DIVERGED)
    t.log.note(f"{found}; the step changed nothing (--max-nonfinite: {progress.skipped} of {t.config.faults.max_nonfinite})")


def nonfinite_names(t: Training, at: Progress) -> list[str]:
    """The samples, among this rank's share of the step at `at`, that make its gradient non-finite. Computes the share anew."""
    sampler, samples = t.feed.sampler, t.feed.samples
    global_weight = t.task.weight(sampler.indices(at.epoch, at.sample_offset))
    share = [sampler.micro_batch(at.epoch, at.sample_offset, number) for number in sampler.share]

    def loss_of(batch: Batch) -> torch.Tensor:
        seed_micro_batch(t.config.run.seed, at.step, batch.number, t.world.device)
        with t.precision.autocast():
            return t.task.forward(t.strategy.module, batch.to(t.world.device)).loss_sum / global_weight

    found = nonfinite_samples(t.strategy.module, map(samples.__getitem__, share), loss_of,
                              lambda index: samples.collated(at.epoch, [index]), t.strategy.largest)
    is_all = len(found) == sum(len(wanted.indices) for wanted in share if not wanted.is_stand_in) > 0
    return ["all its samples"] if is_all else [f"sample {index} ({samples.name(index)})" for index in found]


def record_samples(t: Training, epoch: int, consumed: list[tuple[int, tuple[int, ...]]]) -> None:
    """--ledger: the samples that the last step was computed from. consumed: (number, indices) of this rank's micro-batches. Collective."""
    rows = [row for rank in t.world.gather(consumed) for row in rank]  # Collective.
    t.log.consumed(t.state.progress.step, epoch, [indices for _, indices in sorted(rows)])


def record_step(t: Training, losses: torch.Tensor, grad_norm: torch.Tensor) -> None:
    """One train record: figures of that step over all ranks, pure functions of the position, and timings. Collective."""
    losses, grad_norm = Arriving(losses, grad_norm).wait()  # one wait for the device
    table = torch.cat([losses, torch.tensor([t.throughput.wait_s / t.world.world_size], dtype=torch.float64)])
    *by_number, wait_s = t.world.all_reduce_sum(table).tolist()  # one owner per row, zeros elsewhere; added in the order of v
    figures = {"loss": sum(by_number), "grad_norm": float(grad_norm), "lr": t.schedule(t.state.progress.step - 1)}
    t.log.train(position(t.state.progress, t.plan.num_samples) | figures | t.throughput.record(wait_s))


def position(progress: Progress, num_samples: int) -> dict[str, float]:
    """Where in the run a record stands."""
    samples = progress.epoch * num_samples + progress.sample_offset
    return {"step": progress.step, "epoch": samples / num_samples, "samples": samples}


def close_run(t: Training) -> None:
    """The end of a finished run, on rank 0: RUN/summary.json, and what to do next."""
    best = t.state.best
    summary = last_record(t.run.path, "val") | {"best": best}
    t.run.write_json("summary.json", summary)
    shown = partial(figure, best["metric"])
    baselines = ", ".join(f"{name} {shown(value)}" for name, value in t.task.baselines().items())
    t.bad_samples.report(t.log.note)
    t.log.note(t.checkpoints.cost())
    steps = {"the run": t.run.path, "its curves": f"{command('tensorboard')} --logdir {t.run.path}",
             **t.task.next_steps(str(t.run.path), command("python"))}
    t.log.note(f"""
{best["metric"]} {shown(summary[best["metric"]])} on the validation set (best {shown(best["value"])}, at step {best["step"]});
for comparison: {baselines}
""" + "\n".join(f"{what:<15} {how}" for what, how in steps.items()))
    t.run.status("finished", Exit.DONE, f"{best['metric']} {best['value']:.4f} at step {best['step']}")
