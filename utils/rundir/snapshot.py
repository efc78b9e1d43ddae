"""What a save writes: one value, made at one moment, so that no part of it goes ahead of another.

Tests: tests/unit/utils/rundir/test_checkpoint_links.py
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Beside:
    """What a checkpoint refers to, as it is when the save begins; rank 0 writes it first."""

    records: Mapping[str, Any]  # {"bytes", "sha256"} of metrics.jsonl up to this step
    write: Callable[[dict[str, Tensor]], None] = lambda weights: None  # gets the weights to export
    has_model: bool = False  # it writes RUN/model, of these weights


@dataclass(frozen=True)
class Snapshot:
    """All that a save writes, as it was at one moment; in host memory."""

    weights: dict[str, Tensor]
    values: dict[str, Any]  # what state.pt holds
    samples: dict[str, Tensor]  # what samples.safetensors holds
    trainer: dict[str, Any]  # what trainer.json holds
    beside: Beside
    start: int  # of the run
    awaits_evaluation: bool

    @property
    def step(self) -> int:
        """How many optimizer steps were done."""
        return self.trainer["progress"]["step"]

    @property
    def exported(self) -> dict[str, Tensor]:
        """The weights of RUN/model: the averages, where they are the best model so far."""
        return self.weights | (self.values["ema"] if exports_averages(self.trainer) else {})


def exports_averages(trainer: dict[str, Any]) -> bool:
    """Whether RUN/model holds the averages of this checkpoint, not its weights: they are the best model so far."""
    best = trainer["best"]
    return best.get("weights") == "ema" and best["step"] == trainer["progress"]["step"]
