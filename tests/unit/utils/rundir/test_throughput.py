"""utils/rundir/throughput.py: the timing fields of a train record."""

import pytest
import torch

from utils.rundir.throughput import Throughput


def test_tokens_per_second_are_recorded_where_there_are_tokens_only():
    images, texts = Throughput(torch.device("cpu")), Throughput(torch.device("cpu"))
    images.step(samples=4)
    texts.step(samples=4, tokens=12)
    assert ["tokens_per_s" in images.record(0.0), "tokens_per_s" in texts.record(0.0)] == [False, True]


def test_tokens_and_samples_are_counted_over_the_same_time():
    throughput = Throughput(torch.device("cpu"))
    for samples, tokens in ((4, 40), (2, 2)):
        throughput.step(samples, tokens)
    fields = throughput.record(0.0)
    assert fields["tokens_per_s"] / fields["samples_per_s"] == pytest.approx(7)


def test_tokens_are_counted_anew_after_a_record():
    throughput = Throughput(torch.device("cpu"))
    throughput.step(samples=1, tokens=5)
    throughput.record(0.0)
    throughput.step(samples=1)
    assert "tokens_per_s" not in throughput.record(0.0)
