"""Train a model on one process or many; kill it, and the same command continues it.

    python train.py                                              # the built-in digits
    torchrun --standalone --nproc-per-node=4 train.py            # the same run, on four processes
    torchrun ... train.py --data DIR --model resnet50 --pretrained
    python train.py --help                                       # --task T --help: the settings of task T

What a run guarantees, on any number of processes: every sample is trained on once per epoch and evaluated once; gradients,
BatchNorm statistics, dropout and augmentation do not depend on the number; a run that was stopped or killed ends with the
weights of one that was not (same number of processes; any number with --strategy exact).

Measured on two CPU cores (torch 2.15, n=1): the digits 99.4 % in 8 epochs (fp32); ResNet-18 from scratch on 10,000 of CIFAR-10's
images 65.3 % in 10 epochs, 158 s (AVX512-BF16, bf16); `exact` costs 1.07 times `ddp` at 224 px (docs/design.md).
"""

import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from utils.errors import Exit, begin_start, exit_after, say
from utils.watchdog import Watchdog

if __name__ == "__main__":
    begin_start()
    WATCHDOG = Watchdog()  # first of all: signals are its business from here on

from utils.preflight import require_packages

if __name__ == "__main__":
    require_packages()

from data import demo
from utils.command_line import parse_command_line
from utils.config import Config
from utils.start import early_device, finish_early

if __name__ == "__main__":  # before torch is imported: --help, typing errors and finished runs answer in a moment
    CONFIG = parse_command_line(sys.argv[1:], demo.SETTINGS)
    finish_early(CONFIG)

import torch
from torch.utils.data import DataLoader

from data.loader import BadSamples, build_loader, num_workers
from data.sampler import FORMER_EVAL_BATCH, EvaluationSampler
from models.memory import lack_of_memory
from models.tasks import load_task
from models.tasks.base import Task
from models.training import (
    Training,
    check_last_step,
    close_run,
    memory_error,
    position,
    prepare,
    record_samples,
    record_step,
    wait_for_save,
    warm_up,
)
from utils.checkpoint import Checkpoints
from utils.distributed import Agreement, World, write_flight_record
from utils.identity import require_same_program
from utils.log import json_line
from utils.metrics import Totals
from utils.optim import set_lr
from utils.parallel import load_strategy
from utils.parallel.base import Strategy
from utils.precision import Precision, settle_arithmetic
from utils.run import Run, open_run
from utils.seed import seed_micro_batch


def main(config: Config, watchdog: Watchdog) -> Exit:
    """Train, or evaluate, as `config` says. Collective."""
    console = sys.stderr if config.run.eval_only else sys.stdout
    with World.from_env(early_device(config), config.faults, watchdog) as world:  # Collective. Leaving it ends the process group.
        require_same_program(config, world)  # Collective.
        note = partial(say, stream=console) if world.is_main else lambda text: None
        with open_run(config, world, note) as run, watchdog.telling_peers():  # Collective.
            watchdog.at_end = run.status
            precision = settle_arithmetic(config.device, run, world)  # Collective.
            task = load_task(config.run.task)(config, run, world)  # Collective.
            for text in task.notes:
                note(text)
            world.require_same(task.fingerprint, "the data set")  # Collective.
            run.require_same("data", task.fingerprint, "the data set")
            if config.run.eval_only:
                return evaluate_only(config, task, precision, run, watchdog, world)
            watchdog.write_flight_record = partial(write_flight_record, run.path / "flight-record", world.rank)
            training = prepare(config, task, precision, run, watchdog, world)
            codes: list[Exit] = []
            with closing(training.log), closing(training.checkpoints):
                if lack := lack_of_memory(lambda: codes.append(train(training))):
                    raise memory_error(lack, training)
            return codes[0]


