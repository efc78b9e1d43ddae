"""Randomness is derived, never carried: a seed is a pure function of (seed, what for, where in the run).

So no random state is saved, and neither rank, worker nor world size can reach a result.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, stream: str, *position: int) -> int:
    """A 63-bit seed for `stream` ("augmentation", "dropout", ...) at `position` (epoch, index, ...). About 2 us."""
    words = f"{seed}/{stream}/" + "/".join(map(str, position))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1


def seed_micro_batch(seed: int, step: int, number: int, device: torch.device) -> None:
    """Set torch's generators for micro-batch `number` of optimizer step `step`: its dropout is the same on whichever rank."""
    value = derive_seed(seed, "micro-batch", step, number)
    torch.default_generator.manual_seed(value)  # 1 us; torch.manual_seed takes 140
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(value)


@contextmanager
def seeded(value: int) -> Iterator[None]:
    """Seed torch's CPU generator for a block (one sample's augmentation, a model's first weights) and undo it after."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(value)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
