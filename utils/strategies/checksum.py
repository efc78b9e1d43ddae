"""A checksum of tensors, computed on their device: what ranks compare instead of the tensors themselves.

It is the sum of all values' bits, as integers, each times an odd number of its own, modulo 2^64. So every single bit
that differs changes it, as does every value in another place. (A sha256 would bring all the values to the host.)
"""

from collections.abc import Iterable
from functools import cache
from random import Random

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value
PART = 2**16  # values at a time, so that what is computed of them stays in a CPU's cache; elsewhere LARGE_PART
LARGE_PART = 2**22
NAN = 0.7310585  # stands for it; torch.where would take ten times as long


@torch.no_grad()
def checksum(tensors: Iterable[tuple[int, Tensor | None]]) -> Tensor:
    """The checksum of numbered tensors, in any order: scalar int64 on their device. That of several is the sum of each.

    None counts as zeros do, -0.0 as 0.0, and all NaN alike. The values are taken in the order of their indices,
    whatever the strides.
    """
    total = torch.zeros((), dtype=torch.int64)  # in host memory it adds to a scalar of any device
    for number, tensor in tensors:
        if tensor is None:
            continue
        size = PART if tensor.device.type == "cpu" else LARGE_PART
        for part, values in enumerate(tensor.reshape(-1).split(size)):
            if values.is_floating_point():
                values = values.nan_to_num(NAN, torch.inf, -torch.inf) + 0.0
            bits = values.view(INTEGERS[values.itemsize])
            total = total + (bits * odd_numbers(size, tensor.device)[:len(bits)]).sum() * _odd(number, part)
    return total


@cache
def odd_numbers(size: int, device: torch.device) -> Tensor:
    """Odd pseudo-random numbers, [size] int64, the same ones everywhere."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-2**63, 2**63 - 1, [size], generator=generator) | 1).to(device)


@cache
def _odd(number: int, part: int) -> int:
    return Random(f"{number}/{part}").getrandbits(63) | 1
