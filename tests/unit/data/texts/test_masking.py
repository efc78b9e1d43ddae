"""data/texts/masking.py.

Masks depend on (seed, epoch, sample) alone, keep BERT's proportions, and never touch special tokens.
"""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from data.texts.masking import MaskedTextSet, num_predicted
from data.texts.text_set import TokenTable
from data.texts.tokenizer import is_special, train_tokenizer

TOKENIZER = train_tokenizer(["an apple a day keeps every doctor away"] * 9, 100)
ORDINARY = np.flatnonzero(~is_special(TOKENIZER))
CLS, SEP, UNK, MASK = 2, 3, 1, 4


def table_of(samples):
    """A TokenTable of these token ids."""
    ends = np.cumsum([len(ids) for ids in samples])
    spans = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    ordinary = np.array([np.isin(ids, ORDINARY).sum() for ids in samples], dtype=np.int32)
    ids = np.concatenate(samples).astype(np.uint16)
    return TokenTable(ids, np.zeros(len(ids), np.uint8), spans, np.zeros(len(samples), np.int32), ordinary,
                      np.arange(len(samples)), np.diff(spans)[:, 0])


def some_samples(count, length, seed=0):
    """Each [CLS], `length` tokens of which some are [UNK], [SEP] or [MASK], the first is not, and [SEP]."""
    draw = np.random.default_rng(seed)
    inner = [draw.choice([*ORDINARY, UNK, SEP, MASK], length) for _ in range(count)]
    return table_of([np.array([CLS, draw.choice(ORDINARY), *ids[1:], SEP]) for ids in inner])


def masked(table, probability=0.15, seed=0, epoch=0):
    data = MaskedTextSet(table, TOKENIZER, probability, seed)
    return [data[epoch, i] for i in range(len(data))]


def as_lists(samples):
    return [(one.text.ids.tolist(), one.positions.tolist(), one.targets.tolist()) for one in samples]


@pytest.fixture(scope="module")
def many():
    """100,000 ordinary tokens, of which half are predicted: (table, its masked samples)."""
    draw = np.random.default_rng(1)
    table = table_of([np.array([CLS, *draw.choice(ORDINARY, 500), SEP]) for _ in range(200)])
    return table, masked(table, 0.5)


@given(st.integers(1, 600), st.integers(0, 9))
def test_so_many_tokens_are_predicted_as_the_sample_has_ordinary_ones(length, seed):
    table = some_samples(3, length, seed)
    for probability in (0.001, 0.15, 0.5, 0.85, 1.0):
        expected = [max(1, round(probability * int(ordinary))) for ordinary in table.num_ordinary]
        assert num_predicted(table.num_ordinary, probability).tolist() == expected
        assert [(len(one.positions), len(one.targets)) for one in masked(table, probability)] == [(count, count)
                                                                                                  for count in expected]


@given(st.integers(1, 60), st.integers(0, 9), st.sampled_from([0.15, 0.5, 1.0]))
def test_positions_are_distinct_ascending_and_those_of_ordinary_tokens(length, epoch, probability):
    table = some_samples(4, length)
    for i, one in enumerate(masked(table, probability, epoch=epoch)):
        assert one.positions.tolist() == sorted(set(one.positions.tolist()))
        assert np.isin(table.sample(i).ids[one.positions], ORDINARY).all()


@given(st.integers(1, 60), st.integers(0, 9))
def test_targets_are_what_stood_there_and_all_else_stays(length, epoch):
    table = some_samples(4, length)
    restored = []
    for one in masked(table, 0.5, epoch=epoch):
        one.text.ids[one.positions] = one.targets
        restored.append((one.text.ids.tolist(), one.text.types.tolist(), one.text.label))
    originals = [table.sample(i) for i in range(len(table))]
    assert restored == [(text.ids.tolist(), text.types.tolist(), text.label) for text in originals]


