"""A model that someone else wrote is tried before a run begins: what is wrong with it is one message."""

import traceback
from collections.abc import Callable

import torch
from torch import Tensor, nn

from models import own
from utils.errors import UserError, first_line

OWN = "correct it in models/own.py"  # the way out for a network there


def build_tried(
    name: str, build: Callable[[], nn.Module], inputs: tuple[Tensor, ...], num_outputs: int, way_out: str = OWN
) -> nn.Module:
    """The model that build() returns, in training mode, tried on `inputs` of B samples. name: of --model.

    Raises UserError (64), which ends with `way_out`, if that fails, or gives anything but [B, num_outputs].
    """
    try:
        model = build()
        with torch.no_grad():
            output = nn.Module.eval(model)(*inputs)  # a TypeError if it is no Module
    except UserError:
        raise
    except Exception as error:  # whatever another's code raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own.__file__]
        place = f" (models/own.py line {lines[-1]})" if lines else ""
        raise UserError(f"--model {name} fails on an input of {[*inputs[0].shape]}: {type(error).__name__}:"
                        f" {first_line(error)}{place}; {way_out}") from None
    if getattr(output, "shape", None) != (len(inputs[0]), num_outputs):
        raise UserError(f"--model {name} gives {getattr(output, 'shape', type(output).__name__)} where"
                        f" {[len(inputs[0]), num_outputs]} is needed, a number for each sample and output; {way_out}")
    return model.train()
