"""Text encoders: BERT in four sizes from scratch, or any transformers encoder by name or folder, as classifier or masked LM.

Names are fetched once per node, at one commit for the whole run; everything is then read from local folders:
safetensors only, and never the folder's own code.
"""

import difflib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AttentionMaskInterface, AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification, BertConfig
from transformers.masking_utils import eager_mask, sdpa_mask

from data.tokenizer import folder_digest, is_special, without_ends
from utils.distributed.world import World, is_folder
from utils.errors import Exit, UserError, some
from utils.rundir.run import Run
from utils.settings.config import TextModelOptions

# Layers and width; a head has 64 dimensions. Source: Turc et al., 2019 (https://github.com/google-research/bert).
SIZES = {"bert-tiny": (2, 128), "bert-mini": (4, 256), "bert-small": (4, 512), "bert-base": (12, 768)}
HEADS = {"text-classification": AutoModelForSequenceClassification, "masked-lm": AutoModelForMaskedLM}
PADDED_BY = 1024  # tokens at most: vocabularies of models are rounded up for speed
FILES = ("*.json", "*.txt", "*.model", "model*.safetensors")  # of a name on the hub: weights, tokenizer, their settings

transformers.logging.set_verbosity_error()  # what is said of weights that are missing is said below
transformers.logging.disable_progress_bar()


def find_folder(name: str, run: Run, world: World) -> str | None:
    """The local folder of a model or tokenizer: `name` itself, or what is fetched for it; None for a size. Collective.

    A name of the hub is one commit for the whole run and on every node: the one that rank 0 fetched first, kept in
    auto.json. Raises UserError (66) where there is no such folder and it cannot be fetched.
    """
    is_folder(name, world)  # Collective: on all nodes or on none.
    kind = world.everywhere(lambda: _kind_of(name))  # Collective.
    if kind != "hub":
        return name if kind == "folder" else None
    commits = run.kept.setdefault("hub", {})
    began_with = commits.get(name)
    commit = commits[name] = world.on_rank_zero(lambda: Path(_fetch(name, began_with, began_with)).name, takes_long=True)  # Collective.
    world.on_rank_zero(lambda: _fetch(name, commit, began_with), per_node=True)  # Collective.
    return world.everywhere(lambda: _fetch(name, commit, began_with, local_files_only=True))  # Collective.


def _kind_of(name: str) -> str:
    """"folder", "size" or "hub". Raises UserError (66) where it can be none of these."""
    path, files = Path(name), {"config.json", "tokenizer_config.json", "tokenizer.json"}
    if path.is_dir():
        if not files & {file.name for file in path.iterdir()}:
            raise UserError(f"{name} is no model folder: it needs a config.json with a model_type,"
                            " as RUN/model of a text run has", Exit.NO_INPUT)
        return "folder"
    if name in SIZES:
        return "size"
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise UserError(f"{name}: there is no such model folder", Exit.NO_INPUT)
    return "hub"


def _fetch(name: str, commit: str | None, began_with: str | None, local_files_only: bool = False) -> str:
    """The folder of `commit` (None: the newest) in the hub's cache, fetched if need be. Raises UserError (66).

    began_with: the commit that the run keeps from an earlier start, if any.
    """
    try:
        return huggingface_hub.snapshot_download(
            name, revision=commit, allow_patterns=list(FILES), local_files_only=local_files_only)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), "")[:160] or type(error).__name__
    cache = huggingface_hub.constants.HF_HUB_CACHE
    if began_with:
        raise UserError(f"{name} at commit {began_with}, with which this run began, cannot be fetched from the hub"
                        f" ({reason}). Ways out: copy a hub cache that has this commit to {cache}; or start over with"
                        " --fresh", Exit.NO_INPUT)
    close = difflib.get_close_matches(name, SIZES, n=1)
    meant = f" (did you mean {close[0]}? It is trained from scratch)" if close else ""
    raise UserError(
        f"{name} is no folder, none of {', '.join(SIZES)}{meant}, and cannot be fetched from the hub ({reason}). Ways"
        f" out: fetch it elsewhere (hf download {name} --local-dir DIR) and pass DIR; or copy the hub's cache to"
        f" {cache}; or train one of these sizes from scratch", Exit.NO_INPUT)


