"""--dropout and --drop-path of torchvision's classifiers, set in the model: many of its functions take no argument.

Source: what torchvision's own arguments `dropout`, `drop_rate` (DenseNet) and `stochastic_depth_prob` do.
"""

from torch import nn
from torchvision.ops import StochasticDepth

from utils.errors import UserError


def set_dropout(model: nn.Module, probability: float) -> None:
    """Every dropout but that of attention weights. Raises UserError (64) if the model has none."""
    found = 0
    for part in model.modules():
        if isinstance(part, nn.MultiheadAttention):  # its attribute is about attention weights
            continue
        name = "p" if isinstance(part, nn.Dropout) else "dropout" if hasattr(part, "dropout") else "drop_rate"
        if isinstance(getattr(part, name, None), float | int):
            setattr(part, name, probability)
            found += 1
    if not found:
        raise UserError("--dropout: --model has no dropout; leave it out, or use another --model (mobilenet_v3_small,"
                        " efficientnet_b0 and vit_b_16 have one)")


def set_drop_path(model: nn.Module, probability: float) -> None:
    """Stochastic depth (Huang et al., 2016): `probability` at the last block, the others in torchvision's proportions.

    Raises UserError (64) if the model has none.
    """
    paths = [part for part in model.modules() if isinstance(part, StochasticDepth)]
    if not paths:
        raise UserError("--drop-path: --model has no stochastic depth; leave it out, or use another --model"
                        " (efficientnet, convnext and swin have one)")
    largest = max(part.p for part in paths)
    for part in paths:
        part.p = probability * part.p / largest
