"""models/packing.py: which encoders read packed texts as each alone, and how."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from models.packing import find_first_position, with_mask

IDS = np.arange(5, 37)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "dim": 16,
         "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 1,
         "cls_token_id": 1, "sep_token_id": 1, "local_attention": 8}


def model_of(family, **options):
    known = AutoConfig.for_model(family)
    sizes = {name: value for name, value in SMALL.items() if hasattr(known, name)}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=40, initializer_range=0.5, **sizes)
    return AutoModelForMaskedLM.from_config(config, **options)


@pytest.mark.parametrize(("family", "first"), [
    ("bert", 0), ("electra", 0), ("albert", 0), ("distilbert", 0), ("roberta", 4), ("xlm-roberta", 4)])
def test_encoders_count_positions_from_0_or_from_after_the_padding_token(family, first):
    assert find_first_position(model_of(family), IDS, pad_id=3) == first


@pytest.mark.parametrize(("family", "options"), [
    ("bert", {"attn_implementation": "eager"}),  # adds a mask, and this one is of truth values
    ("modernbert", {}),  # its attention to near tokens alone would be to all
    ("fnet", {}),  # mixes all tokens of a row
    ("mpnet", {}), ("deberta-v2", {})])  # no mask between tokens
def test_encoders_that_would_mix_packed_texts_read_none(family, options):
    assert find_first_position(model_of(family, **options), IDS, pad_id=3) is None


@pytest.mark.parametrize("is_training", [True, False])
def test_to_try_a_model_leaves_no_trace(is_training):
    model = model_of("bert").train(is_training)
    weights, state = [weight.clone() for weight in model.parameters()], torch.get_rng_state()
    find_first_position(model, IDS, pad_id=3)
    assert model.training == is_training and all(weight.grad is None for weight in model.parameters())
    assert all(map(torch.equal, weights, model.parameters())) and torch.equal(state, torch.get_rng_state())


def test_tokens_see_those_of_their_text():
    owners = torch.tensor([[0, 0, 1, -1], [2, 2, 2, 2]])
    inputs = with_mask({"input_ids": torch.ones(2, 4), "owners": owners})
    assert set(inputs) == {"input_ids", "attention_mask"} and inputs["attention_mask"].shape == (2, 1, 4, 4)
    assert inputs["attention_mask"][0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert bool(inputs["attention_mask"][1].all())


def test_inputs_without_packed_texts_stay_as_they_are():
    inputs = {"input_ids": torch.ones(2, 4), "attention_mask": torch.ones(2, 4)}
    assert with_mask(inputs) is inputs
