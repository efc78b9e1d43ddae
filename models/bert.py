"""Text encoders: BERT in four sizes from scratch, or any transformers encoder from a folder; classifiers, masked LMs.

Folders are read without running their code, and weights as safetensors only. Names on the hub: models/hub.py.
Legend: B samples, T tokens, P predicted tokens, H hidden size, V vocabulary, C classes.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import eager_mask, sdpa_mask

from data.tokenizer import is_special, without_ends
from models.blocks import in_head
from models.objectives import DESCRIBED
from utils.errors import Exit, UserError, counted, first_line, some
from utils.settings.text_options import SIZES, TextModelOptions

MAX_PADDING = 1024  # tokens: vocabularies of models are rounded up for speed

transformers.logging.set_verbosity_error()  # the messages about missing weights are those below
transformers.logging.disable_progress_bar()


@dataclass(frozen=True)
class EncoderSpec:
    """What a task needs of its model."""

    head: type  # transformers' AutoModelFor...: an encoder with the head of the task
    tokenizer: PreTrainedTokenizerBase
    max_length: int  # tokens in a sample
    classes: tuple[str, ...]  # in label order; empty without labels
    own_head: bool = False  # weights that are loaded bring their head, and its classes must be these


def build_encoder(spec: EncoderSpec, config: TextModelOptions, folder: str | None, weights: str | None) -> nn.Module:
    """The model on the CPU, in float32; fresh weights come from torch's default generator.

    folder: with its config, None for one of SIZES. weights: the folder whose weights are loaded, if any.
    Raises UserError: 64 if tokenizer, length or weights do not fit, 66 if the folder holds no such model.
    """
    # its config
    if config.pretrained and folder is None:
        raise UserError(f"--pretrained: --model {config.model} is built from scratch; name a model folder, or a"
                        " transformers name")
    described = _describe(config.model, folder, spec)
    if config.dropout is not None:
        _set_dropout(described, config)

    # vocabulary
    num_tokens, known = len(is_special(spec.tokenizer)), getattr(described, "vocab_size", None)
    if known is None:
        raise UserError(f"--model {config.model} does not suit this task: {described.model_type} has no vocabulary; use"
                        " a text encoder, such as bert-small")
    if num_tokens > known or (config.pretrained and known - num_tokens > MAX_PADDING):
        raise UserError(f"--model {config.model} has {known} tokens and the tokenizer has {num_tokens}: they do not"
                        " match; leave --tokenizer out, or train from scratch with --model bert-small")

    # classes
    id2label, classes = described.id2label or {}, list(spec.classes)
    labels = [id2label[index] for index in sorted(id2label)]
    has_same_classes = not classes or labels == classes
    outputs = outputs_of(labels, classes) if weights and spec.own_head and classes else None
    if classes:
        described.id2label = dict(enumerate(classes))
        described.label2id = {name: index for index, name in enumerate(classes)}
        described.problem_type = "single_label_classification"

    # the model
    try:
        if weights:
            model = _load(spec, weights, described, config.model)
        else:
            model = spec.head.from_config(described, dtype=torch.float32)
    except UserError:
        raise
    except ValueError:
        raise UserError(f"--model {config.model} does not suit this task: transformers has no {spec.head.__name__} for"
                        f" {described.model_type}; use another encoder, such as bert-small") from None
    if outputs:
        _reorder_head(model, outputs)
    elif weights and not has_same_classes:
        _reset_head(model)
    if spec.max_length > (limit := _max_tokens(model)):
        raise UserError(f"--max-length {spec.max_length}: --model {config.model} takes at most {limit} tokens")
    return model


def _max_tokens(model: nn.Module) -> float:
    """The longest input: by the table of positions, else by the config. Some models keep its first rows for padding."""
    tables = [module for name, module in model.named_modules()
              if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)]
    if not tables:
        # XLNet's -1 means no limit.
        return max(0, getattr(model.config, "max_position_embeddings", None) or 0) or math.inf
    return min(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1) for table in tables)


def takes_types(folder: str | None) -> bool:
    """Whether the encoder in `folder` (of resolve_encoder) distinguishes the two texts of a pair by token types."""
    return folder is None or (getattr(read_config(folder), "type_vocab_size", None) or 0) > 1


def _describe(name: str, folder: str | None, spec: EncoderSpec) -> PreTrainedConfig:
    """The transformers config of --model."""
    if folder is not None:
        return read_config(folder)
    layers, width = SIZES[name]
    return BertConfig(
        vocab_size=len(is_special(spec.tokenizer)), hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 64, intermediate_size=4 * width,
        max_position_embeddings=max(512, spec.max_length), pad_token_id=spec.tokenizer.pad_token_id)


def _set_dropout(described: PreTrainedConfig, config: TextModelOptions) -> None:
    """--dropout: every entry about dropout but those of attention weights; None stays, it means another entry."""
    names = [name for name, value in described.to_dict().items()
             if "dropout" in name and not name.startswith("att") and isinstance(value, float | int)]
    if not names:
        raise UserError(f"--dropout: --model {config.model} has no dropout; leave it out, or use another --model")
    for name in names:
        setattr(described, name, config.dropout)


def read_config(folder: str) -> PreTrainedConfig:
    """The config in a model folder. Raises UserError (66)."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise UserError(f"--model {folder} is not a model folder of a text encoder ({first_line(error)}): it needs a"
                        " config.json with a model_type, as RUN/model of a text run has", Exit.NO_INPUT) from None


