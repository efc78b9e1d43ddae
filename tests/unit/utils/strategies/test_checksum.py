"""utils/strategies/checksum.py: every bit counts, and nothing else."""

import pytest
import torch

from utils.strategies import checksum as module
from utils.strategies.checksum import INTEGERS, checksum

VALUES = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))


def of(*tensors):
    return int(checksum(enumerate(tensors)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_single_flipped_bit_changes_it(dtype):
    values = VALUES.to(dtype)
    integers = INTEGERS[values.itemsize]
    for place in (0, 17, 59):
        for bit in range(8 * values.itemsize):
            flipped = values.clone()
            flipped.view(-1).view(integers)[place] ^= torch.tensor(1, dtype=integers) << bit
            assert of(flipped) != of(values), (place, bit)


def test_values_in_other_places_change_it(monkeypatch):
    monkeypatch.setattr(module, "PART", 16)
    turned = [VALUES.roll(1), VALUES.flatten().roll(16).view_as(VALUES), VALUES.flip(0)]
    assert len({of(VALUES), *map(of, turned)}) == 4
    assert of(VALUES, VALUES + 1) != of(VALUES + 1, VALUES)


def test_strides_do_not_change_it():
    images = torch.randn(2, 3, 4, 4)
    assert of(images) == of(images.to(memory_format=torch.channels_last)) != of(images.permute(0, 1, 3, 2))


def test_negative_zero_and_none_are_zero_and_all_nans_are_alike():
    assert of(torch.tensor([0.0, 1.0])) == of(torch.tensor([-0.0, 1.0]))
    assert of(None, VALUES) == of(torch.zeros(7), VALUES) and of(None) == 0
    nans = torch.tensor([0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert len({of(nan) for nan in nans} | {of(-nans[0])}) == 1 != of(torch.tensor(torch.inf))


def test_it_is_the_sum_of_those_of_its_tensors_in_any_order():
    numbered = list(enumerate([VALUES, torch.arange(9), torch.tensor([True, False])]))
    assert int(checksum(numbered)) == int(checksum(numbered[::-1])) == int(sum(checksum([each]) for each in numbered))


def test_it_is_the_same_in_every_process():
    assert of(torch.arange(5.0)) == 6644597973407760384  # as another process computed it
