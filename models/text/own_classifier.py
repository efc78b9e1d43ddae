"""The text classifiers of models/own.py, beside transformers' encoders: with a config, and called as they are.

Tests: tests/unit/models/test_own.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput

from models.blocks import load_backbone
from models.own import TEXT_MODELS
from models.trial import OWN, SOURCE, TRIED, build_tried, require_head_last, try_model
from utils.errors import Exit, UserError, counted, some


class OwnConfig(PreTrainedConfig):
    """config.json of such a model, whose name in models/own.py is `architecture`. transformers alone refuses it."""

    model_type = "models/own.py"
    hidden_size = 128  # what --lr auto takes it for

    def to_dict(self) -> dict[str, Any]:
        """With the digest of today's models/own.py."""
        return super().to_dict() | {"own_source": SOURCE}


AutoConfig.register(OwnConfig.model_type, OwnConfig)


def build_own_classifier(
    described: OwnConfig, lengths: tuple[int, int], folder: str | None, outputs: Sequence[int] | None, own_head: bool
) -> tuple[nn.Module, list[str]]:
    """The network, tried on texts of the longest length, with the weights in `folder`, if any; and the new ones.

    lengths: tokens of the longest and the shortest text; a new run tries both, any other has 0 for the shortest.
    outputs, what is new: see load_backbone. Raises UserError: 64 if the user's code fails or the weights do not fit, 65
    if own_head and the head's do not fit, 65 or 66 if they cannot be read.
    """
    longest, shortest = lengths
    name, tokens = described.architecture, torch.ones(2, longest, dtype=torch.int64)
    model = build_tried(name, lambda: TEXT_MODELS[name](described.num_labels, described.vocab_size), (tokens, tokens),
                        described.num_labels)
    if shortest:
        require_head_last(name, model, (tokens, tokens))
        try_model(name, model, (tokens[:, :shortest],) * 2, described.num_labels,
                  f"the shortest text has {counted(shortest, 'token')}; {OWN}")
        model.train()
    model.register_forward_pre_hook(_with_mask, with_kwargs=True)
    model.register_forward_hook(lambda model, args, logits: SequenceClassifierOutput(logits=logits))
    from models.vision.weights import read_weights  # imports torchvision

    new = load_backbone(model, read_weights(Path(folder, "model.safetensors"), "--model"), outputs) if folder else []
    if new and own_head:
        raise UserError(f"the weights in {folder} are not for the head that {described.architecture} has in"
                        f" models/own.py ({some(new)}); use the network that they were trained with", Exit.BAD_DATA)
    return model, new


def outputs_for_ids(model: nn.Module, num_tokens: int) -> Tensor:
    """What an own network gives of texts of random tokens, [B, C]."""
    ids = torch.randint(num_tokens, (TRIED, 4), generator=torch.Generator().manual_seed(0))
    mode = model.training
    with torch.no_grad():
        outputs = model.eval()(input_ids=ids).logits
    model.train(mode)
    return outputs


def _with_mask(model: nn.Module, args: tuple, inputs: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor], dict]:
    """input_ids and attention_mask; a batch without padding has none."""
    ids = inputs["input_ids"]
    return (ids, inputs.get("attention_mask", torch.ones_like(ids))), {}
