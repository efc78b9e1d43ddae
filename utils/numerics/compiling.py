"""torch.compile, told what batches of texts need."""

import torch
from torch import nn

MAX_VARIANTS = 64  # of a model: training or evaluating, padded or not, one size or any; torch's 8 are too few


def compile_model(model: nn.Module) -> None:
    """Have the model compiled at its first batches, and again at the first of another kind.

    After MAX_VARIANTS torch computes without compiling, and its dropout masks are others then. Hooks are compiled, too:
    outside, the number of predicted tokens of a masked LM would be a constant, and each number one more variant.
    """
    torch.compiler.config.recompile_limit = MAX_VARIANTS
    torch.compiler.config.wrap_top_frame = True
    model.compile()
