"""Losses: one per sample or predicted token, never a mean. The task weighs and adds them; the loop divides."""

from torch import Tensor
from torch.nn import functional as F

from utils.settings.run_options import OptimOptions


def classification_losses(logits: Tensor, labels: Tensor, config: OptimOptions, is_training: bool) -> Tensor:
    """[B] cross-entropies, in the dtype of logits [B, C]. labels: [B] int64; smoothed in training only."""
    smoothing = config.label_smoothing if is_training else 0.0
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
