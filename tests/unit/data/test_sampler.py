"""data/sampler.py: every sample once, in an order and in micro-batches that no number of processes changes.

Legend as there: N samples, B samples per global batch, M micro-batches per global batch, W processes.
"""

import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from data.plan import BatchPlan, cut
from data.sampler import WINDOW, ElasticDistributedSampler, EvaluationSampler, Lengths, bucketed, epoch_order
from utils.errors import UserError


@st.composite
def plans(draw):
    num_samples, batch = draw(st.integers(1, 150)), draw(st.integers(1, 60))
    return cut(num_samples, batch, draw(st.integers(1, batch)))


@st.composite
def plans_and_world_sizes(draw, count=1):
    plan = draw(plans())
    return plan, *[draw(st.integers(1, plan.num_micro_batches)) for _ in range(count)]


@st.composite
def plans_and_lengths(draw, window=None):
    plan, size = draw(plans()), st.integers(1, 40)
    tokens = torch.tensor(draw(st.lists(size, min_size=plan.num_samples, max_size=plan.num_samples)))
    return plan, Lengths(tokens, window or draw(st.sampled_from([1, WINDOW])))


def steps_by_rank(plan, world_size, seed=0, epoch=0, start=0, lengths=None):
    """[W][steps][share] MicroBatchRequest, as the loaders of W ranks ask for them."""
    ranks = []
    for rank in range(world_size):
        sampler = ElasticDistributedSampler(plan, rank, world_size, seed, lengths)
        sampler.set_position(epoch, start)
        wanted, share = list(sampler), len(sampler.share)
        steps = sum(begin >= start for begin in starts_of(plan))
        assert len(wanted) == steps * share
        ranks.append([wanted[i * share:(i + 1) * share] for i in range(steps)])
    return ranks


def global_steps(plan, world_size, **position):
    """[steps] {v: MicroBatchRequest}: what all ranks together compute in each step."""
    return [{micro.index: micro for share in shares for micro in share}
            for shares in zip(*steps_by_rank(plan, world_size, **position), strict=True)]


def step_sizes(plan):
    return [sum(len(micro.indices) for micro in step.values() if not micro.is_stand_in)
            for step in global_steps(plan, 1)]


def starts_of(plan):
    starts = [0]
    while plan.end(starts[-1]) < plan.num_samples:
        starts.append(plan.end(starts[-1]))
    return starts


@given(plans_and_world_sizes(), st.integers(0, 3), st.integers(0, 3))
def test_over_all_ranks_every_sample_comes_exactly_once_per_epoch(plan_and_world_size, seed, epoch):
    plan, world_size = plan_and_world_size
    ranks = steps_by_rank(plan, world_size, seed, epoch)
    taken = [i for steps in ranks for share in steps for micro in share if not micro.is_stand_in for i in micro.indices]
    assert sorted(taken) == list(range(plan.num_samples))


@given(plans_and_world_sizes())
def test_every_rank_takes_n_by_b_steps_rounded_up(plan_and_world_size):
    plan, world_size = plan_and_world_size
    expected = (plan.num_samples + plan.global_batch_size - 1) // plan.global_batch_size
    ranks = steps_by_rank(plan, world_size)
    lengths = [len(ElasticDistributedSampler(plan, rank, world_size, 0)) for rank in range(world_size)]
    assert {plan.steps_per_epoch, *map(len, ranks)} == {expected}
    assert lengths == [sum(map(len, steps)) for steps in ranks]


