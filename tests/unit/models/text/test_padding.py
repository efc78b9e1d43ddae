"""models/text/padding.py: which encoders read packed texts as each alone, and how."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from data.texts.text_set import TextSample, packed
from models.text.padding import find_first_position, with_mask
from models.text.sparse_prediction import SparsePrediction

IDS = np.arange(5, 37)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "dim": 16,
         "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 1,
         "cls_token_id": 1, "sep_token_id": 1}


def model_of(family, initializer_range=0.5, attn_implementation="sdpa", **options):
    known = AutoConfig.for_model(family)
    sizes = {name: value for name, value in SMALL.items() if hasattr(known, name)}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=40, initializer_range=initializer_range, **sizes | options)
    model = AutoModelForMaskedLM.from_config(config, attn_implementation=attn_implementation)
    SparsePrediction.add_to(model)
    return model


@pytest.mark.parametrize("initializer_range", [0.02, 0.5])
@pytest.mark.parametrize(("family", "first"), [
    ("bert", 0), ("electra", 0), ("albert", 0), ("distilbert", 0), ("roberta", 4), ("xlm-roberta", 4)])
def test_encoders_count_positions_from_0_or_from_after_the_padding_token(family, first, initializer_range):
    assert find_first_position(model_of(family, initializer_range), IDS, pad_id=3) == first


@pytest.mark.parametrize("initializer_range", [0.02, 0.5])
@pytest.mark.parametrize(("family", "options"), [
    ("bert", {"attn_implementation": "eager"}),  # adds a mask, and this one is of truth values
    ("fnet", {"attn_implementation": "eager"}),  # mixes all tokens of a row
    ("mpnet", {"attn_implementation": "eager"}), ("deberta-v2", {"attn_implementation": "eager"}),  # another mask
    ("modernbert", {"local_attention": 8}), ("modernbert", {"local_attention": 48}),  # to near tokens; here to all
    ("big_bird", {"attn_implementation": "eager", "block_size": 2})])  # attention to some blocks
def test_encoders_that_would_mix_packed_texts_read_none(family, options, initializer_range):
    assert find_first_position(model_of(family, initializer_range, **options), IDS, pad_id=3) is None


@pytest.mark.parametrize(("num_tokens", "first"), [(65, 0), (66, None), (67, None)])
def test_a_window_is_noticed_by_one_token_outside_it(num_tokens, first):
    """In float32 rounding hides it."""
    model = model_of("modernbert", 0.02, local_attention=128, num_hidden_layers=4)
    assert find_first_position(model, np.resize(IDS, num_tokens), pad_id=3) == first


@pytest.mark.parametrize("num_tokens", [8, 9, 64])
def test_few_tokens_are_enough(num_tokens):
    assert find_first_position(model_of("bert"), np.resize(IDS, num_tokens), pad_id=3) == 0


@pytest.mark.parametrize("family", ["bert", "electra", "albert", "distilbert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_texts_have_the_logits_of_each_alone(multiple, family):
    """With padding and with tokens that the trial does not have."""
    model, draw = model_of(family).double().eval(), np.random.default_rng(0)
    first = find_first_position(model, IDS, pad_id=3)
    texts = [TextSample(draw.permutation(np.r_[0:3, 4:40])[:length], np.zeros(0, np.uint8), 0)
             for length in (29, 5, 7, 18, 11, 2)]
    inputs, starts = packed(texts, 3, 32, multiple, first)
    assert len(inputs["input_ids"]) < len(texts) and (inputs["owners"] < 0).any()
    with torch.no_grad():
        found = model(**with_mask(inputs)).logits.flatten(0, 1)
        for text, start in zip(texts, starts, strict=True):
            alone = model(input_ids=torch.from_numpy(text.ids)[None]).logits[0]
            torch.testing.assert_close(found[start:start + len(text.ids)], alone, rtol=1e-12, atol=1e-12)


def settings(model):
    own = {name: value for name, value in vars(model.base_model).items() if name not in ("config", "_modules")}
    return own, model.config.to_dict(), str(model)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(("family", "options"), [
    ("bert", {}), ("big_bird", {"attn_implementation": "eager", "block_size": 2})])
def test_to_try_a_model_leaves_no_trace(family, options, is_training):
    model = model_of(family, **options).train(is_training)
    before = copy.deepcopy(model)
    state = torch.get_rng_state()
    find_first_position(model, IDS, pad_id=3)
    assert model.training == is_training and all(weight.grad is None for weight in model.parameters())
    assert settings(model) == settings(before)  # BigBird's attention_type, for example
    assert all(map(torch.equal, before.parameters(), model.parameters()))
    assert torch.equal(state, torch.get_rng_state())


def test_tokens_see_those_of_their_text():
    owners = torch.tensor([[0, 0, 1, -1], [2, 2, 2, 2]])
    inputs = with_mask({"input_ids": torch.ones(2, 4), "owners": owners})
    assert set(inputs) == {"input_ids", "attention_mask"} and inputs["attention_mask"].shape == (2, 1, 4, 4)
    assert inputs["attention_mask"][0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert bool(inputs["attention_mask"][1].all())


def test_inputs_without_packed_texts_stay_as_they_are():
    inputs = {"input_ids": torch.ones(2, 4), "attention_mask": torch.ones(2, 4)}
    assert with_mask(inputs) is inputs
