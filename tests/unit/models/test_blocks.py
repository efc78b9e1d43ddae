"""models/blocks.py: the blocks of every family, what freezing keeps still, and the factors of the learning rate."""

import re

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

from models.blocks import blocks_of, freeze, lr_factors, undecayed
from tests.unit.models.vision.test_classifier import FAMILIES
from utils.errors import Exit, UserError
from utils.numerics.optimizers import build_optimizer, set_lr
from utils.settings.run_options import OptimOptions

torch.set_num_threads(1)
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50, "num_labels": 3}


def vision(name, **options):
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": False}
    return torchvision.models.get_model(name, weights=None, num_classes=5, **options)


def drawn(name, **options):
    """vision() without weights, for what looks at modules and shapes alone. RegNets compute widths with tensors."""
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        return vision(name, **options)


def bert(layers=3):
    return transformers.BertForSequenceClassification(transformers.BertConfig(num_hidden_layers=layers, **SMALL))


@pytest.mark.rows(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_param_is_in_one_block_and_the_head_is_the_last_layer(name):
    model = drawn(name)
    blocks = blocks_of(model)
    names = [name for block in blocks for name in block.params]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    # norms and biases alone make no block; each block has a matrix
    assert all(any(param.ndim > 1 for param in block.params.values()) for block in blocks)
    assert {param.shape[0] for param in blocks[-1].params.values()} == {5}


@pytest.mark.parametrize("name, below, stem, last", [
    ("resnet18", 9, ["conv1.weight", "bn1.weight", "bn1.bias"], "layer4.1."),
    ("vgg11_bn", 10, ["features.0.weight", "features.0.bias", "features.1.weight", "features.1.bias"], "classifier.3."),
    ("vit_b_16", 13, ["class_token", "conv_proj.weight", "conv_proj.bias", "encoder.pos_embedding"],
     "encoder.layers.encoder_layer_11."),
    ("convnext_tiny", 22, [f"features.0.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")], "features.7.2."),
    ("swin_t", 16, [f"features.0.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")], "features.7.1.")])
def test_blocks_are_residual_blocks_and_layers_from_stem_to_head(name, below, stem, last):
    *backbone, _ = blocks_of(drawn(name))
    assert len(backbone) == below
    assert list(backbone[0].params) == stem
    assert next(iter(backbone[-1].params)).startswith(last)


@pytest.mark.parametrize("config, encoder", [
    (transformers.BertConfig(num_hidden_layers=3, **SMALL), "bert.encoder.layer"),
    (transformers.RobertaConfig(num_hidden_layers=3, **SMALL), "roberta.encoder.layer"),
    (transformers.DistilBertConfig(n_layers=3, dim=16, n_heads=2, hidden_dim=32, vocab_size=50),
     "distilbert.transformer.layer"),
    (transformers.ModernBertConfig(num_hidden_layers=3, pad_token_id=0, **SMALL), "model.layers")])
@pytest.mark.parametrize("kind", ["SequenceClassification", "MaskedLM"])
def test_an_encoders_blocks_are_its_embeddings_and_layers(config, encoder, kind):
    stem, *layers, head = blocks_of(getattr(transformers, f"AutoModelFor{kind}").from_config(config))
    assert len(layers) == 3
    assert all("embeddings" in name for name in stem.params)
    assert all(name.startswith((f"{encoder}.{index}.", "model.final_norm"))
               for index, layer in enumerate(layers) for name in layer.params)
    assert head.params and not any(name.startswith(encoder) for name in head.params)


def test_layer_decay_is_the_formula_of_electra_on_bert():
    """Its get_layer_lrs: depth 0 for embeddings, i + 1 for layer i, layers + 2 for the head and 1 of those no layer."""
    found = lr_factors(bert(layers=4), layer_decay=0.8, head_lr_factor=3.0)
    for name, factor in found.items():
        layer = re.search(r"layer\.(\d+)\.", name)
        if "embeddings" in name:
            assert factor == pytest.approx(0.8**5)
        elif layer:
            assert factor == pytest.approx(0.8 ** (4 - int(layer[1])))
        else:
            assert factor == 3.0
    assert len(found) == len(list(bert(layers=4).parameters()))


def test_without_decay_and_factor_no_param_has_a_factor():
    assert lr_factors(nn.Linear(2, 2), 1.0, 1.0) == {}