@given(plans())
def test_the_tail_is_halved_over_the_last_two_batches(plan):
    batch, (whole, tail) = plan.global_batch_size, divmod(plan.num_samples, plan.global_batch_size)
    if whole == 0:
        expected = [tail]
    elif tail == 0:
        expected = [batch] * whole
    else:
        expected = [batch] * (whole - 1) + [(batch + tail + 1) // 2, (batch + tail) // 2]
    assert step_sizes(plan) == expected


@given(plans())
def test_sizes_are_those_of_the_smallest_and_the_largest_micro_batch(plan):
    counts = [0 if micro.is_stand_in else len(micro.indices) for step in global_steps(plan, 1)
              for micro in step.values()]
    assert plan.sizes == (min(counts), max(counts))


@given(plans_and_world_sizes())
def test_a_micro_batch_takes_the_positions_that_are_its_number_modulo_m(plan_and_world_size):
    plan, world_size = plan_and_world_size
    order, count = epoch_order(0, 0, plan.num_samples).tolist(), plan.num_micro_batches
    expected = [{v: order[a:plan.end(a)][(v - a) % count::count] for v in range(count)} for a in starts_of(plan)]
    taken = [{v: [] if micro.is_stand_in else list(micro.indices) for v, micro in step.items()}
             for step in global_steps(plan, world_size)]
    assert taken == expected


@given(plans_and_world_sizes())
def test_no_micro_batch_depends_on_the_number_of_processes(plan_and_world_size):
    plan, world_size = plan_and_world_size
    assert global_steps(plan, world_size, seed=3, epoch=2) == global_steps(plan, 1, seed=3, epoch=2)


@given(plans_and_world_sizes())
def test_rank_r_has_micro_batches_r_and_every_wth_after_it(plan_and_world_size):
    """Rank r computes micro batches r and every wth after it in every step."""
    plan, world_size = plan_and_world_size
    shares = [[[micro.index for micro in share] for share in steps] for steps in steps_by_rank(plan, world_size)]
    assert shares == [[list(range(r, plan.num_micro_batches, world_size))] * plan.steps_per_epoch
                      for r in range(world_size)]


@given(plans_and_world_sizes(count=2), st.data())
def test_another_number_of_processes_continues_the_sequence_from_any_step(plan_and_world_sizes, data):
    plan, before, after = plan_and_world_sizes
    step = data.draw(st.integers(0, plan.steps_per_epoch - 1))
    begun = global_steps(plan, before, epoch=1)[:step]
    continued = global_steps(plan, after, epoch=1, start=starts_of(plan)[step])
    assert begun + continued == global_steps(plan, 1, epoch=1)


@given(plans(), st.integers(1, 5))
def test_ranks_beyond_the_micro_batches_are_asked_for_nothing(plan, more):
    world_size = plan.num_micro_batches + more
    ranks = steps_by_rank(plan, world_size)
    assert ranks[plan.num_micro_batches:] == [[[]] * plan.steps_per_epoch] * more
    assert ranks[:plan.num_micro_batches] == steps_by_rank(plan, plan.num_micro_batches)


@given(plans_and_world_sizes(), st.data())
def test_one_iteration_goes_on_through_several_epochs(plan_and_world_size, data):
    plan, world_size = plan_and_world_size
    start = data.draw(st.sampled_from(starts_of(plan)))
    sampler = ElasticDistributedSampler(plan, 0, world_size, seed=2)
    sampler.set_position(3, start, epochs=3)
    expected = [micro for epoch, begin in ((3, start), (4, 0), (5, 0))
                for share in steps_by_rank(plan, world_size, 2, epoch, begin)[0] for micro in share]
    assert list(sampler) == expected


@given(plans_and_world_sizes())
def test_the_indices_of_a_global_batch_are_known_to_every_rank(plan_and_world_size):
    plan, world_size = plan_and_world_size
    sampler = ElasticDistributedSampler(plan, world_size - 1, world_size, seed=0)
    taken = [sorted(i for micro in step.values() if not micro.is_stand_in for i in micro.indices)
             for step in global_steps(plan, world_size, epoch=1)]
    assert [sorted(sampler.indices(1, start).tolist()) for start in starts_of(plan)] == taken


@given(plans_and_world_sizes())
def test_a_micro_batch_without_samples_is_one_stand_in(plan_and_world_size):
    plan, world_size = plan_and_world_size
    wrong = [micro for step in global_steps(plan, world_size) for micro in step.values()
             if len(micro.indices) < 1 or (micro.is_stand_in and len(micro.indices) != 1)]
    assert wrong == []


@pytest.mark.parametrize("num_samples, world_size, batch",
                         [(96, 1, 32), (96, 2, 32), (96, 3, 24), (96, 4, 20), (90, 3, 32), (8, 8, 8)])
@pytest.mark.parametrize("seed, epoch", [(0, 0), (7, 3)])
def test_one_micro_batch_per_rank_gives_torchs_own_order(num_samples, world_size, batch, seed, epoch):
    """The order of torch's DistributedSampler, sample for sample."""
    plan = BatchPlan(num_samples, batch, num_micro_batches=world_size)
    expected = []
    for rank in range(world_size):
        torchs = DistributedSampler(range(num_samples), world_size, rank, shuffle=True, seed=seed)
        torchs.set_epoch(epoch)
        expected.append(list(torchs))
    ranks = steps_by_rank(plan, world_size, seed, epoch)
    assert [[i for share in steps for micro in share for i in micro.indices] for steps in ranks] == expected


@pytest.mark.parametrize("world_size, micro_batches", [(1, 3), (2, 4), (2, 8), (3, 6), (4, 12)])
def test_several_micro_batches_per_rank_have_torchs_samples(world_size, micro_batches):
    """In each step they have the samples of torch's DistributedSampler."""
    plan = BatchPlan(96, 24, micro_batches)
    expected = []
    for rank in range(world_size):
        torchs = DistributedSampler(range(96), world_size, rank, shuffle=True, seed=5)
        torchs.set_epoch(2)
        indices, share = list(torchs), 24 // world_size
        expected.append([sorted(indices[i:i + share]) for i in range(0, len(indices), share)])
    ranks = steps_by_rank(plan, world_size, seed=5, epoch=2)
    assert [[sorted(i for micro in share for i in micro.indices) for share in steps] for steps in ranks] == expected


def test_each_epoch_and_each_seed_has_its_own_order():
    orders = [epoch_order(seed, epoch, 50).tolist() for seed, epoch in [(0, 0), (0, 1), (100, 0)]]
    assert len({tuple(order) for order in orders}) == 3


def test_one_sampler_takes_the_order_of_whatever_epoch_it_is_set_to():
    sampler, orders = ElasticDistributedSampler(BatchPlan(20, 8, 1), 0, 1, seed=5), []
    for epoch in (0, 1, 4, 0):
        sampler.set_position(epoch)
        orders.append([i for micro in sampler for i in micro.indices])
    assert orders == [epoch_order(5, epoch, 20).tolist() for epoch in (0, 1, 4, 0)]


@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 100))
def test_a_cut_keeps_micro_batches_within_their_size(num_samples, batch, size):
    assert cut(num_samples, batch, size).sizes[1] <= size


