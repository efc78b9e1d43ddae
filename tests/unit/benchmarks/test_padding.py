"""benchmarks/padding.py: what is counted as padding."""

import pytest
import torch

from benchmarks.padding import padded_share


def test_a_batch_is_as_wide_as_its_longest_text():
    number = torch.tensor([2, 4, 4, 1])
    assert padded_share(number, [[0, 1], [2, 3]]) == pytest.approx(1 - 11 / 16)
    assert padded_share(number, [[0, 3], [1, 2]]) == pytest.approx(1 - 11 / 12)


def test_on_a_gpu_a_batch_is_as_wide_as_the_next_multiple():
    assert padded_share(torch.tensor([2, 5, 4, 1]), [[0, 1], [2, 3]], 4) == pytest.approx(1 - 12 / 24)


def test_a_packed_batch_has_as_many_rows_as_its_texts_take():
    number = torch.tensor([4, 2, 2, 3, 1])
    assert padded_share(number, [[0, 1, 2, 3, 4]], is_packed=True) == 0
    assert padded_share(number, [[0, 1, 2], [3, 4]], is_packed=True) == pytest.approx(1 - 12 / 14)
