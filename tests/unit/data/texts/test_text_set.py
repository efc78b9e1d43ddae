"""data/texts/text_set.py: several texts in a row."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.texts.text_set import TextSample, first_fit, packed

lengths_and_widths = st.integers(1, 40).flatmap(
    lambda width: st.tuples(st.lists(st.integers(1, width), min_size=1, max_size=60), st.just(width)))


@given(lengths_and_widths)
def test_packed_samples_have_places_of_their_own_within_a_row(lengths_and_width):
    lengths, width = lengths_and_width
    starts, num_rows = first_fit(lengths, width)
    places = [place for start, length in zip(starts, lengths, strict=True) for place in range(start, start + length)]
    assert len(set(places)) == len(places) and max(places) < num_rows * width
    assert [start // width for start in starts] == [(start + length - 1) // width
                                                    for start, length in zip(starts, lengths, strict=True)]


@given(lengths_and_widths)
def test_no_two_packed_rows_would_fit_into_one(lengths_and_width):
    lengths, width = lengths_and_width
    starts, num_rows = first_fit(lengths, width)
    taken = [sum(length for start, length in zip(starts, lengths, strict=True) if start // width == row)
             for row in range(num_rows)]
    assert all(sum(two) > width for two in combinations(taken, 2))


@given(lengths_and_widths, st.integers(0, 3), st.booleans())
def test_packed_samples_are_found_again(lengths_and_width, first_position, has_types):
    lengths, width = lengths_and_width
    draw = np.random.default_rng(0)
    samples = [TextSample(draw.integers(1, 100, length), draw.integers(0, 2, length * has_types).astype(np.uint8), 0)
               for length in lengths]
    inputs, starts = packed(samples, 0, width, 1, first_position)
    flat = {name: tensor.flatten() for name, tensor in inputs.items()}
    for index, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        place = slice(start, start + len(sample.ids))
        assert flat["input_ids"][place].tolist() == sample.ids.tolist()
        assert flat["position_ids"][place].tolist() == list(range(first_position, first_position + len(sample.ids)))
        assert (flat["owners"] == index).nonzero().flatten().tolist() == list(range(place.start, place.stop))
        assert not has_types or flat["token_type_ids"][place].tolist() == sample.types.tolist()
    assert has_types == ("token_type_ids" in flat) and bool((flat["input_ids"][flat["owners"] < 0] == 0).all())


def test_packed_rows_are_as_wide_as_the_longest_or_the_next_multiple():
    samples = [TextSample(np.ones(length, np.int64), np.zeros(0, np.uint8), 0) for length in (5, 2, 3, 2)]
    assert packed(samples, 0, 32, 1, 0)[0]["input_ids"].shape == (3, 5)
    assert packed(samples, 0, 32, 8, 0)[0]["input_ids"].shape == (2, 8)
    assert packed(samples, 0, 6, 8, 0)[0]["input_ids"].shape == (3, 6)