def resolve_encoder(name: str, run: Run, world: World) -> str | None:
    """RUN/encoder, which has the config of the encoder that --model names; None for one of SIZES. Collective.

    Kept from the run's first start on, so that a later one does not need the hub. (--eval-only of a run of an earlier version,
    which keeps none, writes nothing and reads the folder itself.)
    Raises UserError: 66 where --model has no config, 78 if the kept one changed.
    """
    folder, is_kept = run.path / "encoder", "encoder" in run.kept
    source = None if is_kept else find_folder(name, run, world)
    if not is_kept and (source is None or run.is_read_only):
        return source

    def keep() -> str:
        if not is_kept:
            _read_config(source)
            run.replace_folder("encoder", lambda partial: shutil.copy(Path(source, "config.json"), partial))
        return folder_digest(folder)

    run.require_same("encoder", world.on_rank_zero(keep), f"the encoder's config in {folder}")
    return str(folder)


def build_encoder(task: str, config: TextModelOptions, folder: str | None, weights: str | None, tokenizer: Any,
                  max_length: int, classes: Sequence[str]) -> nn.Module:
    """The model with the head of `task`, on the CPU, in float32; fresh weights come from torch's default generator.

    folder: with its config, None for one of SIZES. weights: the folder whose weights are loaded, if any.
    Raises UserError: 64 where tokenizer, length or weights do not fit, 66 if the folder holds no such model.
    """
    if config.pretrained and folder is None:
        raise UserError(f"--pretrained: --model {config.model} is built from scratch; name a model folder, or a transformers name")
    described = _describe(config.model, folder, tokenizer, max_length)
    num_tokens, known = len(is_special(tokenizer)), getattr(described, "vocab_size", None)
    if known is None:
        raise UserError(f"--model {config.model} is no model for {task}: {described.model_type} has no vocabulary")
    if num_tokens > known or (config.pretrained and known - num_tokens > PADDED_BY):
        raise UserError(f"--model {config.model} knows {known} tokens and the tokenizer makes {num_tokens}: they do not belong together;"
                        " leave --tokenizer out, or train from scratch with --model bert-small")
    labels = described.id2label or {}
    same_classes = not classes or [labels[number] for number in sorted(labels)] == list(classes)
    if classes:
        described.id2label = dict(enumerate(classes))
        described.label2id = {name: number for number, name in enumerate(classes)}
        described.problem_type = "single_label_classification"
    try:
        model = _load(task, config.model, weights, described, same_classes) if weights else (
            HEADS[task].from_config(described, dtype=torch.float32))
    except UserError:
        raise
    except ValueError:
        raise UserError(f"--model {config.model} is no model for {task}: {described.model_type} has no such head in transformers") from None
    if max_length > (limit := _most_tokens(model)):
        raise UserError(f"--max-length {max_length}: --model {config.model} takes at most {limit} tokens")
    return model


def _most_tokens(model: nn.Module) -> float:
    """The longest input: by the table of positions, whose first rows some models keep for padding, else by the config."""
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)]
    if not tables:
        return max(0, getattr(model.config, "max_position_embeddings", None) or 0) or math.inf  # XLNet says -1: no limit
    return min(table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1) for table in tables)


def takes_types(folder: str | None) -> bool:
    """Whether the encoder in `folder` (of resolve_encoder) tells the two texts of a pair apart by token types."""
    return folder is None or (getattr(_read_config(folder), "type_vocab_size", None) or 0) > 1


def _describe(name: str, folder: str | None, tokenizer: Any, max_length: int) -> Any:
    """The transformers config of --model."""
    if folder is not None:
        return _read_config(folder)
    layers, width = SIZES[name]
    return BertConfig(
        vocab_size=len(is_special(tokenizer)), hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        intermediate_size=4 * width, max_position_embeddings=max(512, max_length), pad_token_id=tokenizer.pad_token_id)


def _read_config(folder: str) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise UserError(f"--model {folder} is no model folder of a text encoder ({next(iter(str(error).splitlines()), '')[:200]}): it needs"
                        " a config.json with a model_type, as RUN/model of a text run has", Exit.NO_INPUT) from None


