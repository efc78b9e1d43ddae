"""A compiled masked language model: few variants, whatever the number of tokens, samples and predicted tokens."""

import itertools
from functools import partial

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

from models.bert import SparsePrediction
from utils.numerics.compiling import compile_model


@pytest.fixture
def model(monkeypatch):
    """Traced as for --compile, and then computed by torch: what is counted here is the tracing."""
    torch.compiler.reset()
    for name in ("recompile_limit", "wrap_top_frame"):
        monkeypatch.setattr(torch.compiler.config, name, getattr(torch.compiler.config, name))  # puts them back
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = transformers.BertConfig(
        vocab_size=90, hidden_size=16, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2)
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    SparsePrediction(model)
    yield model
    torch.compiler.reset()


def test_a_masked_lm_is_compiled_once_for_each_kind_of_batch(model):
    shapes = [(4, 8, 5), (4, 8, 6), *itertools.product((3, 5), (9, 12, 16), (4, 7, 11))]  # B, T, P
    batches = [{"input_ids": torch.randint(90, (samples, tokens)),
                "positions": torch.randperm(samples * tokens)[:predicted]}
               for samples, tokens, predicted in shapes]
    expected = [model(**batch).logits for batch in batches]
    compile_model(model)
    counters.clear()
    for batch, logits in zip(batches, expected, strict=True):
        torch.testing.assert_close(model(**batch).logits, logits)
    assert counters["stats"]["unique_graphs"] <= 4  # none is dynamic, and then each dimension in turn
