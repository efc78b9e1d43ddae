"""engine/length.py: what --epochs auto and --global-batch-size auto mean, by the number of samples alone."""

from types import SimpleNamespace

import pytest

from engine.length import resolve_length
from utils.rundir.run import Run
from utils.settings.config import CONFIGS, with_values

pytestmark = pytest.mark.unit
TEXTS, IMAGES, TOKENS = "text-classification", "image-classification", "masked-lm"


def resolved(tmp_path, task, num_samples, has_weights=True, kept=None, **given):
    """(epochs, global batch), and the notes."""
    run = Run(tmp_path, kept or {}, {"start": 1, "cores_per_process": 1}, (notes := []).append, lock=None)
    resolve_length(with_values(CONFIGS[task](), given),
                   SimpleNamespace(train_set=range(num_samples), has_weights=has_weights), run)
    return (run.resolved.epochs, run.resolved.global_batch_size), notes


@pytest.mark.parametrize("task, num_samples, expected", [
    (TEXTS, 1, (20, 8)), (TEXTS, 80, (20, 8)), (TEXTS, 200, (16, 16)), (TEXTS, 1000, (7, 32)), (TEXTS, 3200, (3, 32)),
    (TEXTS, 10**6, (3, 32)), (IMAGES, 1, (30, 16)), (IMAGES, 40, (30, 16)), (IMAGES, 500, (30, 32)),
    (IMAGES, 1000, (30, 64)), (IMAGES, 10**6, (30, 64)), (TOKENS, 100, (3, 64))])
def test_few_samples_get_smaller_batches_and_more_steps(tmp_path, task, num_samples, expected):
    found, notes = resolved(tmp_path, task, num_samples)
    assert found == expected
    usual = tuple(CONFIGS[task]().usual.values())
    assert len(notes) == (found != usual)


@pytest.mark.parametrize("task", [TEXTS, IMAGES])
def test_steps_hardly_fall_as_samples_grow(tmp_path, task):
    """No size gets less than half the steps of a smaller one: there is no cliff in the rule."""
    steps = []
    for num_samples in range(1, 20000, 37):
        (epochs, batch), _ = resolved(tmp_path, task, num_samples)
        steps.append(epochs * -(-num_samples // batch))
        assert steps[-1] >= max(steps) / 2


@pytest.mark.parametrize("task, expected", [(TEXTS, (3, 32)), (IMAGES, (30, 64))])
def test_from_scratch_nothing_changes(tmp_path, task, expected):
    assert resolved(tmp_path, task, 40, has_weights=False) == (expected, [])


def test_what_is_given_or_kept_is_taken_as_it_is(tmp_path):
    assert resolved(tmp_path, TEXTS, 200, epochs=5, global_batch_size=64) == ((5, 64), [])
    assert resolved(tmp_path, TEXTS, 200, epochs=5)[0] == (5, 16)
    assert resolved(tmp_path, TEXTS, 200, global_batch_size=64)[0] == (20, 64)
    assert resolved(tmp_path, IMAGES, 40, has_weights=False, global_batch_size=24) == ((30, 24), [])
    assert resolved(tmp_path, IMAGES, 2000, global_batch_size=24) == ((30, 24), [])
    assert resolved(tmp_path, TEXTS, 200, kept={"epochs": 3, "global_batch_size": 32}) == ((3, 32), [])


def test_one_sentence_says_what_was_chosen_and_why(tmp_path):
    _, [note] = resolved(tmp_path, TEXTS, 200)
    assert note == ("200 training samples with pretrained weights: --epochs 16 --global-batch-size 16 make 208"
                    " optimizer steps; large data sets get --epochs 3 --global-batch-size 32")
