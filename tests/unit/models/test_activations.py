"""models/activations.py: the same bits with and without checkpointed activations; buffers move once."""

from copy import deepcopy

import pytest
import torch
import transformers
from torch import nn

from models.activations import checkpoint_activations
from models.blocks import freeze
from tests.unit.models.test_blocks import bert, vision
from utils.errors import Exit, UserError
from utils.settings.run_options import DeviceOptions
from utils.strategies.buffers import Buffers

torch.set_num_threads(1)
ON = DeviceOptions(checkpoint_activations=True)


def trained(model, inputs, steps=2):
    """Weights, buffers and the last step's gradients after some steps of micro-batches, as train.py computes them."""
    optimizer, buffers = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), Buffers(model)
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        buffers.begin()
        for micro_batch in range(2):
            torch.manual_seed(10 * step + micro_batch)  # dropout, stochastic depth
            output = model(inputs + micro_batch)
            (output if isinstance(output, torch.Tensor) else output.logits).square().mean().backward()
            if micro_batch == 0:
                buffers.keep()
            buffers.restore()
        buffers.commit(torch.tensor(True))
        optimizer.step()
    return model.state_dict() | {f"{name}.grad": param.grad for name, param in model.named_parameters()
                                 if param.grad is not None}


@pytest.mark.rows(1)
@pytest.mark.parametrize("name, side", [
    ("resnet18", 32), ("mobilenet_v3_small", 32), ("squeezenet1_1", 32),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("efficientnet_b0", 32), ("densenet121", 32), ("swin_t", 32), ("convnext_tiny", 32),
        ("shufflenet_v2_x0_5", 32), ("regnet_y_400mf", 32), ("mnasnet0_5", 32), ("googlenet", 32),
        ("maxvit_t", 224)))])
def test_images_have_the_same_bits_with_checkpointed_activations(name, side):
    torch.manual_seed(0)
    steps = 1 if side > 32 else 2
    plain, images = vision(name, **({"input_size": (side, side)} if name == "maxvit_t" else {})), torch.randn(
        2, 3, side, side)
    model = deepcopy(plain)
    checkpoint_activations(model, ON)
    torch.testing.assert_close(trained(model, images, steps), trained(plain, images, steps), rtol=0, atol=0)


@pytest.mark.rows(1)
@pytest.mark.parametrize("what", ["none", 2])
def test_bert_has_the_same_bits_with_checkpointed_activations(what):
    plain, ids = bert(), torch.arange(12).view(3, 4)
    model = deepcopy(plain)
    for each in (plain, model):
        freeze(each, what)
    checkpoint_activations(model, ON)
    torch.testing.assert_close(trained(model, ids), trained(plain, ids), rtol=0, atol=0)


def test_blocks_compute_twice_in_training_and_once_in_evaluation():
    model, images, passes = vision("resnet18"), torch.randn(2, 3, 32, 32), []
    checkpoint_activations(model, ON)
    model.layer1[0].conv1.register_forward_hook(lambda *args: passes.append(None))
    model(images).sum().backward()
    assert len(passes) == 2
    with torch.no_grad():
        model.eval()(images)
    assert len(passes) == 3


@pytest.mark.parametrize("build", [
    lambda: vision("alexnet"),
    lambda: transformers.AutoModelForSequenceClassification.from_config(
        transformers.XLMConfig(n_layers=2, emb_dim=16, n_heads=2, vocab_size=50)), lambda: nn.Linear(2, 2)])
def test_a_model_without_blocks_is_refused(build):
    with pytest.raises(UserError, match=r"--checkpoint-activations: .*leave it out") as error:
        checkpoint_activations(build(), ON)
    assert error.value.code == Exit.USAGE


def test_torch_compile_beside_it_is_refused_for_images():
    """Once torch.compile takes a context_fn, this may go."""
    with pytest.raises(UserError, match=r"leave --compile out"):
        checkpoint_activations(vision("resnet18"), DeviceOptions(checkpoint_activations=True, compile=True))


def test_without_the_setting_a_model_stays_as_it_is():
    model = nn.Linear(2, 2)
    checkpoint_activations(model, DeviceOptions())
    assert "forward" not in vars(model)
