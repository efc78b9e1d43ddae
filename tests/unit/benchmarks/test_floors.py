"""benchmarks/floors.py: which operations are timed, how many bytes the others move, what two processes could reach."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks import floors
from benchmarks.floors import TEXT_BATCH, Watch

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


def test_adamw_reads_the_gradients_and_does_not_write_them():
    """It reads weights, gradients and both averages, and writes all but the gradients: 7 times the weights."""
    weights = torch.ones(4, 8, requires_grad=True)
    weights.grad = torch.ones(4, 8)
    optimizer = torch.optim.AdamW([weights], fused=True)
    optimizer.step()
    with Watch() as watch:
        optimizer.step()
    counters = 4 + 8  # bytes: the number of steps is increased, and read by the update
    assert watch.other_bytes == 7 * weights.nbytes + counters


def test_what_is_expected_of_two_processes_is_computed_round_by_round(monkeypatch):
    """A step of one takes 0.5, 1, 0.25 s, of which 0.1 s are the rest; two share the work, and their rest is 0.2 s."""
    seconds, kept = {1: [9, 0.5, 1, 0.25], 2: [9, 2, 2, 2]}, {}
    monkeypatch.setattr(floors, "ours", lambda processes=1: lambda: TEXT_BATCH / seconds[processes].pop(0))
    monkeypatch.setattr(floors, "rest_of", lambda processes: [0.05 * processes, 0.03 * processes, 0.02 * processes])
    monkeypatch.setattr(floors, "report", lambda what, unit, found, *others: kept.update(found))
    monkeypatch.setattr(floors, "append", lambda what, unit, parts: kept.update(parts))
    floors.compare_processes([], {}, "fp32", rounds=3)
    assert kept["expected of 2"] == [pytest.approx(TEXT_BATCH / taken) for taken in (0.6, 1.1, 0.35)]
    assert kept["clipping, 2 x"] == [pytest.approx(60)] * 3  # ms