def test_the_table_itself_is_never_changed():
    table = some_samples(4, 60)
    before = table.ids.copy()
    masked(table, 1.0)
    assert np.array_equal(table.ids, before)


def test_all_of_a_sample_can_be_predicted():
    table = some_samples(4, 60)
    for i, one in enumerate(masked(table, 1.0)):
        assert np.array_equal(one.positions, np.flatnonzero(np.isin(table.sample(i).ids, ORDINARY)))


def test_80_percent_are_masked_10_random_and_10_stay(many):
    """Of the predicted tokens 80 percent are masked 10 random and 10 stay."""
    inputs = np.concatenate([one.text.ids[one.positions] for one in many[1]])
    targets = np.concatenate([one.targets for one in many[1]])
    lucky = 0.1 / len(ORDINARY)  # random tokens that are the original
    shares = np.array([(inputs == MASK).mean(), ((inputs != MASK) & (inputs != targets)).mean(),
                       (inputs == targets).mean()])
    expected = np.array([0.8, 0.1 - lucky, 0.1 + lucky])
    # 5 sigma
    deviation = np.sqrt(expected * (1 - expected) / len(inputs))
    assert len(inputs) == 50_000 and (abs(shares - expected) < 5 * deviation).all()


def test_random_tokens_are_any_ordinary_ones_alike_and_never_special(many):
    counts = Counter(token for one in many[1] for token,
                     target in zip(one.text.ids[one.positions], one.targets, strict=True)
                     if token not in (MASK, target))
    mean = sum(counts.values()) / len(ORDINARY)
    # 5 sigma
    assert set(counts) == set(ORDINARY) and max(abs(count - mean) for count in counts.values()) < 5 * mean**0.5


def test_every_position_is_chosen_alike():
    table = table_of([np.array([CLS, *[ORDINARY[0]] * 20, SEP])])
    data = MaskedTextSet(table, TOKENIZER, 0.15, 0)
    counts = np.bincount(np.concatenate([data[epoch, 0].positions for epoch in range(2000)]), minlength=22)
    assert counts[[0, 21]].sum() == 0 and (abs(counts[1:21] - 300) < 5 * (300 * 0.85)**0.5).all()  # 5 sigma


def test_masks_depend_on_seed_epoch_and_sample_alone():
    """The same seed epoch and sample give the same masks whatever was drawn before."""
    table, found = some_samples(8, 40), []
    for state in (0, 1):
        torch.manual_seed(state)
        np.random.seed(state)
        random.seed(state)
        found.append(as_lists(masked(table, seed=5, epoch=3)))
        found.append(as_lists(masked(table, seed=5, epoch=3)[::-1])[::-1])
    assert found[0] == found[1] == found[2] == found[3]


def test_another_seed_epoch_or_sample_gives_other_masks():
    table = table_of([np.array([CLS, *ORDINARY, SEP])] * 2)  # the same text twice
    found = {str(one) for seed in (0, 1) for epoch in (0, 1) for one in as_lists(masked(table, 0.5, seed, epoch))}
    assert len(found) == 8


def test_masks_do_not_depend_on_the_order_of_loading():
    """The masks of a sample do not depend on the order in which they are asked for."""
    data, order = MaskedTextSet(some_samples(8, 40), TOKENIZER, 0.15, 0), [5, 0, 7, 5, 1]
    assert as_lists(data[0, i] for i in order) == [as_lists(data[0, i] for i in range(8))[i] for i in order]


def test_torch_draws_on_as_if_nothing_had_been_masked():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    masked(some_samples(4, 40))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_masks_as_none(workers):
    data = MaskedTextSet(some_samples(24, 40), TOKENIZER, 0.15, 0)
    items = [(epoch, i) for epoch in (0, 1) for i in range(24)]
    loader = DataLoader(data, batch_size=4, sampler=items, num_workers=workers, collate_fn=list,
                        multiprocessing_context="fork", timeout=60)
    assert as_lists(one for batch in loader for one in batch) == as_lists(data[item] for item in items)