# --- batches by length


def skewed_lengths(num_samples):
    """Like those of texts: many short ones, a few of up to 512 tokens."""
    normal = torch.randn(num_samples, generator=torch.Generator().manual_seed(0))
    return Lengths((3 + 60 * normal.exp()).clamp(max=512).long(), WINDOW)


def order_of(plan, lengths, seed=0, epoch=0):
    sampler = ElasticDistributedSampler(plan, 0, 1, seed, lengths)
    return torch.cat([sampler.indices(epoch, start) for start in starts_of(plan)]).tolist()


def batch_lengths(plan, lengths, **position):
    """[steps][samples] lengths: those of every global batch, in the order of the epoch."""
    order = order_of(plan, lengths, **position)
    return [[int(lengths.tokens[i]) for i in order[start:plan.end(start)]] for start in starts_of(plan)]


@given(plans_and_lengths(), st.integers(0, 2**62))
def test_an_order_by_lengths_is_a_permutation(plan_and_lengths, seed):
    """It leaves the order that it is made from unchanged."""
    plan, lengths = plan_and_lengths
    order = epoch_order(0, 0, plan.num_samples)
    result = bucketed(order, lengths, plan, seed)
    assert (sorted(result.tolist()), result.dtype, order.tolist()) == (
        list(range(plan.num_samples)), order.dtype, epoch_order(0, 0, plan.num_samples).tolist())


@given(plans_and_lengths(), st.integers(0, 99), st.integers(0, 9))
def test_an_order_by_lengths_is_a_pure_function_of_seed_epoch_and_lengths(plan_and_lengths, seed, epoch):
    plan, lengths = plan_and_lengths
    fresh, used = (ElasticDistributedSampler(plan, 0, 1, seed, each)
                   for each in (lengths, replace(lengths, tokens=lengths.tokens.int())))
    torch.manual_seed(seed)
    for each in range(epoch + 1):  # one gets there epoch by epoch and draws in between, the other begins there
        used.set_position(each)
        torch.rand(1)
    fresh.set_position(epoch)
    assert list(fresh) == list(used)


