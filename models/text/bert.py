"""Text encoders: BERT in four sizes from scratch, or any transformers encoder from a folder; classifiers, masked LMs.

Folders are read without running their code, and weights as safetensors only. Names on the hub: models/text/hub.py.
Legend: B samples, T tokens, P predicted tokens, H hidden size, V vocabulary, C classes.
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.masking_utils import eager_mask, sdpa_mask

from data.labels import outputs_for
from data.splits import plain
from data.texts.tokenizer import is_special
from models.blocks import in_head
from models.objectives import DESCRIBED
from models.own import TEXT_MODELS
from models.text.own_classifier import OwnConfig, build_own_classifier
from utils.errors import Exit, UserError, counted, explain, first_line, some
from utils.settings.text_options import SIZES, TextModelOptions

BUILT = (*TEXT_MODELS, *SIZES)  # names of --model that are built from scratch
MAX_PADDING = 1024  # tokens: vocabularies of models are rounded up for speed
_LOADING = {"dtype": torch.float32, "use_safetensors": True, "local_files_only": True, "trust_remote_code": False,
            "output_loading_info": True}

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
    report: Callable[[str, bool], None] = lambda text, is_head_new: None  # called where the head is not as it was
    shortest: int = 0  # tokens; a new network of models/own.py is tried on them


def build_encoder(
    spec: EncoderSpec, config: TextModelOptions, folder: str | None, weights: str | None
) -> tuple[nn.Module, PreTrainedConfig]:
    """The model on the CPU, in float32, and its config; fresh weights come from torch's default generator.

    folder: with its config, None for one of BUILT. weights: the folder whose weights are loaded, if any.
    Raises UserError: 64 if tokenizer, length or weights do not fit, 66 if the folder holds no such model.
    """
    # its config
    if config.pretrained and folder is None:
        raise UserError(f"--pretrained: --model {config.model} is built from scratch; leave it out, or give"
                        " --no-pretrained, or name a model folder or a transformers name")
    described = config_of(config.model, folder)
    if folder is None:
        described.update({"vocab_size": len(is_special(spec.tokenizer)), "pad_token_id": spec.tokenizer.pad_token_id,
                          "max_position_embeddings": max(512, spec.max_length)})
    described.return_dict = True
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
    classes = list(spec.classes)
    outputs = outputs_of(described, classes, spec.own_head) if weights and classes else None
    if classes:
        described.id2label = dict(enumerate(classes))
        described.label2id = {name: index for index, name in enumerate(classes)}
        described.problem_type = "single_label_classification"

    # the model
    if classes and isinstance(described, OwnConfig):
        model, new = build_own_classifier(
            described, (spec.max_length, spec.shortest), weights, outputs, spec.own_head)
        _report_head(spec, outputs, new)
        return model, described
    try:
        model, new = _load(spec, weights, described, config.model)
    except Exception as error:  # whatever the library raises about values
        if explain(error)[1] != Exit.INTERNAL:  # memory, the disk, a UserError
            raise
        if "Unrecognized configuration class" not in str(error):
            raise UserError(f"--model {config.model}: its config.json does not describe a model"
                            f" ({type(error).__name__}: {first_line(error)}); repair it", Exit.NO_INPUT) from error
        raise UserError(f"--model {config.model} does not suit this task: transformers has no {spec.head.__name__} for"
                        f" {described.model_type}; use another encoder, such as bert-small") from None
    if weights:
        _fit_head(model, new, outputs, spec)
    if classes and getattr(model.config, "pad_token_id", None) is None:  # decoders look for the token before it
        model.config.pad_token_id = spec.tokenizer.pad_token_id
    if spec.max_length > (limit := max_tokens(model)):
        raise UserError(f"--max-length {spec.max_length}: --model {config.model} takes at most {limit} tokens")
    return model, model.config


def max_tokens(model: nn.Module) -> float:
    """The longest input: by the table of positions, else by the config. Some models keep its first rows for padding."""
    tables = [module for name, module in model.named_modules()
              if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)]
    if not tables:
        # XLNet's -1 means no limit.
        return max(0, getattr(model.config, "max_position_embeddings", None) or 0) or math.inf
    return min(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1) for table in tables)


def takes_types(described: PreTrainedConfig) -> bool:
    """Whether an encoder with this config distinguishes the two texts of a pair by token types."""
    if (num_types := getattr(described, "type_vocab_size", None)) is not None:
        return num_types > 1
    # XLNet's config has no number of types
    kind = transformers.MODEL_MAPPING.get(type(described), nn.Module)
    kind = kind[0] if isinstance(kind, tuple) else kind  # Funnel has two
    return "token_type_ids" in inspect.signature(kind.forward).parameters


def config_of(name: str, folder: str | None) -> PreTrainedConfig:
    """The config of the encoder in `folder` (of resolve_encoder), or of one of BUILT. Raises UserError (66)."""
    if folder is not None:
        return read_config(folder)
    if name in TEXT_MODELS:
        return OwnConfig(architecture=name)
    layers, width = SIZES[name]
    return transformers.BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, intermediate_size=4 * width)


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
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever the library raises about values
        raise UserError(f"--model {folder} is not a model folder of a text encoder ({first_line(error)}): it needs a"
                        " config.json with a model_type, as RUN/model of a text run has", Exit.NO_INPUT) from None


def outputs_of(described: PreTrainedConfig, classes: list[str], own_head: bool) -> list[int] | None:
    """For each of the data's classes, the output of a model with this config; None if its classes are others.

    Words may be in any order, and in small or capital letters. Where either are numbers (0, LABEL_0), they must be
    equal; own_head: there the order counts, and instead of None there is a UserError (65).
    """
    labels = [plain(str(described.id2label[index])) for index in sorted(described.id2label or {})]
    are_words = not any(all(re.fullmatch(r"(LABEL_)?\d+", name) for name in names) for names in (labels, classes))
    if are_words and (outputs := outputs_for(labels, classes)):
        return outputs
    if labels == classes or (own_head and not are_words and len(labels) == len(classes)):
        return list(range(len(classes)))
    if own_head:
        raise UserError(
            f"--eval-only: the model's classes are {some(labels)}, and those of --data are {some(classes)}: the weights"
            " are evaluated with their own head, so the classes must be the same; give data with these classes, or"
            " train on yours first (without --eval-only)", Exit.BAD_DATA)
    return None


def _load(
    spec: EncoderSpec, folder: str | None, described: PreTrainedConfig, name: str
) -> tuple[nn.Module, list[str]]:
    """The model with the weights in `folder`, if any, and the names of those that it lacks, all of the head.

    name: of --model. Raises UserError (64, 65, 66).
    """
    if folder is None:
        return spec.head.from_config(described, dtype=torch.float32), []

    # load
    try:
        model, found = spec.head.from_pretrained(folder, config=described, ignore_mismatched_sizes=True, **_LOADING)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--model {name} has no weights that can be read ({first_line(error)}); it needs"
                        " model.safetensors (save_pretrained of transformers writes it)", Exit.NO_INPUT) from None

    # everything but the head must be there
    is_in_head = in_head(model)
    lacking = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    wrong = [key for key in lacking if not is_in_head(key)]
    if lacking and not wrong and spec.own_head:
        raise UserError(f"--eval-only: the weights in {folder} have no head for this task ({some(lacking)} is missing):"
                        " train first (without --eval-only), or name a model that was trained for it", Exit.BAD_DATA)
    if wrong:
        raise UserError(f"the weights in {folder} do not fit its config.json: {counted(len(wrong), 'tensor')} missing"
                        f" or of another shape, for example {wrong[0]}; repair the folder, or give --no-pretrained")

    # transformers 5.24 leaves the biases of some new heads as the memory was (masked-lm: Longformer, FNet)
    for key in lacking:
        if key.endswith("bias"):
            nn.init.zeros_(model.get_parameter(key))
    return model, lacking


@torch.no_grad()
def _fit_head(model: nn.Module, new: list[str], outputs: list[int] | None, spec: EncoderSpec) -> None:
    """Give the head the data's classes in their order, and report what is new in it, and what changed places.

    new: names of new parameters. outputs: for each class, the head's output for it; None if the head has others.
    """
    # the last layer with an output for each class
    layers = [name for name, module in model.named_modules()
              if isinstance(module, nn.Linear) and not name.startswith(f"{model.base_model_prefix}.")
              and spec.classes and module.out_features == model.config.num_labels]
    last = {name: param for name, param in model.named_parameters() if layers and name.startswith(f"{layers[-1]}.")}
    is_new = bool(last) and (outputs is None or not last.keys().isdisjoint(new))
    for name, param in last.items():
        if outputs is not None:
            param.copy_(param[outputs].clone())
        elif name.endswith("weight"):  # an old head with as many classes, but other ones, must not be reused
            nn.init.normal_(param, std=getattr(model.config, "initializer_range", 0.02))
        else:
            nn.init.zeros_(param)
    _report_head(spec, None if is_new else outputs)

    # what is new, by part: its matrix, or its vector
    params = sorted(model.named_parameters(), key=lambda pair: pair[1].ndim)
    shapes = {name.rpartition(".")[0]: " x ".join(map(str, param.shape)) for name, param in params
              if name in new or (is_new and name in last)}
    if shapes:
        spec.report(f"new weights in the head: {some(f'{part} ({shape})' for part, shape in shapes.items())}", is_new)


def _report_head(spec: EncoderSpec, outputs: list[int] | None, new: Sequence[str] = ()) -> None:
    if new:
        spec.report(f"new weights in the head: {some(new)}", True)
    elif outputs and not spec.own_head and outputs != sorted(outputs):
        spec.report("the head is kept: it has the same classes in another order, and its outputs are reordered", False)


def _without_question(make_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """`make_mask` of transformers without its question whether anything is padded: the host would wait for it.

    A batch without padding has no mask (data.texts.text_set.padded), so a mask that is there is needed.
    """
    return lambda attention_mask=None, allow_is_bidirectional_skip=False, **options: make_mask(
        attention_mask=attention_mask,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and attention_mask is None, **options)


for _name, _make_mask in {"sdpa": sdpa_mask, "eager": eager_mask}.items():
    transformers.AttentionMaskInterface.register(_name, _without_question(_make_mask))


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


def load_classifier(folder: Path) -> tuple[nn.Module, PreTrainedConfig]:
    """What save_model_folder wrote, in evaluation mode, on the CPU, and its config. Raises UserError (64, 65)."""
    if isinstance(described := read_config(str(folder)), OwnConfig):
        model, _ = build_own_classifier(
            described, (described.max_tokens, 0), str(folder), range(described.num_labels), own_head=True)
        return model.eval(), described
    try:
        model, found = transformers.AutoModelForSequenceClassification.from_pretrained(folder, **_LOADING)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be read ({first_line(error)})", Exit.BAD_DATA) from None
    if found["missing_keys"]:
        raise UserError(f"{folder}: model.safetensors lacks {some(sorted(found['missing_keys']))}", Exit.BAD_DATA)
    return model.eval(), model.config
