"""Optimizers, and learning rate schedules that are pure functions of (config, step), so that checkpoints hold none of them."""

import math
from collections.abc import Callable

import torch
from torch import nn

from utils.settings.config import OptimOptions


def build_optimizer(model: nn.Module, config: OptimOptions) -> torch.optim.Optimizer:
    """Fused SGD (Nesterov) or AdamW over the model's named parameters; no weight decay on biases and normalisation layers."""
    norms = {id(weight) for module in model.modules() if isinstance(module, _NORMS) for weight in module.parameters(recurse=False)}
    decayed, others = [], []
    for name, weight in model.named_parameters():
        (others if weight.ndim <= 1 or id(weight) in norms else decayed).append((name, weight))
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0, fused=True)
    if config.momentum:
        for weight in model.parameters():
            # A first step that is skipped (found_inf) would leave uninitialised memory here (torch 2.15); zeros are the same start.
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def build_schedule(config: OptimOptions, total_steps: int) -> Callable[[int], float]:
    """The learning rate of optimizer step 0, 1, ...: linear warm-up to lr, then cosine or linear down to min_lr, or constant."""
    warmup = round(0.05 * total_steps) if config.warmup_steps == "auto" else config.warmup_steps

    def learning_rate(step: int) -> float:
        if step < warmup:
            return config.lr * (step + 1) / (warmup + 1)
        done = (step - warmup) / max(1, total_steps - warmup)  # 0 .. 1
        falls = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
        low = config.lr if config.schedule == "constant" else config.min_lr
        return low + (config.lr - low) * falls[config.schedule]

    return learning_rate


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