def test_each_seed_epoch_and_set_of_lengths_has_its_own_order():
    plan, lengths = cut(400, 8, 8), skewed_lengths(400)
    orders = [order_of(plan, lengths), order_of(plan, lengths, epoch=1), order_of(plan, lengths, seed=1),
              order_of(plan, replace(lengths, tokens=lengths.tokens.flip(0)))]
    assert len({tuple(order) for order in orders}) == 4


@given(plans_and_lengths())
def test_samples_stay_within_their_window_of_batches(plan_and_lengths):
    plan, lengths = plan_and_lengths
    plain, starts, window = epoch_order(0, 0, plan.num_samples).tolist(), starts_of(plan), lengths.window
    windows = [slice(starts[i], plan.end(starts[min(i + window, len(starts)) - 1]))
               for i in range(0, len(starts), window)]
    order = order_of(plan, lengths)
    assert [sorted(order[window]) for window in windows] == [sorted(plain[window]) for window in windows]


@given(plans_and_lengths(WINDOW))
def test_within_a_window_no_two_batches_overlap_in_length(plan_and_lengths):
    plan, lengths = plan_and_lengths
    batches = batch_lengths(plan, lengths)
    windows = [sorted((min(batch), max(batch)) for batch in batches[i:i + WINDOW])
               for i in range(0, len(batches), WINDOW)]
    assert [(a, b) for window in windows for a, b in pairwise(window) if a[1] > b[0]] == []


def test_lengths_within_a_batch_differ_by_a_tenth_of_what_they_would():
    plan, lengths = cut(5000, 32, 8), skewed_lengths(5000)  # 157 batches: three windows, and one of seven batches
    plain = lengths.tokens[epoch_order(0, 0, 5000)]
    without = sum(int(plain[start:plan.end(start)].max() - plain[start:plan.end(start)].min())
                  for start in starts_of(plan))
    spread = sum(max(batch) - min(batch) for batch in batch_lengths(plan, lengths))
    assert spread < without / 10  # a window has 50 batches, so that all but its longest ones are of nearly one length


@given(plans_and_lengths(window=1))
def test_in_a_window_of_one_batch_each_micro_batch_has_its_share(plan_and_lengths):
    """Of the longest samples, of the next, and so on: their sums differ by the longest one's length, or less."""
    plan, lengths = plan_and_lengths
    for step in global_steps(plan, 1, lengths=lengths):
        own = [lengths.tokens[list(micro.indices)].sort(descending=True).values.tolist()
               for micro in step.values() if not micro.is_stand_in]
        sums = [sum(each) for each in own]
        assert max(sums) - min(sums) <= max(max(each) for each in own)


@pytest.mark.parametrize("num_samples", [320, 330])  # 330: the last two batches are halves of the tail
def test_the_longest_batch_comes_anywhere_in_an_epoch(num_samples):
    plan, lengths = cut(num_samples, 32, 32), skewed_lengths(num_samples)
    places = []
    for epoch in range(100):
        means = [sum(batch) / len(batch) for batch in batch_lengths(plan, lengths, epoch=epoch)]
        places.append(means.index(max(means)))
    # by chance one of 11 is missing in 1 of 1000 seeds; this one is fixed
    assert set(places) == set(range(plan.steps_per_epoch))


