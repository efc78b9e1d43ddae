"""torch.compile with the settings that batches of texts need."""

import os
import shlex
import shutil

import torch
from torch import nn

from utils.errors import UserError

MAX_VARIANTS = 64  # training or not; padded, packed or neither; sizes fixed, free or 1: 37 were seen; torch allows 8


def require_compiler(kind: str) -> None:
    """Raise UserError (64) if torch.compile would find no compiler. kind: of device; triton wants one for C."""
    variable, usual = ("CXX", ("g++",)) if kind == "cpu" else ("CC", ("gcc", "clang"))
    names = shlex.split(os.environ.get(variable, ""))[:1] or usual
    if not any(map(shutil.which, names)):
        raise UserError(f"--compile needs a compiler, and there is no {' and no '.join(names)}; install one, or leave"
                        " --compile out")


def compile_model(model: nn.Module) -> None:
    """Compile the model at its first call, and again for a batch that no compiled variant fits.

    After MAX_VARIANTS torch computes such batches without compiling, with other dropout masks. The model's own hooks
    are compiled with it: otherwise each variant of a masked LM would have one number of predicted tokens.
    """
    torch.compiler.config.recompile_limit = MAX_VARIANTS
    torch.compiler.config.wrap_top_frame = True
    model.compile()
