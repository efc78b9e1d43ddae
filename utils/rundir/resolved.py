"""What a run became at its first start: the settings that may be `auto`, and what it found out about data and model."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from utils.settings.config import flag

UNSET: Any = object()  # not resolved yet; not in the file


@dataclass(frozen=True)
class Resolved:
    """RUN/auto.json, a line for each key. Run.keep alone changes it."""

    # what decides the bits
    device: str = UNSET  # the type: "cpu", "xpu", ...
    threads: int = UNSET  # of torch, per process
    precision: str = UNSET  # fp32, bf16 or fp16
    undecayed_tables: bool = True  # as in every run since 0.10: see models.blocks.undecayed
    micro_batches: int = UNSET  # in a global batch
    eval_batch_size: int = UNSET
    epochs: int = UNSET
    global_batch_size: int = UNSET
    lr: float = UNSET
    head_init: str = UNSET  # features or random
    yardstick: float = UNSET  # texts: top1 by folds of a linear model on frozen means over tokens
    head_lr_factor: float = UNSET
    branch: dict[str, Any] = UNSET  # of which run, after which step, and what differs: extras/branch
    origin: list[int] = UNSET  # (steps, epochs) before its global batches, if these are not its parent's

    # what must not change
    code: str = UNSET  # a digest of the program
    left_out: list[str] = UNSET  # the training samples that --without names: paths in the data, or numbers of rows
    data: str = UNSET  # the fingerprint of the data set
    tokenizer: str = UNSET  # texts: a digest of RUN/tokenizer
    encoder: str = UNSET  # texts: a digest of RUN/encoder; unset for a size of --model
    weights: str = UNSET  # a digest of the local file of initial weights, if there is one
    names_as_written: bool = False  # as in every run since 0.10: identity.compare knows by it which are older

    # images
    image_size: int = UNSET  # pixels
    resize_size: int = UNSET  # of the shorter side in an evaluation
    interpolation: str = UNSET
    mean: list[float] = UNSET
    std: list[float] = UNSET
    white_value: int = UNSET  # of files with 16 bits

    # texts
    hub: dict[str, str] = UNSET  # the commit of each name that was fetched from the hub
    pad_to: int = UNSET  # the width of a batch is a multiple of this many tokens
    padding_side: str | None = UNSET  # right, left; None: the encoder reads padding; "": it failed
    first_position: int | None = UNSET  # of each packed text; None = texts are not packed

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From what the file holds, which is {} in a new run; keys of other versions are left out."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    @property
    def first_step(self) -> int | None:
        """The step after which a branch begins."""
        return None if self.branch is UNSET else self.branch["step"]

    def branched(self) -> str:
        """From which run a branch has come, in words; "" for any other run."""
        if self.branch is UNSET:
            return ""
        changed = "; ".join(f"{flag(name)} was {old} and is {new}"
                            for name, (old, new) in self.branch["changed"].items())
        return f"branched from {self.branch['run']} after step {self.branch['step']}: {changed or 'nothing is changed'}"

    def as_dict(self) -> dict[str, Any]:
        """What the file holds: what is resolved."""
        return {name: value for name, value in vars(self).items() if value is not UNSET}