def _load(task: str, name: str, folder: str, described: Any, same_classes: bool) -> nn.Module:
    """The model with the weights in `folder`; what only the head has may be missing there."""
    try:
        model, found = HEADS[task].from_pretrained(
            folder, config=described, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False,
            ignore_mismatched_sizes=True, output_loading_info=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"--model {name} has no weights that can be read ({next(iter(str(error).splitlines()), '')[:200]}); it needs"
                        " model.safetensors (transformers' save_pretrained makes it of other formats)", Exit.NO_INPUT) from None
    encoder = f"{model.base_model_prefix}."
    wrong = sorted(key for key in {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
                   if key.startswith(encoder) and not key.startswith(f"{encoder}pooler"))
    if wrong:
        raise UserError(f"the weights in {folder} do not fit its config.json: {len(wrong)} tensors are missing or of another shape,"
                        f" {wrong[0]} for one")
    if not same_classes:  # as many classes, but others: the old head must not pass for a new one
        for child_name, module in model.named_modules():
            if isinstance(module, nn.Linear) and not child_name.startswith(encoder) and module.out_features == model.config.num_labels:
                nn.init.normal_(module.weight, std=getattr(described, "initializer_range", 0.02))
                nn.init.zeros_(module.bias)
    return model


def _without_question(make_mask: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """`make_mask` of transformers, but it never asks the device whether anything is padded: the host would wait.

    A batch in which nothing is padded has no mask (data.text.padded), so a mask that is there is needed.
    """
    return lambda attention_mask=None, allow_is_bidirectional_skip=False, **options: make_mask(
        attention_mask=attention_mask,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and attention_mask is None, **options)


for _name, _make_mask in {"sdpa": sdpa_mask, "eager": eager_mask}.items():
    AttentionMaskInterface.register(_name, _without_question(_make_mask))


class SparsePrediction:
    """Predicts only where it is asked to: the output layer gets [P, H] instead of [B, T, H], a seventh of the work at 15 %.

    Source: the sparse_prediction of ModernBERT (Warner et al., 2024), here as a hook that suits any masked LM.
    """

    def __init__(self, model: nn.Module):
        self._positions: Tensor | None = None
        if (output_layer := model.get_output_embeddings()) is not None:
            output_layer.register_forward_pre_hook(self._select)

    def logits(self, model: nn.Module, inputs: dict[str, Tensor], positions: Tensor) -> Tensor:
        """[P, V]. positions: [P] int64, into the flattened [B x T] tokens."""
        self._positions = positions
        logits = model(**inputs).logits
        return logits if logits.ndim == 2 else logits.flatten(0, 1)[positions]  # a few models do not call their output layer

    def _select(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].flatten(0, 1)[self._positions], *args[1:])


def save_model_folder(weights: dict[str, Tensor], config: Any, described: dict[str, Any], tokenizer: Any, folder: Path) -> None:
    """RUN/model in the Hugging Face format. described: what models.predict needs besides: task, text_columns, max_tokens."""
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_dict() | described, indent=1, sort_keys=True))
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers has no type of its own for a full disk
        raise OSError(f"cannot write the tokenizer to {folder}: {error}") from error


def load_classifier(folder: Path) -> nn.Module:
    """What save_model_folder wrote, in evaluation mode, on the CPU. Raises UserError (65)."""
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be read ({next(iter(str(error).splitlines()), '')[:200]})", Exit.BAD_DATA) from None
    if found["missing_keys"]:
        raise UserError(f"{folder}: model.safetensors lacks {some(sorted(found['missing_keys']))}", Exit.BAD_DATA)
    return model.eval()


@torch.inference_mode()
def classify_texts(model: nn.Module, tokenizer: Any, max_length: int, texts: Sequence[Sequence[str]]) -> np.ndarray:
    """Probabilities, [B, C] float64. texts: B tuples of one text, or of the two of a pair."""
    columns = [list(column) for column in zip(*texts, strict=True)]
    if len(columns) == 2:
        columns = [without_ends(tokenizer, column, max_length) for column in columns]
    encoded = tokenizer(*columns, truncation=True, max_length=max_length, padding=True, return_tensors="pt")
    if encoded["attention_mask"].all():  # as in training (data.text.padded)
        del encoded["attention_mask"]
    return model(**encoded.to(model.device)).logits.double().softmax(dim=1).cpu().numpy()
