"""The warm-up: one step that changes nothing and one evaluation batch, before the first step of a start.

Without it a resumed run would differ in bits: DDP lays out its buckets anew after the first backward, and gloo's sums
depend on where in a bucket a gradient lies.

Tests: tests/distributed/test_world.py
"""

import torch
from torch import nn

from engine.attempts import try_evaluation
from engine.step import forward
from engine.training import Training
from utils.cpu.allocator import keep_freed_memory
from utils.errors import UserError, some


def warm_up(t: Training) -> None:
    """Compute the largest micro-batch and one evaluation batch, and change nothing. Collective.

    It freezes parameters that get no gradient, the same ones on all ranks; it lets DDP lay out its buckets; it
    allocates what the optimizer keeps; on the CPU memory that is freed is kept from here on (--cpu-kernels on); and if
    memory runs out, it does so here. Raises UserError (64) for a model that skips layers at random under a strategy
    that cannot sum their gradients.
    """
    if t.world.device.type == "cpu" and t.config.device.cpu_kernels == "on":
        keep_freed_memory()
    module = t.strategy.module
    if t.strategy.needs_every_grad and skips_layers(module):
        raise UserError(f"--model {t.config.model.model} skips layers at random (layerdrop in its config.json), and"
                        f" --strategy {t.config.device.strategy} needs every layer's gradient on every rank: use"
                        " --strategy exact, --strategy ddp --find-unused-parameters, one process, or a layerdrop of 0")
    while True:
        # a step that changes nothing
        module.train()
        size = t.feed.plan.sizes[1]
        for model, micro_batch in t.strategy.accumulate([t.task.example(size)], t.precision.scale):
            (forward(t, model, micro_batch, step=0) / size * t.precision.scale).backward()
        t.precision.void_step(t.state.optimizer)

        # parameters without a gradient
        params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        without = {name: param for name, param in params.items() if param.grad is None}
        t.state.optimizer.zero_grad(set_to_none=True)
        module.eval()
        if not without or not (unused := names_unused(t, without)):
            break
        t.log.note(f"{len(unused)} parameters get no gradient and are frozen: {some(unused)}")
        for name in unused:
            without[name].requires_grad_(False)
        t.strategy.setup(t.feed.plan.num_micro_batches)  # Collective.
    t.strategy.require_all_grads()

    try_evaluation(t, module, t.evaluation.eval_batch)


def names_unused(t: Training, without: dict[str, nn.Parameter]) -> list[str]:
    """Of parameters without a gradient in training mode, those without one in evaluation mode, which skips no layer."""
    loss = forward(t, t.strategy.module, t.task.example(t.feed.plan.sizes[1]).to(t.world.device), step=0)
    gradients = torch.autograd.grad(loss, list(without.values()), allow_unused=True)
    return [name for name, gradient in zip(without, gradients, strict=True) if gradient is None]


def skips_layers(module: nn.Module) -> bool:
    """Whether a transformers model leaves out layers at random in training: a layerdrop above 0 in its config."""
    config = getattr(module, "config", None)
    return config is not None and any(name.endswith("layerdrop") and value for name, value in vars(config).items())
