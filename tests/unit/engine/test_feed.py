"""engine/feed.py: global batches in order, this rank's micro-batches of each, and what is known of the whole."""

from types import SimpleNamespace

import pytest
import torch

from data.batch import Batch
from data.loader import BadSamples, build_loader
from data.plan import cut
from data.sampler import WINDOW, ElasticDistributedSampler, Lengths
from engine.feed import Feed
from utils.rundir.clock import Clock
from utils.rundir.resolved import Resolved
from utils.rundir.state import Progress
from utils.settings.run_options import FaultOptions

PLAN = cut(50, 16, 4)  # of an epoch: 16, 16, 9 and 9 samples, in four micro-batches each
LENGTHS = Lengths(torch.arange(50), WINDOW)
ENDS = [16, 32, 41, 50]
START = Progress()


class Watchdog:
    """Writes down what is expected of the main thread, and within how many seconds."""

    def __init__(self):
        self.limits, self.expected = None, []

    def watch(self, items, doing, first_s, next_s, detail):
        self.limits = (first_s, next_s)
        return items

    def enter(self, doing, within_s):
        self.expected.append((doing, within_s))


class Numbers:
    def __getitem__(self, item):
        return item[1]

    def name(self, index):
        return str(index)


def collate(indices):
    return Batch({}, torch.tensor(indices), torch.ones(len(indices)))


def feed_of(rank=0, world_size=1, progress=START, epochs=1, is_compiled=False):
    """A feed, and its watchdog."""
    sampler = ElasticDistributedSampler(PLAN, rank, world_size, 0, LENGTHS)
    loader = build_loader(Numbers(), collate, sampler, 0, SimpleNamespace(device=torch.device("cpu")))
    task, watchdog = SimpleNamespace(normalizer=lambda indices: 2.0 * len(indices)), Watchdog()
    config = SimpleNamespace(faults=FaultOptions(step_timeout=100),
                             device=SimpleNamespace(compile=is_compiled))
    run = SimpleNamespace(resolved=Resolved(epochs=epochs))
    start = SimpleNamespace(task=task, watchdog=watchdog, config=config, run=run)
    return Feed(start, loader, progress, BadSamples("stop", None), Clock(torch.device("cpu"), None)), watchdog


def numbers_of(batch):
    return [micro_batch.index for micro_batch in batch]


@pytest.mark.parametrize("rank, world_size, share", [(0, 1, [0, 1, 2, 3]), (1, 3, [1]), (0, 3, [0, 3]), (4, 5, [])])
def test_every_rank_is_handed_its_share_and_the_facts_of_the_whole(rank, world_size, share):
    feed, _ = feed_of(rank, world_size)
    found = [(numbers_of(batch), len(batch), batch.num_samples, batch.normalizer, batch.end, batch.num_tokens)
             for batch in feed.rest_of_epoch(START)]
    order = feed.sampler.order(0)
    expected = [
        (share, len(share), end - begin, 2.0 * (end - begin), (0, end) if end < 50 else (1, 0),
         int(LENGTHS.tokens[order[begin:end]].sum())) for begin, end in zip([0, *ENDS], ENDS, strict=False)]
    assert found == expected


def test_the_rest_of_an_epoch_and_the_next_one_come_without_a_gap():
    here = Progress(epoch=1, sample_offset=32)
    feed, _ = feed_of(progress=here, epochs=3)
    found = [[sample for micro_batch in batch for sample in micro_batch.indices]
             for progress in (here, Progress(epoch=2)) for batch in feed.rest_of_epoch(progress)]
    orders = {epoch: feed.sampler.order(epoch) for epoch in (1, 2)}
    expected = [orders[1][32:41], orders[1][41:], *(orders[2][a:b] for a, b in zip([0, *ENDS], ENDS, strict=False))]
    assert [sorted(samples) for samples in found] == [sorted(indices.tolist()) for indices in expected]


def test_what_the_loop_has_taken_of_a_global_batch_is_known_as_it_takes_it():
    feed, _ = feed_of()
    for batch in feed.rest_of_epoch(START):
        counted = []
        assert list(batch.counted) == counted
        for micro_batch in batch:
            counted += micro_batch.indices
            assert list(batch.counted) == counted


def test_a_rank_without_work_is_watched_too():
    feed, watchdog = feed_of(rank=4, world_size=5)
    for _ in feed.rest_of_epoch(START):
        pass
    # Twice what the others have for the data and for the work; the first step of a start may take longer.
    assert [within_s for _, within_s in watchdog.expected] == [610, 210, 210, 210]


@pytest.mark.parametrize("is_compiled, limits", [(False, (300, 100)), (True, (300, 300))])
def test_where_a_step_may_compile_every_step_has_the_time_of_the_first(is_compiled, limits):
    assert feed_of(is_compiled=is_compiled)[1].limits == limits
