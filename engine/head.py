"""The head of a new run: fitted to what the pretrained weights give, before the first step (models/linear_head.py).

Fine-tuning begins where a linear model on frozen features ends, and the run's best model is never worse on val. The
features are those of the training samples as an evaluation sees them; each is computed by one rank, and rank 0 fits.

Tests: tests/contracts/test_fitted_head.py
"""

import math
import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from data.loader import BadSamples, build_loader, num_workers
from data.sampler import EvaluationSampler
from engine.records.log import figure
from engine.start import Start
from models.blocks import keep_statistics, last_layers
from models.linear_head import FOLDS, fit_head, is_too_much, mean_over_tokens, share_right
from utils.errors import UserError, counted
from utils.rundir.resolved import UNSET
from utils.rundir.state import TrainState
from utils.strategies.base import Strategy

LARGEST = 1000.0  # norm of a head; those of good features have 1 to 20, and one of 70,000 destroyed what is below it


def resolve_head(start: Start, model: nn.Module) -> None:
    """--head-init as the run keeps it: features, or random. Below a fitted head BatchNorm keeps its statistics.

    Before a strategy wraps the model. Raises UserError (64).
    """
    given, run = start.config.optim.head_init, start.run
    if run.resolved.head_init is UNSET and (reason := _reason_against(start, model)):
        if given == "features":
            raise UserError(f"--head-init features: {reason}; leave it out")
        if start.task.has_new_head and given == "auto":
            run.note(f"the head starts at random: {reason}")
        run.keep(head_init="random")
    if run.resolve("head_init", given, lambda: "features") == "features":
        keep_statistics(model)


def _reason_against(start: Start, model: nn.Module) -> str:
    """Why no head is fitted, in words; "" where one is."""
    task, layer = start.task, _head_of(model)[1]
    if not task.has_new_head:
        return "there is no new head on pretrained weights"
    if task.objective is None:
        return "this task has no labels"
    if layer is None:
        return f"--model {start.config.model.model} does not end in one linear layer with a bias"
    if is_too_much(len(task.train_set), layer.in_features, layer.out_features):
        return (f"a fit to {len(task.train_set)} samples of {layer.in_features} features, for {layer.out_features}"
                " outputs, would take long")
    return ""


def _head_of(model: nn.Module) -> tuple[str, nn.Linear | None]:
    """The last layer, by its name; None if it is not one linear layer with a bias."""
    names = last_layers(model)
    layer = model.get_submodule(names[0])
    is_linear = len(names) == 1 and isinstance(layer, nn.Linear) and layer.bias is not None
    return names[0], layer if is_linear else None


def begin_with_features(start: Start, state: TrainState, eval_batch: int, is_new: bool, total_steps: int) -> None:
    """In a new run with --head-init features: fit the head, load it on every rank, let step 0 be evaluated. Collective.

    But an --eval-every longer than the run means its end alone. Raises UserError on every rank: 65 for a sample that
    cannot be read, 64 if --head-init features is given and nothing can be fitted.
    """
    if not is_new or start.run.resolved.head_init != "features":
        return

    # features; a fit on rank 0
    world, strategy, began = start.world, state.strategy, time.monotonic()
    frozen = _features(start, strategy, eval_batch)  # Collective.
    weights = strategy.model_state()  # Collective.
    start.watchdog.enter("fitting the head", start.config.faults.section_timeout)
    words, yardstick = world.on_rank_zero(  # Collective.
        lambda: _fit(start, frozen, _head_of(strategy.module)[0], weights), takes_long=True)
    if yardstick is not None:
        start.run.keep(yardstick=yardstick)
    if words is None:
        reason = "its features are not finite, of each token, or hardly differ between samples"
        if start.config.optim.head_init == "features":
            raise UserError(f"--head-init features: no head can be fitted, because {reason}; leave it out")
        start.run.note(f"the head starts at random, because {reason}")
        return

    # the same head on every rank
    start.watchdog.enter("starting", math.inf)
    strategy.load_model_state(world.broadcast_nest(weights, strategy.is_split))  # Collective.
    state.averages.load({})
    if (every := start.config.record.eval_every) == "epoch" or every <= total_steps:
        state.progress = replace(state.progress, evaluated_step=-1)
    start.run.note(f"frozen features, linear head: {words}{counted(len(frozen.features), 'sample')},"
                   f" {time.monotonic() - began:.0f} s; the training begins with it at step 0")


