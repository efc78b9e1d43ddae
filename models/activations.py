"""Activation checkpointing: a block keeps its input alone, and computes its activations again in the backward pass.

It takes less memory and about a third more time, and changes no bit of the gradient on the CPU. Source: Chen et al.,
2016, torch.utils.checkpoint. What the second pass of a block must not do is move BatchNorm's statistics again, or draw
another dropout; torch restores the generators for it.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.blocks import blocks_of
from utils.errors import UserError
from utils.settings.run_options import DeviceOptions


def checkpoint_activations(model: nn.Module, config: DeviceOptions) -> None:
    """Checkpoint every block of `model` while it trains, if `config` says so.

    Raises UserError (64) for a model without blocks, and for what torch.compile cannot follow.
    """
    if not config.checkpoint_activations:
        return
    if hasattr(model, "gradient_checkpointing_enable"):  # transformers
        try:
            with warnings.catch_warnings(action="ignore"):  # it has another name and other words in transformers 6
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:
            raise UserError(f"--checkpoint-activations: {error}; leave it out, or use another --model") from None
        return
    composed = [part for block in blocks_of(model) for part in block.parts
                if any(True for _ in part.children()) and any(True for _ in part.parameters())]
    if not composed:
        raise UserError("--checkpoint-activations: --model has no blocks of several layers; leave it out, or use"
                        " another --model")
    if config.compile:  # torch 2.15: "checkpoint not implemented for context_fn", which spares the statistics
        raise UserError("--checkpoint-activations: torch.compile cannot follow it in image models; leave --compile out")
    for part in composed:
        part.forward = partial(_forward, part, part.forward)


def _forward(part: nn.Module, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if not (part.training and torch.is_grad_enabled()):
        return forward(*args, **options)
    args = [list(arg) if isinstance(arg, list) else arg for arg in args]  # DenseNet appends to its list afterwards
    return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _OnCopies(part)),
                      **options)


class _OnCopies(AbstractContextManager):
    """`module` computes with copies of its buffers, which are forgotten; once for each backward pass of a graph."""

    def __init__(self, module: nn.Module):
        self._module = module

    def __enter__(self) -> None:
        self._own = [(part, part._buffers) for part in self._module.modules() if part._buffers]
        for part, buffers in self._own:
            part._buffers = {name: buffer if buffer is None else buffer.clone() for name, buffer in buffers.items()}

    def __exit__(self, *error: object) -> None:
        for part, buffers in self._own:
            part._buffers = buffers