def train(t: Training) -> Exit:
    """The run from where it is to its end, or to a stop: 75. Collective."""
    t.watchdog.expect("the first step", t.config.faults.start_timeout)
    warm_up(t)  # Collective.
    t.watchdog.is_stoppable = False  # from here on there is something to save
    if is_evaluation_due(t):  # it was when the last start ended
        evaluate_and_save(t)  # Collective.
    while not t.agreement.stop and t.state.progress.step < t.last_step:
        train_one_epoch(t)  # Collective.
    t.agreement.wait()  # Collective.
    progress = t.state.progress
    if progress.step < t.total_steps or progress.evaluated_step < progress.step:
        save(t)  # Collective.
        wait_for_save(t)  # Collective.
        t.bad_samples.report(t.log.note)
        reason = next(filter(None, t.world.gather(t.watchdog.reason)), "--stop-after")  # Collective.
        t.log.note(f"stopped at step {progress.step} ({reason}) and saved; the same command continues ({t.checkpoints.cost()})")
        t.run.status("stopped", Exit.STOPPED, reason)
        return Exit.STOPPED
    wait_for_save(t)  # Collective.
    t.world.once(lambda: close_run(t))  # Collective.
    return Exit.DONE


def train_one_epoch(t: Training) -> None:
    """The rest of the current epoch, from the exact sample; leaves early on an agreed stop. Collective."""
    optimizer, epoch = t.state.optimizer, t.state.progress.epoch
    t.throughput.restart()
    t.strategy.module.train()
    for batch in t.feed.rest_of_epoch(t.state.progress):  # one global batch = one optimizer step
        step = t.state.progress.step
        set_lr(optimizer, t.schedule(step))
        losses, consumed = torch.zeros(t.plan.num_micro_batches, dtype=torch.float64, device=t.world.device), []
        # This rank's micro-batches; gradients are summed over ranks with the last one.
        for micro_batch in t.strategy.share(batch.micro_batches, batch.num_micro_batches, t.precision.scale):
            micro_batch = t.bad_samples.check(micro_batch)
            seed_micro_batch(t.config.run.seed, step, micro_batch.number, t.world.device)  # whoever computes it
            with t.precision.autocast():
                output = t.task.forward(t.strategy.model, micro_batch.to(t.world.device))
            losses[micro_batch.number] = output.loss_sum.detach().double() / batch.weight
            (output.loss_sum / batch.weight * t.precision.scale).backward()
            consumed.append((micro_batch.number, micro_batch.indices))
        agreed = t.agreement.exchange(  # Collective; what was said one step ago
            t.watchdog.wants_to_stop(), t.checkpoints.is_due_by_clock(), t.checkpoints.has_failed(), bool(t.bad_samples.stopped_by))
        t.precision.unscale_(optimizer)
        grad_norm = t.strategy.clip_grad_norm_(t.config.optim.max_grad_norm)
        check_last_step(t)  # Collective where it was not finite.
        is_finite = t.precision.step(optimizer, t.state.progress, grad_norm)
        t.strategy.settle_buffers(is_finite)
        optimizer.zero_grad(set_to_none=True)

        t.state.progress = progress = t.state.progress.advanced(batch.end, t.plan.num_samples)
        t.throughput.step(batch.num_samples, batch.num_tokens)
        t.log.advance(progress.step)
        if t.config.record.ledger:
            record_samples(t, epoch, consumed)  # Collective.
        if progress.step in (1, t.total_steps) or progress.step % t.config.record.log_every == 0:
            record_step(t, losses, grad_norm)  # Collective.
        is_last = progress.step == t.last_step
        is_due, is_save_due = is_evaluation_due(t), agreed.save or t.checkpoints.is_due(progress.step)
        if is_due or is_save_due or is_last or t.agreement.stop:
            t.agreement.wait()  # Collective: nobody may be ahead of a stop that another rank knows of
            check_last_step(t)  # Collective where it was not finite.
        if t.agreement.error:
            t.checkpoints.flush()  # Collective; raises the error of the last save on every rank
        if (t.agreement.stop or is_last) and progress.step < t.total_steps:
            return
        if is_due:
            evaluate_and_save(t)  # Collective.
            t.strategy.module.train()
        elif is_save_due:
            save(t)  # Collective.
        if t.agreement.stop or is_last:
            return


def is_evaluation_due(t: Training) -> bool:
    """Whether the position that the run is at calls for an evaluation that has not been done."""
    progress, every = t.state.progress, t.config.record.eval_every
    is_boundary = progress.sample_offset == 0 if every == "epoch" else progress.step % every == 0
    return progress.evaluated_step < progress.step and (is_boundary or progress.step == t.total_steps)


