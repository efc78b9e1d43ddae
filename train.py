"""Train a model on one process or many; kill it, and the same command continues it.

    python train.py                                              # the built-in digits
    torchrun --standalone --nproc-per-node=4 train.py            # the same run, on four processes
    torchrun ... train.py --data DIR --model resnet50 --pretrained
    python train.py --help                                       # --task T --help: the settings of task T

What a run guarantees, on any number of processes: every sample is trained on once per epoch and evaluated once. With
the same micro-batches, dropout, augmentation and BatchNorm see the same samples, and gradients agree up to rounding
(--strategy exact: bit for bit). A run that was stopped or killed ends with the weights of one that was not (ddp: on the
same number of processes; exact: on any number). Measured figures: docs/.

"Collective." means: every rank must make this call, in the same order as the others.
"""

import sys
from functools import partial
from importlib import import_module
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)] * sys.flags.safe_path  # which PYTHONSAFEPATH leaves out

import extras
from engine.begin import begin

if __name__ == "__main__":  # before torch is imported: --help, typing errors and finished runs answer at once
    CONFIG, WATCHDOG = begin(sys.argv[1:], extras.pages)

import torch
from torch import Tensor

from data.batch import GlobalBatch
from engine.after_step import after_step, evaluate_and_save
from engine.build import open_start, open_training
from engine.due import is_finished, what_is_due
from engine.evaluation import evaluate_only
from engine.memory import naming_a_smaller_size
from engine.records.steps import close_run, log_step
from engine.saving import save, wait_for_save
from engine.step import forward
from engine.training import Training
from engine.warm_up import warm_up
from engine.wrong import end_if_wrong
from utils.distributed.watchdog import Watchdog
from utils.distributed.world import World
from utils.errors import Exit, exit_after, say
from utils.numerics.optimizers import set_lr
from utils.rundir.identity import require_same_program
from utils.rundir.restart import device_of_run, words_if_finished
from utils.settings.config import Config
from utils.strategies import devices_per_process


def main(config: Config, watchdog: Watchdog) -> Exit:
    """Train, evaluate, or do what an extra does instead, as `config` says. Collective."""
    console = sys.stderr if config.run.eval_only else sys.stdout
    devices = devices_per_process(config.device)
    with World.from_env(device_of_run(config), config.faults, watchdog, devices) as world:  # Collective.
        require_same_program(config, world)  # Collective.
        note = partial(say, stream=console) if world.is_main else lambda text: None
        if words := world.on_rank_zero(partial(words_if_finished, config)):  # Collective.
            note(words)
            return Exit.DONE
        if config.mode:  # an extra that takes the place of a training: --check
            return import_module(config.mode).run(config, world, watchdog, train_one_epoch)  # Collective.
        with open_start(config, world, watchdog, note) as start:  # Collective.
            if config.run.eval_only:
                return evaluate_only(start)  # Collective.
            with open_training(start, extras.build()) as training:  # Collective.
                return naming_a_smaller_size(train, training)  # Collective. train(), with a way out if memory ends


def train(t: Training) -> Exit:
    """Train from the run's position to its end, or to a stop (exit code 75). Collective."""
    t.watchdog.enter("the first step", t.config.faults.section_timeout)
    warm_up(t)  # Collective. A step that changes nothing
    t.extras.opened(t)  # Collective.
    t.watchdog.save_on_stop()  # from here on there is something to save
    if what_is_due(t).evaluate:  # the last start ended before it was done
        evaluate_and_save(t)  # Collective.
    while not what_is_due(t).stop:
        train_one_epoch(t)  # Collective.
    if not is_finished(t):  # this start is over, and the run is not
        save(t)  # Collective.
        wait_for_save(t)  # Collective.
        t.bad_samples.report(t.log.note)
        reason = next(filter(None, t.world.gather(t.watchdog.reason)), "--stop-after")  # Collective.
        t.log.note(f"stopped at step {t.state.progress.step} ({reason}) and saved; the same command continues the run"
                   f" ({t.checkpoints.cost()}; {t.clock.words()})")
        t.run.status("stopped", Exit.STOPPED, reason)
        return Exit.STOPPED
    wait_for_save(t)  # Collective.
    t.world.on_rank_zero(lambda: close_run(t))  # Collective.
    return Exit.DONE


def train_one_epoch(t: Training) -> None:
    """The rest of the current epoch, from the exact sample on; returns early on an agreed stop. Collective."""
    t.strategy.module.train()
    t.clock.restart()
    for batch in t.feed.rest_of_epoch(t.state.progress):  # one global batch = one optimizer step
        losses, grad_norm = train_step(t, batch)  # Collective.
        log_step(t, batch, losses, grad_norm)  # Collective every --log-every steps.
        if after_step(t):  # evaluates, saves, stops. Collective if something is due.
            return


def train_step(t: Training, batch: GlobalBatch) -> tuple[Tensor, Tensor]:
    """One optimizer step. Returns what each micro-batch adds to the loss, and the norm of the gradient. Collective.

    losses: [micro-batches of all ranks] float64, zeros for those of other ranks. grad_norm: scalar, before clipping.
    """
    strategy, precision, optimizer, step = t.strategy, t.precision, t.state.optimizer, t.state.progress.step
    set_lr(optimizer, t.schedule(step))

    # forward and backward of this rank's micro-batches; the sum over ranks starts in the last backward
    losses = torch.zeros(batch.num_micro_batches, dtype=torch.float64, device=t.world.device)
    for model, micro_batch in strategy.accumulate(batch, precision.scale):
        loss_sum = forward(t, model, micro_batch, step)  # dropout is seeded by (step, index), never by the rank
        # Divided by the samples (or predicted tokens) of the whole global batch: no mean of means.
        # += and not =: a rank that has one micro-batch less may compute its last one again, with weight 0 (fsdp).
        losses[micro_batch.index] += loss_sum.detach().double() / batch.normalizer
        (loss_sum / batch.normalizer * precision.scale).backward()
    t.extras.summed(t, batch, losses)  # Collective every --audit-every steps.
    end_if_wrong(t)  # Collective: all ranks judge the steps before alike, if one saw that something was wrong

    # update; a gradient that is not finite changes nothing, and ends the run unless --max-nonfinite allows the step
    precision.unscale_(optimizer)
    grad_norm = strategy.clip_grad_norm_(t.config.optim.max_grad_norm)
    is_finite = precision.step(optimizer, grad_norm)
    t.outcome.note(t.state.progress, losses, is_finite)  # read one step later, so that nobody waits
    optimizer.zero_grad(set_to_none=True)
    t.state.commit(is_finite, batch.end)  # Collective: position, BatchNorm's statistics (micro-batch 0's), averages
    return losses, grad_norm


if __name__ == "__main__":
    exit_after(partial(main, CONFIG, WATCHDOG))
