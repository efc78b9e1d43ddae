"""The state of a run: its position, and all that it would lose if it were not saved.

Tests: tests/unit/utils/rundir/test_checkpoint.py
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from utils.numerics.averages import Averages
from utils.rundir.coverage import Coverage
from utils.rundir.digests import Digests
from utils.strategies.base import Strategy


@dataclass(frozen=True)
class Progress:
    """The position of a run. Everything random or scheduled is a pure function of it."""

    epoch: int = 0
    sample_offset: int = 0  # samples of the epoch's order that are done
    step: int = 0  # optimizer steps done
    evaluated_step: int = 0  # the step of the last finished evaluation; a resumed run first does one that is due
    skipped: int = 0  # steps that changed nothing: --max-nonfinite
    gain: float | None = None  # --early-stop-patience: the value of the last evaluation that was a gain ...
    without_gain: int | None = None  # ... and the number of evaluations since; None = it is off

    def after(self, epoch: int, sample_offset: int) -> "Progress":
        """The position after one more optimizer step, which ended there."""
        return replace(self, epoch=epoch, sample_offset=sample_offset, step=self.step + 1)

    def position(self, num_samples: int) -> dict[str, float]:
        """Where in the run a record stands. num_samples: of an epoch."""
        samples = self.epoch * num_samples + self.sample_offset
        return {"step": self.step, "epoch": samples / num_samples, "samples": samples}


@dataclass
class TrainState:
    """The only list of what a run is: if losing something changes the run, it is here."""

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    progress: Progress = Progress()
    # {"step", "metric", "value"} of the best evaluation; "weights": "ema" if it was one of the averages
    best: dict[str, Any] = field(default_factory=dict)
    averages: Averages = field(default_factory=lambda: Averages({}, decay=0))
    coverage: Coverage = field(default_factory=Coverage)  # the samples of the current epoch that reached a backward
    # by set, train and val: what its samples were when they were used; noted since this step
    digests: dict[str, Digests] = field(default_factory=dict)
    noted_since: int = 0

    def commit(self, is_finite: Tensor, end: tuple[int, int]) -> None:
        """End a step for what follows the weights: the buffers, the averages, the position. Collective.

        is_finite: see Strategy. end: the position after the step, as GlobalBatch has it.
        """
        self.strategy.commit_buffers(is_finite)  # Collective.
        self.averages.update(self.progress.step, is_finite)
        self.progress = self.progress.after(*end)

    def weights(self) -> dict[str, Tensor]:
        """What model.safetensors holds: the weights that the training goes on from. All ranks or none."""
        return self.strategy.model_state()

    def state_dict(self) -> dict[str, Any]:
        """What state.pt holds: all else that the training goes on from. Collective."""
        averages = {"ema": self.averages.values} if self.averages.values else {}
        return {"optimizer": self.strategy.optimizer_state(self.optimizer), "scaler": self.scaler.state_dict(),
                "coverage": self.coverage.state_dict(self.strategy.world), **averages}

    def go_back(self, progress: Progress) -> None:
        """The last step, which began at `progress`, changed nothing, and is taken again."""
        self.progress = progress
        self.coverage.undo()
        if "train" in self.digests:
            self.digests["train"].undo()

    def samples(self) -> dict[str, Tensor]:
        """What samples.safetensors holds: of each set [N, 32] uint8, see Digests. Collective. Raises UserError (65)."""
        joined = {name: digests.joined(self.strategy.world) for name, digests in self.digests.items()}  # Collective.
        return {"since": torch.tensor(self.noted_since), **joined}

    def load(self, weights: dict[str, Tensor], state: dict[str, Any], trainer: dict[str, Any],
             samples: dict[str, Tensor] | None = None) -> None:
        """Load what was saved. All ranks or none. Raises KeyError if it is of another model.

        samples: None = a version that did not note them saved it.
        """
        self.strategy.load_model_state(weights)
        self.averages.load(state.get("ema", {}))
        self.strategy.load_optimizer_state(self.optimizer, state["optimizer"])
        if state["scaler"]:  # else the run did not use fp16 so far
            self.scaler.load_state_dict(state["scaler"])
        self.progress, self.best = Progress(**trainer["progress"]), trainer["best"]
        self.coverage.load(state["coverage"])
        self.noted_since = int(samples["since"]) if samples else self.progress.step
        for name, digests in self.digests.items() if samples else ():
            digests.load(samples[name])
