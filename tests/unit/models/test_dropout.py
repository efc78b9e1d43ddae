"""--dropout and --drop-path are torchvision's and transformers' own arguments."""

import re

import pytest
import torchvision
import transformers
from torch import nn
from torchvision.ops import StochasticDepth

from models.text.bert import EncoderSpec, _set_dropout, build_encoder
from models.vision.classifier import set_drop_path, set_dropout
from tests.unit.models.test_blocks import drawn as vision
from tests.unit.models.text.test_bert import CLASSES, HEADS, TOKENIZER, configured
from utils.errors import Exit, UserError
from utils.settings.text_options import TextModelOptions


def rates(model):
    """Every number in `model` that is the probability of a dropout, by name."""
    found = {}
    for name, part in model.named_modules():
        values = {key: value for key, value in vars(part).items() if key in ("p", "dropout", "drop_rate")
                  or "attention_dropout" in key}
        if not isinstance(part, StochasticDepth) and values:
            found[name] = values
    return found


@pytest.mark.rows(3)
@pytest.mark.parametrize("name, argument", [
    ("alexnet", "dropout"), ("vgg11_bn", "dropout"), ("densenet121", "drop_rate"), ("efficientnet_b0", "dropout"),
    ("mobilenet_v2", "dropout"), ("mobilenet_v3_small", "dropout"), ("mnasnet0_5", "dropout"),
    ("squeezenet1_1", "dropout"), ("swin_t", "dropout"), ("vit_b_16", "dropout"), ("googlenet", "dropout")])
def test_dropout_is_torchvisions_own_argument(name, argument):
    model = vision(name)
    set_dropout(model, 0.37)
    assert rates(model) == rates(vision(name, **{argument: 0.37})) != rates(vision(name))


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", ["convnext_tiny", "efficientnet_b0", "swin_t", "maxvit_t"])
def test_drop_path_keeps_torchvisions_proportions(name):
    def paths(model):
        return [part.p for part in model.modules() if isinstance(part, StochasticDepth)]

    model, plain = vision(name), paths(vision(name))
    set_drop_path(model, 0.37)
    assert max(paths(model)) == pytest.approx(0.37)
    assert paths(model) == pytest.approx([0.37 * p / max(plain) for p in plain])
    if name == "convnext_tiny":
        assert paths(model) == pytest.approx(paths(torchvision.models.convnext_tiny(stochastic_depth_prob=0.37)))
    set_drop_path(model, 0.0)
    assert set(paths(model)) == {0.0}


@pytest.mark.parametrize("setting, name", [(set_dropout, "resnet18"), (set_dropout, "convnext_tiny"),
                                           (set_drop_path, "resnet18"), (set_drop_path, "vit_b_16")])
def test_a_model_without_it_is_refused(setting, name):
    with pytest.raises(UserError, match=r"has no (dropout|stochastic depth); leave it out") as error:
        setting(vision(name), 0.1)
    assert error.value.code == Exit.USAGE


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_dropout_of_an_encoder_is_every_one_but_of_attention(family, tmp_path):
    configured(family).save_pretrained(tmp_path)
    spec = EncoderSpec(HEADS["text-classification"], TOKENIZER, 16, CLASSES)
    found, own = ({name: part.p for name, part in built.named_modules() if isinstance(part, nn.Dropout)}
                  for built, _ in (build_encoder(spec, TextModelOptions(model=str(tmp_path), dropout=dropout),
                                                 str(tmp_path), None) for dropout in (0.37, None)))
    of_attention = {name for name in own if re.search(r"attention\.(self\.)?dropout$", name)}
    assert of_attention and found == {name: own[name] if name in of_attention else 0.37 for name in own}


def test_an_encoder_without_dropout_is_refused():
    with pytest.raises(UserError, match=r"--dropout: --model plain has no dropout") as error:
        _set_dropout(transformers.PreTrainedConfig(), TextModelOptions(model="plain", dropout=0.1))
    assert error.value.code == Exit.USAGE
