"""A linear model on frozen features, fitted exactly: the head that fine-tuning begins with.

Its L2 is the best of four by five folds, which are whole groups and spread over classes. Everything in float64 on one
thread, so that equal features give equal bits. Source of the idea: Kumar et al., 2022 (LP-FT).
Legend: N samples, D features, R = min(N, D), C outputs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FOLDS, LEAST = 5, 10  # fewer samples than LEAST are not cut into folds
# L2 per sample where the mean square of centred features is 1, from the strongest, from which each next one goes on
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)
USUAL = 1e-2  # without folds
ITERATIONS, TOLERANCE = 200, 1e-6  # of a fit: gradients below it end it
MOST_WORK = 2 * 10**7  # N x R x C, or N x R x R / 500 for the axes: about 10 s on one core
Losses = Callable[[Tensor, Tensor], Tensor]  # logits [N, C], labels -> [N], as a training counts them


class LinearHead(NamedTuple):
    """What was fitted."""

    weight: Tensor  # [C, D] float64
    bias: Tensor  # [C] float64
    held_out: Tensor | None  # [N, C] float64: outputs for each sample of the fit that did not see it; None: no folds


def is_too_much(num_samples: int, num_features: int, num_outputs: int) -> bool:
    """Whether a fit would take longer than some seconds: by arithmetic, the same on any machine."""
    size = min(num_samples, num_features)
    return num_samples * size * max(num_outputs, size / 500) > MOST_WORK


def fit_head(features: Tensor, labels: Tensor, num_outputs: int, losses: Losses, groups: np.ndarray | None = None
             ) -> LinearHead:
    """Minimize the mean of losses + L2. features: [N, D]. labels: as `losses` takes them. groups: [N] integers."""
    with _one_thread():
        # Centred, of mean square 1, and turned to as many axes as there are samples: the same minimum, sooner.
        features = features.double()
        mean = features.mean(dim=0)
        scale = (features - mean).square().sum(dim=1).mean().sqrt().clamp(min=1e-12)
        axes, sizes, turn = torch.linalg.svd((features - mean) / scale, full_matrices=False)
        turned = axes * sizes                                               # [N, R]

        # the L2 with the fewest errors on held-out samples, then with the lowest loss
        held_out, penalty, folds = None, USUAL, folds_of(labels, groups)
        if len(features) >= LEAST and (folds != folds[0]).any():
            by_penalty = _held_out(turned, labels, num_outputs, losses, folds)
            errors = {each: (1 - share_right(outputs, labels), float(losses(outputs, labels).mean()))
                      for each, outputs in by_penalty.items()}
            penalty = min(errors, key=errors.get)
            held_out = by_penalty[penalty]
        fitted = _fit(turned, labels, losses, penalty, torch.zeros(num_outputs, turned.shape[1] + 1).double())
        weight = fitted[:, :-1] @ turn / scale                              # [C, D]
        return LinearHead(weight, fitted[:, -1] - weight @ mean, held_out)


def mean_over_tokens(hidden: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """[B, D] of [B, T, D], an encoder's last layer, without padding. inputs: of the encoder."""
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))[:, :, None].to(hidden.device)
    return (hidden * mask).sum(dim=1) / mask.sum(dim=1)


def share_right(outputs: Tensor, labels: Tensor) -> float:
    """Of N samples with one class each: how many have the largest output there. 0 for labels of another kind."""
    return float((outputs.argmax(dim=1) == labels).double().mean()) if labels.ndim == 1 else 0.0


def folds_of(labels: Tensor, groups: np.ndarray | None = None) -> Tensor:
    """[N] int64: the fold of each sample. Groups stay whole; else those of a class are spread evenly."""
    units = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1]
    order = torch.randperm(int(units.max()) + 1, generator=torch.Generator().manual_seed(0))
    if groups is None and labels.ndim == 1:
        order = order[labels[order].argsort(stable=True)]
    fold = torch.empty_like(order)
    fold[order] = torch.arange(len(order)) % FOLDS
    return fold[torch.from_numpy(units)]


def _held_out(features: Tensor, labels: Tensor, num_outputs: int, losses: Losses, folds: Tensor) -> dict[float, Tensor]:
    """By L2: [N, C] outputs for each sample of the fit on the other folds."""
    found = {penalty: torch.zeros(len(features), num_outputs).double() for penalty in PENALTIES}
    for fold in folds.unique().tolist():
        is_in = folds == fold
        params = torch.zeros(num_outputs, features.shape[1] + 1).double()
        for penalty in PENALTIES:
            params = _fit(features[~is_in], labels[~is_in], losses, penalty, params)
            found[penalty][is_in] = _outputs(params, features[is_in])
    return found


def _fit(features: Tensor, labels: Tensor, losses: Losses, penalty: float, begin: Tensor) -> Tensor:
    """[C, R + 1]: weights and, last, the bias, which has no L2; from `begin`."""
    params = begin.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([params], max_iter=ITERATIONS, tolerance_grad=TOLERANCE,
                                  line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        optimizer.zero_grad()
        value = losses(_outputs(params, features), labels).mean() + penalty / 2 * params[:, :-1].square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(objective)
    return params.detach()


def _outputs(params: Tensor, features: Tensor) -> Tensor:
    return features @ params[:, :-1].T + params[:, -1]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