def outputs_of(labels: list[str], classes: list[str]) -> list[int]:
    """For each of the data's classes, the output of a model with these labels. Raises UserError (65).

    Words must be the same, in any order and in small or capital letters. Where either are numbers (0, LABEL_0), the
    order counts.
    """
    are_words = not any(all(re.fullmatch(r"(LABEL_)?\d+", name) for name in names) for names in (labels, classes))
    folded = [label.casefold() for label in labels] if are_words else []
    wanted = [name.casefold() for name in classes] if are_words else []
    if len(labels) != len(classes) or sorted(folded) != sorted(wanted):
        raise UserError(
            f"--eval-only: the model's classes are {some(labels)}, and those of --data are {some(classes)}: the weights"
            " are evaluated with their own head, so the classes must be the same; give data with these classes, or"
            " train on yours first (without --eval-only)", Exit.BAD_DATA)
    return [folded.index(name) for name in wanted] if are_words else list(range(len(classes)))


def _load(spec: EncoderSpec, folder: str, described: PreTrainedConfig, name: str) -> nn.Module:
    """The model with the weights in `folder`, where the head's may be missing. name: --model, for messages."""
    # load
    try:
        model, found = spec.head.from_pretrained(
            folder, config=described, dtype=torch.float32, use_safetensors=True, local_files_only=True,
            trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--model {name} has no weights that can be read ({first_line(error)}); it needs"
                        " model.safetensors (transformers' save_pretrained converts other formats)",
                        Exit.NO_INPUT) from None

    # everything but the head must be there
    is_in_head = in_head(model)
    lacking = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    wrong = [key for key in lacking if not is_in_head(key)]
    if lacking and not wrong and spec.own_head:
        raise UserError(f"--eval-only: the weights in {folder} have no head for this task ({some(lacking)} is missing):"
                        " train first (without --eval-only), or name a model that was trained for it", Exit.BAD_DATA)
    if wrong:
        raise UserError(f"the weights in {folder} do not fit its config.json: {counted(len(wrong), 'tensor')}"
                        f" missing or of another shape, for example {wrong[0]}; repair the folder, or give"
                        " --no-pretrained")
    return model


def _reset_head(model: nn.Module) -> None:
    """New weights for the last layers: an old head with as many classes, but other ones, must not be reused."""
    for layer in _last_layers(model):
        nn.init.normal_(layer.weight, std=getattr(model.config, "initializer_range", 0.02))
        nn.init.zeros_(layer.bias)


@torch.no_grad()
def _reorder_head(model: nn.Module, outputs: list[int]) -> None:
    """Make output i of the model what output outputs[i] was."""
    for param in (param for layer in _last_layers(model) for param in layer.parameters()):
        param.copy_(param[outputs].clone())


def _last_layers(model: nn.Module) -> list[nn.Linear]:
    """Those with an output for each class."""
    return [module for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not name.startswith(f"{model.base_model_prefix}.")
            and module.out_features == model.config.num_labels]


def _without_question(make_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """`make_mask` of transformers without its question whether anything is padded: the host would wait for it.

    A batch without padding has no mask (data.text.padded), so a mask that is there is needed.
    """
    return lambda attention_mask=None, allow_is_bidirectional_skip=False, **options: make_mask(
        attention_mask=attention_mask,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and attention_mask is None, **options)


for _name, _make_mask in {"sdpa": sdpa_mask, "eager": eager_mask}.items():
    AttentionMaskInterface.register(_name, _without_question(_make_mask))


def save_model_folder(
    weights: dict[str, Tensor], config: PreTrainedConfig, described: dict[str, Any], tokenizer: PreTrainedTokenizerBase,
    folder: Path
) -> None:
    """RUN/model in the Hugging Face format. described: what models.predict needs: task, text_columns, max_tokens."""
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # What another run wrote into the folder that the model comes from is not about this one.
    kept = {name: value for name, value in config.to_dict().items() if name not in DESCRIBED}
    (folder / "config.json").write_text(json.dumps(kept | described, indent=1, sort_keys=True))
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers has no type of its own for a full disk
        raise OSError(f"cannot write the tokenizer to {folder}: {error}") from error


def load_classifier(folder: Path) -> nn.Module:
    """What save_model_folder wrote, in evaluation mode, on the CPU. Raises UserError (65)."""
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False,
            output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be read ({first_line(error)})", Exit.BAD_DATA) from None
    if found["missing_keys"]:
        raise UserError(f"{folder}: model.safetensors lacks {some(sorted(found['missing_keys']))}", Exit.BAD_DATA)
    return model.eval()


@torch.inference_mode()
def outputs_for_texts(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, max_length: int, texts: Sequence[Sequence[str]]
) -> Tensor:
    """What the model gives, [B, C]. texts: B tuples of one text, or of the two texts of a pair."""
    columns = [list(column) for column in zip(*texts, strict=True)]
    if len(columns) == 2:
        columns = [without_ends(tokenizer, column, max_length) for column in columns]
    encoded = tokenizer(*columns, truncation=True, max_length=max_length, padding=True, return_tensors="pt")
    if encoded["attention_mask"].all():  # as in training (data.text.padded)
        del encoded["attention_mask"]
    return model(**encoded.to(model.device)).logits
