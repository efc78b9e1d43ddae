"""benchmarks/floors.py: which operations are timed, and how many bytes the others move."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.floors import Watch

X = torch.ones(4, 8)  # 128 bytes
IMAGE, FILTER, HEADS = torch.ones(1, 2, 4, 4), torch.ones(3, 2, 1, 1), torch.ones(3, 1, 2, 4, 8)


@pytest.mark.parametrize("product", [
    lambda: X @ X.t(), lambda: F.linear(X, X, X[:, 0]), lambda: F.conv2d(IMAGE, FILTER),
    lambda: F.scaled_dot_product_attention(*HEADS)])
def test_products_are_timed_and_move_no_bytes(product):
    with Watch() as watch:
        product()
    assert watch.products_s > 0 and watch.other_bytes == 0


@pytest.mark.parametrize(("operation", "number_of_bytes"), [
    (lambda: X.relu(), 256),                                       # read, written
    (lambda: X + X[0], 288),                                       # and a row of 32
    (lambda: X.clone().add_(1), 512),                              # a copy, then the same in place
    (lambda: X.t().reshape(32).view(2, 16), 256),                  # one copy; views are free
    (lambda: torch.empty(4, 8), 0),
    (lambda: F.embedding(torch.tensor([1, 1]), X), 2 * 32 + 16)])  # two rows of 8 are written; the rest is not read
def test_other_operations_move_what_they_read_and_write(operation, number_of_bytes):
    with Watch() as watch:
        operation()
    assert watch.other_bytes == number_of_bytes and watch.products_s == 0
