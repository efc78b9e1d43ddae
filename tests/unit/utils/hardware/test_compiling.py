"""A compiled masked language model: few variants, whatever the number of tokens, samples and predicted tokens."""

import itertools
import re
from functools import partial

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

from models.text.padding import with_mask
from models.text.sparse_prediction import SparsePrediction
from utils.errors import UserError
from utils.hardware.compiling import compile_model, require_compiler

OWN_LIMIT = 8  # torch's, of the variants of a model


@pytest.fixture
def model(monkeypatch):
    """Traced as for --compile, and then computed by torch: what is counted here is the tracing."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    config = transformers.BertConfig(
        vocab_size=90, hidden_size=16, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2)
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    SparsePrediction.add_to(model)
    with torch._dynamo.config.patch(recompile_limit=OWN_LIMIT, wrap_top_frame=False):  # what is set here, ends here
        yield model
    torch.compiler.reset()


def batch(rows, tokens, predicted, is_padded=False, is_packed=False):
    """An encoder's arguments. is_packed: two texts in a row."""
    inputs = {"input_ids": torch.randint(90, (rows, tokens)), "positions": torch.randperm(rows * tokens)[:predicted]}
    owners = (torch.arange(tokens) >= tokens // 2).expand(rows, tokens)
    packed = {"position_ids": torch.arange(tokens).expand(rows, tokens), "owners": owners}
    return with_mask(inputs | ({"attention_mask": torch.ones_like(inputs["input_ids"])} if is_padded else {})
                     | (packed if is_packed else {}))


def num_variants(model, batches):
    """How many variants `batches` add; each has the logits of the model that is not compiled."""
    before = counters["stats"]["unique_graphs"]
    for each in batches:
        torch.testing.assert_close(model(**each).logits, model._call_impl(**each).logits)
    return counters["stats"]["unique_graphs"] - before


@pytest.mark.long
@pytest.mark.parametrize("kind", [{}, {"is_packed": True}])
def test_a_masked_lm_is_compiled_once_for_all_sizes(kind, model):
    compile_model(model)
    assert num_variants(model, [batch(4, 8, 5, **kind)]) == 1  # all sizes fixed
    assert num_variants(model, [batch(4, 8, 6, **kind)]) == 1  # P is free
    sizes = itertools.product((3, 5), (9, 12, 16), (4, 7, 11))
    assert num_variants(model, (batch(*size, **kind) for size in sizes)) == 1


@pytest.mark.long
def test_more_variants_than_torchs_own_limit_are_compiled(model):
    compile_model(model)
    found = 0
    for is_trained, kind in itertools.product((True, False), ({}, {"is_padded": True}, {"is_packed": True})):
        with torch.set_grad_enabled(is_trained):
            # fixed, free, and of one sample
            found += num_variants(model, [batch(*size, **kind) for size in ((4, 8, 5), (3, 9, 6), (1, 8, 5))])
    assert found > OWN_LIMIT
    assert num_variants(model, [batch(2, 8, 5)]) == 0


@pytest.mark.parametrize("kind, variable, names", [
    ("cpu", "CXX", "g++"), ("cuda", "CC", "gcc and no clang"), ("cpu", "CXX", "my-c++"), ("cuda", "CC", "my-cc")])
def test_without_a_compiler_the_way_out_is_said(monkeypatch, kind, variable, names):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv(variable, names if names.startswith("my-") else "")
    with pytest.raises(UserError, match=rf"there is no {re.escape(names)}; install one, or leave --compile out"):
        require_compiler(kind)


def test_a_compiler_may_be_several_words(monkeypatch):
    monkeypatch.setenv("CXX", "env g++")
    require_compiler("cpu")