class Frozen(NamedTuple):
    """What the model knows of the samples that can be read."""

    features: Tensor  # [N, D] float32: what the last layer sees
    means: Tensor  # [N, H] float32: of an encoder's last layer over the tokens; H = 0 without an encoder
    labels: Tensor  # as in Batch
    indices: Tensor  # [N] int64, of the samples in train_set


@torch.no_grad()
def _features(start: Start, strategy: Strategy, eval_batch: int) -> Frozen:
    """A pass over train_set in the batches of an evaluation. Collective. Raises UserError (65)."""
    # how samples are read
    config, world, task = start.config, start.world, start.task
    model, samples, layer = strategy.module.eval(), task.unaugmented, _head_of(strategy.module)[1]
    bad_samples = BadSamples(config.data.bad_samples, start.run.path / "bad_samples.txt")
    sampler = EvaluationSampler(len(samples), eval_batch, world.rank, world.world_size)
    workers, limit_s = num_workers(config.data.workers, world), config.faults.section_timeout
    loader = build_loader(samples, task.collate, sampler, workers, world)

    # one rank has the row of a sample, and the others hold zeros
    features, is_read, labels = torch.zeros(len(samples), layer.in_features), torch.zeros(len(samples)), None
    encoder = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
    means = torch.zeros(len(samples), getattr(getattr(encoder, "config", None), "hidden_size", 0))
    seen: dict[str, Tensor] = {}
    hooks = [layer.register_forward_pre_hook(lambda layer, inputs: seen.update(features=inputs[0]))]
    if means.shape[1]:
        hooks.append(encoder.register_forward_hook(lambda encoder, inputs, outputs: seen.update(hidden=outputs[0])))
    for batch in start.watchdog.watch(loader, "features", limit_s, limit_s, loader.dataset.reading):
        batch = bad_samples.check(batch)
        with start.precision.autocast():
            task.forward(model, batch.to(world.device))
        if labels is None:
            labels = torch.zeros(len(samples), *batch.labels.shape[1:], dtype=batch.labels.dtype)
        if batch.indices:  # consecutive ones; a surplus batch has none
            place = slice(batch.indices[0], batch.indices[-1] + 1)
            is_usual = seen["features"].shape == features[place].shape  # not of each token, say
            features[place] = seen["features"].float().cpu() if is_usual else torch.nan
            labels[place], is_read[place] = batch.labels, batch.sample_weight
            if "hidden" in seen:
                means[place] = mean_over_tokens(seen["hidden"].float().cpu(), batch.inputs)
    for hook in hooks:
        hook.remove()
    if any(world.gather(bad_samples.has_stopped())):  # Collective.
        bad_samples.stop(world)  # Collective; raises UserError (65) on every rank.
    features, means, labels, is_read = map(world.all_reduce_sum, (features, means, labels, is_read))  # Collective.
    indices = is_read.nonzero()[:, 0]
    return Frozen(features[indices], means[indices], labels[indices], indices)


def _fit(start: Start, frozen: Frozen, name: str, weights: dict[str, Tensor]) -> tuple[str | None, float | None]:
    """Fit the head, and replace that of the layer `name` in `weights` by it. Rank 0.

    Returns what it reaches on held-out samples, in words, or None if there is nothing to fit, or the gradients of its
    features would be huge; and top1 of a head on the means over tokens, which RUN/model could not be saved with.
    """
    task, (features, means, labels, indices) = start.task, frozen
    if not (len(features) and features.isfinite().all()):
        return None, None
    groups = task.groups(of_train=True)
    fit = partial(fit_head, labels=labels, num_outputs=len(task.classes),
                  losses=partial(task.objective.losses, is_training=True),
                  groups=None if groups is None else np.array(groups)[indices.numpy()])
    head = fit(features)
    if head.weight.norm() > LARGEST:
        return None, None
    weights |= {f"{name}.{param}": value.to(weights[f"{name}.{param}"])
                for param, value in (("weight", head.weight), ("bias", head.bias))}
    if head.held_out is None:
        return "", None
    if task.best != "top1":
        loss = float(task.objective.losses(head.held_out, labels, is_training=False).mean())
        return f"loss {figure(task, 'loss', loss)} by {FOLDS} folds, ", None
    words = f"top1 {figure(task, 'top1', share_right(head.held_out, labels))} by {FOLDS} folds, "
    if not (means.shape[1] and means.isfinite().all()):
        return words, None
    yardstick = share_right(fit(means).held_out, labels)
    return f"{words}{figure(task, 'top1', yardstick)} on the mean over tokens, ", yardstick