def test_a_step_with_factors_is_that_of_torch_with_groups_of_their_own():
    torch.manual_seed(0)
    model, images = vision("resnet18"), torch.randn(2, 3, 32, 32)
    config = OptimOptions(optimizer="sgd", lr=0.05, weight_decay=0.0, momentum=0.0)
    model(images).square().sum().backward()
    depths = {"conv1": 9, "bn1": 9} | {f"layer{s}.{b}": 8 - 2 * (s - 1) - b for s in range(1, 5) for b in range(2)}
    factors = {name: 0.5 ** next(depth for prefix, depth in depths.items() if name.startswith(f"{prefix}."))
               if not name.startswith("fc.") else 10.0 for name, _ in model.named_parameters()}
    expected = {name: (param - 0.1 * factors[name] * param.grad).detach() for name, param in model.named_parameters()}
    optimizer = build_optimizer(model, config, lr_factors(model, 0.5, 10.0))
    set_lr(optimizer, 0.1)
    optimizer.step()
    torch.testing.assert_close(dict(model.named_parameters()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what, still, moving", [
    ("backbone", "features.12.1.", "classifier.3."), (3, "features.2.", "features.3.")])
def test_frozen_blocks_keep_weights_and_statistics_and_drop_nothing(what, still, moving):
    torch.manual_seed(0)
    model, images = vision("mobilenet_v3_small"), torch.randn(4, 3, 32, 32)
    freeze(model, what)
    optimizer = build_optimizer(model, OptimOptions(optimizer="sgd", lr=0.05, weight_decay=0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        model.eval()
        model.train()  # as the loop does after an evaluation
        model(images).square().sum().backward()
        optimizer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert model.training and any(name.startswith(moving) for name in changed)
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    assert any(name.startswith(still) for name in frozen) and not any(name.startswith(moving) for name in frozen)
    statistics = {name for name in before if "running" in name or "num_batches" in name}
    alike = {name for name in statistics if re.sub(r"(running_.*|num_batches_tracked)$", "weight", name) in frozen}
    assert changed == set(before) - frozen - alike


def test_a_frozen_backbone_gives_the_same_features_at_every_pass():
    model, ids = bert(), torch.arange(6).view(2, 3)
    freeze(model, "backbone")
    model.train()
    first, second = (model.bert.encoder(model.bert.embeddings(ids)).last_hidden_state for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad
    assert not torch.equal(model(ids).logits, model(ids).logits)  # the head's dropout is on


def test_dropout_before_a_layer_with_tied_weights_is_frozen_with_it():
    """A decoder's output layer, say: all of its parameters are known by the name of the embedding."""
    model = nn.ModuleDict({"tokens": nn.Embedding(4, 4), "drop": nn.Dropout(), "project": nn.Linear(4, 4, bias=False),
                           "head": nn.Linear(4, 2)})
    model["project"].weight = model["tokens"].weight
    words = freeze(model, "backbone")
    model.train()
    assert [name for name, part in model.named_children() if part.training] == ["head"]
    assert words == "--freeze backbone: 16 of 26 parameters stay as they are, from tokens.weight to tokens.weight"


def test_a_model_without_layers_is_all_head():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, 2))
    [head] = blocks_of(model)
    assert list(head.params) == ["weight"] and freeze(model, "backbone") == "" and model.weight.requires_grad


def test_more_blocks_than_there_are_are_refused():
    with pytest.raises(UserError, match=r"--freeze 11: --model has 9 blocks below its head") as error:
        freeze(vision("resnet18"), 11)
    assert error.value.code == Exit.USAGE


def test_freezing_none_touches_nothing():
    model = nn.Linear(2, 2)
    freeze(model, "none")
    assert model.weight.requires_grad and "train" not in vars(model)


@pytest.mark.parametrize("name, ends", [
    ("vit_b_16", {"class_token", "pos_embedding"}), ("swin_t", {"relative_position_bias_table"}),
    ("swin_v2_t", {"logit_scale"}), ("convnext_tiny", {"layer_scale"}), ("resnet18", set()),
    ("timm/test_vit", {"cls_token", "pos_embed"}),
    ("timm/swin_tiny_patch4_window7_224", {"relative_position_bias_table"}),
    ("timm/beit_base_patch16_224", {"cls_token", "relative_position_bias_table"})])
def test_tokens_positions_and_scales_do_not_decay(name, ends):
    """All of them that the model has; matrices and filters decay."""
    with torch.device("meta"):
        model = timm.create_model(name[5:]) if name.startswith("timm/") else torchvision.models.get_model(name)
    found = undecayed(model)
    expected = {key for key, _ in model.named_parameters() if key.rpartition(".")[2] in ends}
    assert {key for key in found if model.get_parameter(key).ndim > 1} == expected
    options = OptimOptions(optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.5)
    optimizer = build_optimizer(model, options, undecayed=found)
    decayed = {key for group in optimizer.param_groups if group["weight_decay"] for key in group["param_names"]}
    assert not decayed & expected and decayed
