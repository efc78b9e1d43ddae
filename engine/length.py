"""How long a run trains, and in which global batches: steps by need where samples are few. Where a branch begins.

Tests: tests/unit/engine/test_length.py
"""

import math
import sys
from dataclasses import replace

from data.plan import BatchPlan
from models.tasks.base import Task
from utils.errors import Exit, UserError, counted
from utils.rundir.resolved import UNSET
from utils.rundir.run import Run
from utils.rundir.state import TrainState
from utils.settings.config import Config, settings

SHARE = 12  # --global-batch-size auto of few samples: of the training samples, rounded down to a power of two


def resolve_length(config: Config, task: Task, run: Run) -> None:
    """--epochs and --global-batch-size of this run: `run` keeps them from the first start on.

    auto: the usual ones; of few samples with pretrained weights a smaller batch, and as many epochs as make few.steps
    optimizer steps, within few.epochs. A function of the number of samples and of the settings alone.
    """
    num_samples, usual, is_first = len(task.train_set), config.usual, run.resolved.epochs is UNSET
    few = config.few if task.has_weights else None

    def derive_batch() -> int:
        share = 2 ** max(0, math.floor(math.log2(num_samples / SHARE)))
        return max(few.batch, min(usual["global_batch_size"], share)) if few else usual["global_batch_size"]

    def derive_epochs() -> int:
        return max(usual["epochs"], min(few.epochs, -(-few.steps // steps))) if few else usual["epochs"]

    batch = run.resolve("global_batch_size", config.batch.global_batch_size, derive_batch)
    steps = -(-num_samples // batch)  # of an epoch
    epochs = run.resolve("epochs", config.run.epochs, derive_epochs)
    given, resolved = settings(config), {"epochs": epochs, "global_batch_size": batch}
    if is_first and any(given[name] == "auto" and resolved[name] != usual[name] for name in resolved):
        run.note(f"{counted(num_samples, 'training sample')} with pretrained weights: --epochs {epochs}"
                 f" --global-batch-size {batch} make {counted(epochs * steps, 'optimizer step')}; large data sets get"
                 f" --epochs {usual['epochs']} --global-batch-size {usual['global_batch_size']}")


def num_steps(run: Run, plan: BatchPlan, max_steps: int | None) -> int:
    """Optimizer steps of the run. In a branch with other global batches the plan counts from where that began."""
    steps, epochs = (0, 0) if run.resolved.origin is UNSET else run.resolved.origin
    return min(steps + (run.resolved.epochs - epochs) * plan.steps_per_epoch, max_steps or sys.maxsize)


def begin_branch(run: Run, state: TrainState, patience: int) -> None:
    """What is not as it was where a branch begins: `best` if its checkpoint is gone, an end by --early-stop-patience.

    Raises UserError (82) if the checkpoint that the branch begins with is lost.
    """
    branch, step, progress = run.resolved.branch, state.progress.step, state.progress
    if branch is UNSET or step > branch["step"]:
        return
    if step < branch["step"]:
        raise UserError(f"{run.path} begins after step {branch['step']}, and the checkpoint of that step is lost;"
                        " restore it from a backup, or begin again with --fresh", Exit.NO_CHECKPOINT)
    if branch["begins_best"] and state.best.get("step") != step:  # this step begins it, if it is one to evaluate
        state.best = {}
        state.progress = replace(progress, evaluated_step=step - 1, gain=None, without_gain=None)
    elif patience and (progress.without_gain or 0) >= patience:
        state.progress = replace(progress, gain=None, without_gain=None)
