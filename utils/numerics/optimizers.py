"""Optimizers that can skip a step, and learning rate schedules.

A schedule is a pure function of (settings, step), so checkpoints hold no schedule.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from utils.settings.run_options import OptimOptions


def build_optimizer(model: nn.Module, config: OptimOptions, lr_factors: Mapping[str, float] | None = None,
                    undecayed: Collection[str] = ()) -> torch.optim.Optimizer:
    """Fused AdamW, Adam (L2 weight decay) or SGD (Nesterov) over named parameters.

    No weight decay on biases, normalisation layers, and the parameters whose names are `undecayed`. model: on its
    device, and sharded if the strategy does that.
    lr_factors: what set_lr multiplies the learning rate of a parameter by, by its name; 1 for the others.
    """
    norms = {id(param) for part in model.modules() if isinstance(part, _NORMS) for param in part.parameters(False)}
    alike: dict[tuple[bool, float], list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        key = (param.ndim <= 1 or id(param) in norms or name in undecayed, (lr_factors or {}).get(name, 1.0))
        alike.setdefault(key, []).append((name, param))
    groups = [{"params": params, "weight_decay": 0.0 if has_no_decay else config.weight_decay, "lr_factor": factor}
              for (has_no_decay, factor), params in sorted(alike.items())]
    if config.optimizer == "sgd":
        is_sharded = any(hasattr(param, "to_local") for param in model.parameters())  # a DTensor
        kind = _ShardedSGD if is_sharded else torch.optim.SGD
        optimizer = kind(groups, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0, fused=True)
        for param in (param for param in model.parameters() if config.momentum and param.requires_grad):
            # torch 2.15 would leave uninitialised memory here if the first step is skipped; zeros are the same start.
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    else:
        kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
        optimizer = kind(groups, lr=config.lr, betas=config.betas, fused=True)
    require_skippable(optimizer)
    return optimizer


_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class _ShardedSGD(torch.optim.SGD):
    """SGD of this rank's parts of sharded parameters: torch 2.15 has fused Adam for DTensors, but no fused SGD."""

    def step(self, closure: None = None) -> None:
        """One step of torch's optimizer on the parts, which share their memory with the DTensors."""
        whole, state = [group["params"] for group in self.param_groups], self.state
        self.state = defaultdict(dict)  # of the parts; what a step adds is lost, so build_optimizer gives all momenta
        for group in self.param_groups:
            group["params"] = [self._part_of(param, state.get(param, {})) for param in group["params"]]
        try:
            super().step()  # in place
        finally:
            self.state = state
            for group, params in zip(self.param_groups, whole, strict=True):
                group["params"] = params

    def _part_of(self, param: nn.Parameter, state: Mapping[str, Tensor]) -> Tensor:
        part = param.detach().to_local()
        part.grad = None if param.grad is None else param.grad.to_local()
        self.state[part] = {name: value.to_local() for name, value in state.items()}
        return part


def require_skippable(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if a step of `optimizer` would ignore found_inf, and so apply a gradient that is not finite.

    Source: torch.amp.GradScaler.step asks the same attribute; fused SGD, Adam, AdamW and Adagrad have it.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise TypeError(
            f"{type(optimizer).__name__} ignores found_inf, so it would apply a gradient that is not finite;"
            " use torch's SGD, Adam or AdamW with fused=True")


def warmup_steps(config: OptimOptions, total_steps: int) -> int:
    """How many steps --warmup-steps is."""
    return round(0.05 * total_steps) if config.warmup_steps == "auto" else config.warmup_steps


def build_schedule(config: OptimOptions, total_steps: int) -> Callable[[int], float]:
    """The learning rate of optimizer step 0, 1, ...: linear warm-up to lr, then down to 0, in steps, or constant.

    The thirds of `step` are counted from the start of the run: the warm-up does not move them (Goyal et al., 2017).
    """
    warmup = warmup_steps(config, total_steps)

    def learning_rate(step: int) -> float:
        if step < warmup:
            return config.lr * (step + 1) / (warmup + 1)
        if config.schedule == "step":
            return config.lr * 0.1 ** (3 * step // total_steps)
        done = (step - warmup) / max(1, total_steps - warmup)  # 0 .. 1
        factors = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
        return config.lr * factors[config.schedule]

    return learning_rate


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups: `lr` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
