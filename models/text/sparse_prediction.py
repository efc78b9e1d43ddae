"""Masked language modelling without the logits that nobody asks for.

Tests: tests/unit/models/text/test_bert.py
"""

from typing import Any

from torch import Tensor, nn
from transformers.utils import ModelOutput


class SparsePrediction:
    """The output layer for the predicted tokens alone: [P, H] instead of [R, T, H], at 15 % a seventh of the work.

    Gives a masked LM one more argument, `positions`: [P] int64, into the flattened [R x T] tokens; its logits are
    [P, V] then. Source: sparse_prediction of ModernBERT (Warner et al., 2024), here as hooks for any masked LM.
    torch.compile lets the size of an argument vary, and not that of a tensor that it finds in an attribute; for it
    the hooks are compiled with the model (utils/hardware/compiling.py).
    """

    def __init__(self) -> None:
        self._positions: Tensor | None = None

    @classmethod
    def add_to(cls, model: nn.Module) -> None:
        """Register the hooks. They are bound methods, so a deep copy of the model has positions of its own."""
        sparse = cls()
        model.register_forward_pre_hook(sparse._take, with_kwargs=True)
        if (output_layer := model.get_output_embeddings()) is not None:
            output_layer.register_forward_pre_hook(sparse._before_output)
        model.register_forward_hook(sparse._after_output)

    def _take(
        self, model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._positions = options.get("positions")
        return args, {name: value for name, value in options.items() if name != "positions"}

    def _before_output(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self._chosen(args[0]), *args[1:])

    def _after_output(self, model: nn.Module, args: tuple[Any, ...], output: ModelOutput) -> None:
        if output.logits.ndim == 3:  # this model does not call its output layer
            output["logits"] = self._chosen(output.logits)
        self._positions = None  # nothing of a batch stays: a copy of the model would copy it, too

    def _chosen(self, values: Tensor) -> Tensor:
        """values: [R, T, ...]. Returns [P, ...], or `values` if the model was called without positions."""
        return values if self._positions is None else values.flatten(0, 1)[self._positions.to(values.device)]
