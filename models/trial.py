"""A model that someone else wrote is tried before a run begins: what is wrong with it is one message.

Tests: tests/unit/models/test_own.py
"""

import copy
import hashlib
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn

from models.blocks import last_layers, watch_features
from utils.errors import UserError, first_line

TRIED = 16  # random inputs
FILE = Path(__file__).with_name("own.py")
OWN = "correct it in models/own.py"  # the way out for a network there
SOURCE = hashlib.sha256(FILE.read_bytes()).hexdigest()[:16]  # for RUN/model, which knows its network by name alone


def require_own() -> None:
    """Raise UserError (64) if models/own.py, which each run imports, cannot be imported."""
    try:
        import_module("models.own")
    except Exception as error:  # whatever another's code raises
        raise UserError(f"models/own.py cannot be imported: {_reason(error)}; {OWN}") from None


def _reason(error: Exception) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(FILE)]
    place = f" (models/own.py line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {first_line(error)}{place}"


def build_tried(
    name: str, build: Callable[[], nn.Module], inputs: tuple[Tensor, ...], num_outputs: int, way_out: str = OWN
) -> nn.Module:
    """The model that build() returns, in training mode, tried on `inputs` of B samples. name: of --model.

    Raises UserError (64), which ends with `way_out`, if that fails, or gives anything but [B, num_outputs].
    """
    try:
        model = build()
        if not isinstance(model, nn.Module):
            raise TypeError(f"the function returns {model!r}, which is no torch.nn.Module")
    except UserError:
        raise
    except OSError as error:  # it reads a file
        raise UserError(f"--model {name} cannot be built: {_reason(error)}; a network that reads its weights itself"
                        " needs that file whenever it is used: give them with --weights FILE instead, once, and"
                        f" RUN/model has them; {way_out}") from None
    except Exception as error:  # whatever another's code raises
        raise UserError(f"--model {name} cannot be built: {_reason(error)}; {way_out}") from None
    try_model(name, model, inputs, num_outputs, way_out)
    return model.train()


def try_model(name: str, model: nn.Module, inputs: tuple[Tensor, ...], num_outputs: int, way_out: str = OWN) -> None:
    """Try the model, which stays in evaluation mode. Raises UserError (64) as build_tried does."""
    try:
        with torch.no_grad():
            output = nn.Module.eval(model)(*inputs)
    except Exception as error:
        raise UserError(f"--model {name} fails on an input of {[*inputs[0].shape]}: {_reason(error)}; {way_out}"
                        ) from None
    if getattr(output, "shape", None) != (len(inputs[0]), num_outputs):
        raise UserError(f"--model {name} gives {getattr(output, 'shape', type(output).__name__)} where"
                        f" {[len(inputs[0]), num_outputs]} is needed, a number for each sample and output; {way_out}")


def notes_on_images(name: str, model: nn.Module, shape: Sequence[int]) -> list[str]:
    """What a network for images does that costs accuracy without an error. shape: [C, H, W] of an image."""
    images = torch.randn(TRIED, *shape, generator=torch.Generator().manual_seed(0))
    model = nn.Module.eval(copy.deepcopy(model))
    seen = watch_features(model)  # a new head may be 0, and hide what is below it

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(images)
        return (seen.pop() if seen else outputs), outputs

    with torch.no_grad():
        together, outputs = run(images)
        try:
            alone = torch.cat([run(image[None])[0] for image in images])
            depends = bool((together - alone).norm() > 1e-3 * alone.norm())
        except Exception:  # whatever another's code raises: it cannot take one alone
            depends = True
    words = (f"--model {name}: what it predicts for an image depends on the images beside it, also in an evaluation, as"
             " BatchNorm does without running statistics; so figures depend on --eval-batch-size, and predictions on"
             " their --batch-size")
    return [words] * depends + notes_on_outputs(name, outputs)


def notes_on_outputs(name: str, outputs: Tensor) -> list[str]:
    """Whether a network ends in a softmax. outputs: [B, C], of B different samples."""
    is_of_softmax = outputs.shape[1] > 1 and bool((outputs >= 0).all() and (outputs.sum(dim=1) - 1).abs().max() < 1e-3)
    return [f"--model {name} seems to end in a softmax: its outputs add up to 1 for each input, and they are taken for"
            " logits, or for numbers of a regression; leave it out"] * is_of_softmax


def require_head_last(name: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Raise UserError (64) if another layer than the last one that is assigned comes last in the model's forward.

    blocks.py takes that one for the head. It is not judged if it is not called as a module.
    """
    called: dict[str, None] = {}  # layers with parameters, in the order of their first call
    hooks = [layer.register_forward_pre_hook(lambda *_, layer=each: called.setdefault(layer))
             for each, layer in model.named_modules() if not isinstance(layer, torch.jit.ScriptModule)
             and any(True for _ in layer.parameters(recurse=False))]
    with torch.no_grad():
        nn.Module.eval(model)(*inputs)
    for hook in hooks:
        hook.remove()
    model.train()
    head, *_ = last_layers(model)
    if head in called and head != [*called][-1]:
        raise UserError(f"--model {name}: {head} is the last layer that is assigned, and {[*called][-1]} the last in"
                        " the forward; assign the output layer last, because --freeze, --layer-decay and other classes"
                        f" take that one for the head; {OWN}")
