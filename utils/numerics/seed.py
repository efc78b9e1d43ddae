"""Randomness is derived, never carried: a seed is a pure function of (seed, purpose, position in the run).

So no random state is saved, and no result depends on rank, worker or world size.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from utils.hardware.devices import seed_device


def derive_seed(seed: int, stream: str, *position: int) -> int:
    """A 63-bit seed for `stream` ("augmentation", "dropout", ...) at `position` (epoch, index, ...). About 2 us."""
    words = f"{seed}/{stream}/" + "/".join(map(str, position))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1


def seed_micro_batch(seed: int, step: int, index: int, device: torch.device) -> None:
    """Seed torch's generators for micro-batch `index` of an optimizer step: its dropout is the same on every rank."""
    value = derive_seed(seed, "micro-batch", step, index)
    torch.default_generator.manual_seed(value)  # 1 us; torch.manual_seed takes 140
    seed_device(device, value)


@contextmanager
def seeded(value: int) -> Iterator[None]:
    """Seed torch's CPU generator in a block (one sample's augmentation, initial weights), and restore it after."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(value)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