@given(plans_and_lengths(), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
def test_batches_by_length_have_every_sample_once_over_1_to_4_ranks(plan_and_lengths, world_size, seed, epoch):
    """Over 1 to 4 ranks every sample comes once per epoch in batches by length."""
    plan, lengths = plan_and_lengths
    ranks = steps_by_rank(plan, world_size, seed, epoch, lengths=lengths)
    taken = [i for steps in ranks for share in steps for micro in share if not micro.is_stand_in for i in micro.indices]
    assert sorted(taken) == list(range(plan.num_samples))


@given(plans_and_lengths(), st.integers(1, 4), st.integers(1, 4), st.data())
def test_batches_by_length_continue_on_other_numbers_of_processes(plan_and_lengths, before, after, data):
    """Batches by length continue from any step on another number of processes."""
    plan, lengths = plan_and_lengths
    step = data.draw(st.integers(0, plan.steps_per_epoch - 1))
    begun = global_steps(plan, before, epoch=1, lengths=lengths)[:step]
    continued = global_steps(plan, after, epoch=1, start=starts_of(plan)[step], lengths=lengths)
    assert begun + continued == global_steps(plan, 1, epoch=1, lengths=lengths)


@given(plans_and_lengths(), st.integers(1, 4))
def test_tokens_of_a_batch_are_the_sum_of_its_lengths_on_every_rank(plan_and_lengths, world_size):
    plan, lengths = plan_and_lengths
    samplers = [ElasticDistributedSampler(plan, rank, world_size, 0, lengths)
                for rank in range(world_size)]
    expected = [sum(int(lengths.tokens[i]) for micro in step.values() if not micro.is_stand_in for i in micro.indices)
                for step in global_steps(plan, 1, epoch=2, lengths=lengths)]
    assert [[sampler.num_tokens(sampler.indices(2, start)) for start in starts_of(plan)]
            for sampler in samplers] == [expected] * world_size


def test_samples_without_lengths_have_no_tokens():
    sampler = ElasticDistributedSampler(cut(20, 8, 8), 0, 1, seed=0)
    assert sampler.num_tokens(sampler.indices(0, 8)) == 0


# --- refusals


def refusal(plan):
    try:
        plan.require_two()
    except UserError as error:
        return str(error)
    return None


def working_sizes(plan):
    """Every --micro-batch-size with which the same batches would not be refused."""
    sizes = range(1, plan.global_batch_size + 1)
    return [size for size in sizes if refusal(cut(plan.num_samples, plan.global_batch_size, size)) is None]


@given(plans())
def test_batch_norm_with_fewer_than_two_samples_is_refused(plan):
    """The message names the smallest size that works."""
    message = refusal(plan)
    if message is None:
        assert min(step_sizes(plan)) // plan.num_micro_batches >= 2
    else:
        working = working_sizes(plan)
        suggested = re.search(r"--micro-batch-size (\d+)", message)
        assert (int(suggested[1]) if suggested else None) == (working[0] if working else None)


def test_batch_norm_does_not_trouble_a_plan_with_two_samples_everywhere():
    assert cut(100, 10, 2).require_two() is None


# --- evaluation


@given(st.integers(1, 200), st.integers(1, 70), st.integers(1, 9))
def test_every_sample_is_evaluated_once_in_the_same_batches(num_samples, batch, world_size):
    """Every sample is evaluated once over all ranks in batches that no number of processes changes."""
    taken = [micro for rank in range(world_size) for micro in EvaluationSampler(num_samples, batch, rank, world_size)]
    real = sorted((micro.index, micro.indices) for micro in taken if not micro.is_stand_in)
    whole = range(0, num_samples, batch)
    assert real == [(j, tuple(range(start, min(start + batch, num_samples)))) for j, start in enumerate(whole)]


@given(st.integers(1, 200), st.integers(1, 70), st.integers(1, 9))
def test_every_rank_evaluates_the_same_number_of_batches(num_samples, batch, world_size):
    """Surplus batches are stand-ins."""
    ranks = [EvaluationSampler(num_samples, batch, rank, world_size) for rank in range(world_size)]
    batches = -(-num_samples // batch)
    rounds = -(-batches // world_size)
    surplus = SimpleNamespace(found=sum(micro.is_stand_in for rank in ranks for micro in rank),
                              expected=rounds * world_size - batches)
    assert ([len(list(rank)) for rank in ranks], surplus.found) == ([rounds] * world_size, surplus.expected)


@given(st.integers(1, 200), st.integers(1, 70), st.integers(1, 9))
def test_a_surplus_evaluation_batch_has_a_number_beyond_the_table(num_samples, batch, world_size):
    ranks = [EvaluationSampler(num_samples, batch, rank, world_size) for rank in range(world_size)]
    assert all((micro.index >= ranks[0].num_batches) == micro.is_stand_in for rank in ranks for micro in rank)
