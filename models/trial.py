"""A model that someone else wrote is tried before a run begins: what is wrong with it is one message."""

import hashlib
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn

from utils.errors import UserError, first_line

FILE = Path(__file__).with_name("own.py")
OWN = "correct it in models/own.py"  # the way out for a network there


def own_source() -> str:
    """A digest of models/own.py, for RUN/model, which knows its network by name alone."""
    return hashlib.sha256(FILE.read_bytes()).hexdigest()[:16]


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
    except Exception as error:  # whatever another's code raises
        raise UserError(f"--model {name} cannot be built: {_reason(error)}; {way_out}") from None
    try_model(name, model, inputs, num_outputs, way_out)
    return model.train()


def try_model(name: str, model: nn.Module, inputs: tuple[Tensor, ...], num_outputs: int, way_out: str = OWN) -> None:
    """Try the model in evaluation mode, in which it stays. The rest: as build_tried."""
    try:
        with torch.no_grad():
            output = nn.Module.eval(model)(*inputs)
    except Exception as error:
        raise UserError(f"--model {name} fails on an input of {[*inputs[0].shape]}: {_reason(error)}; {way_out}"
                        ) from None
    if getattr(output, "shape", None) != (len(inputs[0]), num_outputs):
        raise UserError(f"--model {name} gives {getattr(output, 'shape', type(output).__name__)} where"
                        f" {[len(inputs[0]), num_outputs]} is needed, a number for each sample and output; {way_out}")


def require_order(name: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Raise UserError (64) if a forward does not come to the model's children in the order in which they stand.

    blocks.py goes by that order: the last layer is the head. A child that is not called as a module is not judged.
    """
    called: dict[str, None] = {}
    hooks = [part.register_forward_pre_hook(lambda *_, child=child: called.setdefault(child))
             for child, parts in model.named_children() if any(True for _ in parts.parameters())
             for part in parts.modules()]
    with torch.no_grad():
        nn.Module.eval(model)(*inputs)
    for hook in hooks:
        hook.remove()
    model.train()
    standing = [child for child, _ in model.named_children() if child in called]
    if standing != [*called]:
        raise UserError(f"--model {name} assigns its layers in the order {', '.join(standing)}, and its forward comes"
                        f" to them in the order {', '.join(called)}; assign them in this one, because the last layer"
                        f" is what is new for other classes, and --freeze and --layer-decay count; {OWN}")
