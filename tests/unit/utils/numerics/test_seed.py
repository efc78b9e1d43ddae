"""utils/numerics/seed.py: randomness is derived, never carried."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT
from utils.numerics.seed import derive_seed, seed_micro_batch, seeded


@given(st.integers(0, 2**64), st.text(max_size=9), st.lists(st.integers(0, 2**40), max_size=4))
def test_a_seed_is_a_pure_function_and_fits_a_generator(seed, stream, position):
    value = derive_seed(seed, stream, *position)
    torch.Generator().manual_seed(value)
    assert value == derive_seed(seed, stream, *position) and 0 <= value < 2**63


@pytest.mark.long
def test_a_seed_is_the_same_in_every_process():
    """Python's own hash of a str is not."""
    program = "from utils.numerics.seed import derive_seed; print(derive_seed(3, 'augmentation', 1, 2))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) == derive_seed(3, "augmentation", 1, 2)


@pytest.mark.parametrize("other", [
    (4, "a", 1, 2), (3, "b", 1, 2), (3, "a", 2, 2), (3, "a", 1, 3), (3, "a", 2, 1), (3, "a", 12), (3, "a")])
def test_every_argument_changes_the_seed(other):
    assert derive_seed(*other) != derive_seed(3, "a", 1, 2)


def test_ten_thousand_positions_have_ten_thousand_seeds():
    assert len({derive_seed(0, "augmentation", epoch, index) for epoch in range(10) for index in range(1000)}) == 10_000


def test_a_micro_batch_draws_by_its_step_and_index():
    def draw(*position):
        seed_micro_batch(*position, torch.device("cpu"))
        return torch.rand(2).tolist()

    draws = [draw(0, 5, 1), draw(0, 5, 1), draw(0, 5, 2), draw(0, 6, 1), draw(1, 5, 1)]
    assert draws[0] == draws[1] and len({tuple(each) for each in draws}) == 4


def test_seeded_draws_the_same_and_restores_torchs_generator():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with seeded(7):
            draws.append(torch.rand(2).tolist())
    assert draws[0] == draws[1] and torch.equal(torch.get_rng_state(), state)


def test_seeded_restores_the_generator_after_an_error():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with pytest.raises(KeyError), seeded(7):
        torch.rand(2)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)