def evaluate_and_save(t: Training) -> None:
    """Save; evaluate; keep the model if it is the best; save again. Collective.

    A stop abandons the evaluation: the next start does it first.
    """
    save(t, is_evaluated=False)  # Collective.
    wait_for_save(t)  # Collective: whatever ends the evaluation, the training is not lost; and it forks while no thread writes
    values = evaluate(t.task, t.strategy, t.precision, t.eval_loader, t.bad_samples, t.agreement, t.watchdog, t.world)
    if values is None:
        return
    progress, best = t.state.progress, t.state.best
    confusion = values.pop("confusion", None)
    t.log.evaluation(position(progress, t.plan.num_samples) | values, confusion, t.task.classes)
    t.state.progress = replace(progress, evaluated_step=progress.step)
    value = values[t.task.best]
    is_best = not best or (value > best["value"] if t.task.best_is_high else value < best["value"])
    if is_best:
        t.state.best = {"step": progress.step, "metric": t.task.best, "value": value}
    save(t, is_best)  # Collective.


def save(t: Training, is_best: bool = False, is_evaluated: bool = True) -> None:
    """Start to save. What the checkpoint tells of reaches the disk before it: the records, RUN/model if it is the best. Collective.

    is_evaluated: False before an evaluation; the save after it takes the place of this one.
    """

    def beside(weights: dict[str, torch.Tensor]) -> None:
        t.log.flush()
        if is_best:
            t.run.replace_folder("model", lambda folder: t.task.save_model(weights, folder))

    t.watchdog.expect("saving", t.checkpoints.limit_s, drains=False)
    t.checkpoints.save(t.state, beside, is_evaluated)
    t.throughput.restart()


@torch.no_grad()
def evaluate(task: Task, strategy: Strategy, precision: Precision, loader: DataLoader, bad_samples: BadSamples, agreement: Agreement,
             watchdog: Watchdog, world: World) -> dict[str, Any] | None:
    """The task's metrics, every sample once, the same digits on any number of processes; None if a stop was agreed. Collective."""
    strategy.broadcast_buffers()
    model = strategy.module.eval()
    totals, limit_s = Totals(task.metrics, loader.sampler.num_batches), world.section_timeout.total_seconds()
    for batch in watchdog.each(loader, "evaluation", limit_s, limit_s, loader.dataset.reading):
        batch = bad_samples.check(batch).to(world.device)
        with precision.autocast():
            output = task.forward(model, batch)
        totals.add(batch.number, output, batch)
        agreement.exchange(watchdog.wants_to_stop(), bad_sample=bool(bad_samples.stopped_by))
        if is_stopped := agreement.stop or agreement.bad_sample:
            break
    agreement.wait()
    if agreement.bad_sample:
        bad_samples.stop(world)  # Collective; raises UserError (65) on every rank
    return None if is_stopped else totals.values(world)


def evaluate_only(config: Config, task: Task, precision: Precision, run: Run, watchdog: Watchdog, world: World) -> Exit:
    """--eval-only: one JSON line with the best checkpoint's figures on standard output; writes nothing. Collective."""
    model = task.build_model(initial_weights=False).to(world.device)
    if config.device.compile:
        model.compile()
    strategy = load_strategy("ddp")(model, world, 1)
    checkpoints = Checkpoints(run.path / "checkpoints", world, config.record, run.start, run.note)
    progress = checkpoints.load_best(strategy)  # Collective.
    eval_batch = run.settle("eval_batch_size", config.batch.eval_batch_size, lambda: FORMER_EVAL_BATCH)
    sampler = EvaluationSampler(len(task.eval_set), eval_batch, world.rank, world.world_size)
    loader = build_loader(task.eval_set, task.collate, sampler, num_workers(config.data.workers, world), world)
    bad_samples = BadSamples(config.data.bad_samples, None)
    values = evaluate(task, strategy, precision, loader, bad_samples, Agreement(world), watchdog, world)  # Collective.
    if values is None:  # a signal has just come, and ends the process
        return Exit.STOPPED
    values.pop("confusion", None)
    if world.is_main:
        print(json_line(config.run.split, position(progress, len(task.train_set)) | values))
    return Exit.DONE


if __name__ == "__main__":
    exit_after(partial(main, CONFIG, WATCHDOG))
