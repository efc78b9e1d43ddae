"""What the two text tasks share: a tokenizer, token ids made once per node, an encoder in the Hugging Face format."""

import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from data import demo
from data.batch import Batch
from data.splits import hold_out, select
from data.text import TextIndex, TextSource, TokenTable, open_texts, read_texts, tokenize
from data.tokenizer import resolve_tokenizer
from models.bert import build_encoder, find_folder, resolve_encoder, save_model_folder, takes_types
from utils.distributed.world import World
from utils.errors import Exit, UserError
from utils.files import cache_path
from utils.rundir.run import Run
from utils.settings.config import MaskedLMConfig, TextClassificationConfig


class TextTask:
    """See models/tasks/base.py. Building it tokenizes the data once per node. Collective."""

    unit = "txt"

    def __init__(self, config: TextClassificationConfig | MaskedLMConfig, run: Run, world: World, label_column: str | None, split_long: bool):
        self._config, text, cache = config, config.text, cache_path()
        root = demo.data_root(config.data.data, config.run.task, cache, world)
        self._run, self._world = run, world
        self._encoder, tokenizer_folder = resolve_encoder(config.model.model, run, world), None
        if "tokenizer" not in run.kept:
            named = config.model.model if text.tokenizer == "auto" else text.tokenizer
            tokenizer_folder = find_folder(named, run, world)
            if text.tokenizer != "auto" and tokenizer_folder is None:
                raise UserError(f"--tokenizer {text.tokenizer} is a size of --model and has no tokenizer; leave it out,"
                                " and one is trained")
        source = TextSource(root, text.text_column, label_column, "", text.max_length, split_long, config.data.bad_samples == "skip",
                            config.run.split)
        makes_types = world.everywhere(lambda: takes_types(self._encoder))  # Collective.
        self._tokenizer = resolve_tokenizer(
            tokenizer_folder, makes_types, lambda: read_texts(source), text.vocab_size, run, world)
        source = replace(source, tokenizer=run.kept["tokenizer"])

        def prepare() -> None:
            tokenize(source, self._tokenizer, cache)
            _open_splits(source, cache, config.data.val_fraction, config.run.seed)

        world.on_rank_zero(prepare, per_node=True)  # the others map what it has written
        index, self._eval = world.everywhere(  # Collective.
            lambda: _open_splits(source, cache, config.data.val_fraction, config.run.seed), takes_long=True)
        self.classes, self.fingerprint, self._text_columns = index.classes, index.fingerprint, index.text_columns
        self.notes, self._train = index.notes, index.splits["train"]
        with warnings.catch_warnings(action="ignore"):  # that the array is read-only; so is whoever uses the tensor
            self.lengths = torch.from_numpy(self._train.lengths)

    def build_model(self, initial_weights: bool) -> nn.Module:
        """The encoder that --model names, with this task's head. Collective. Raises UserError (64, 66)."""
        config, loads = self._config, initial_weights and self._config.model.pretrained
        weights = find_folder(config.model.model, self._run, self._world) if loads else None  # Collective.
        model = self._world.everywhere(lambda: build_encoder(  # Collective.
            config.run.task, config.model, self._encoder, weights, self._tokenizer, config.text.max_length, self.classes))
        model.config.architectures = [type(model).__name__]
        self._encoder_config = model.config
        return model

    def save_model(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Loads into transformers: AutoModel..., pipeline."""
        described = {"task": self._config.run.task, "text_columns": list(self._text_columns), "max_tokens": self._config.text.max_length}
        save_model_folder(weights, self._encoder_config, described, self._tokenizer, folder)

    def example(self, size: int) -> Batch:
        """The longest sample of train or of what is evaluated, `size` times; with a mask, which takes memory, too."""
        is_of_train = int(self.lengths.max()) >= int(self._eval.lengths[-1])  # which is in order of length
        samples, longest = (self.train_set, int(self.lengths.argmax())) if is_of_train else (self.eval_set, len(self._eval) - 1)
        batch = self.collate([samples[0, longest]] * size)
        return replace(batch, inputs={"attention_mask": torch.ones_like(batch.inputs["input_ids"])} | batch.inputs)


def _open_splits(source: TextSource, cache: Path, val_fraction: float, seed: int) -> tuple[TextIndex, TokenTable]:
    """What `tokenize` made, with val held out of train where there is none; and what is evaluated, in order of length.

    So evaluation batches are padded little, and the order depends on the data alone. Raises UserError (64, 65, 66, 74).
    """
    index = open_texts(source, cache)
    folder = index.folder
    if "val" not in index.splits:
        folder = folder.with_name(f"{folder.name}-val-{val_fraction}-{seed}")
        texts = index.splits["train"].texts if source.split_long else None
        splits, note = hold_out(index.splits, source.root, val_fraction, seed, folder, texts)
        index = replace(index, splits=splits, notes=(*index.notes, note))
    if source.split not in index.splits:
        raise UserError(f"--split {source.split}: {source.root} has no such split; it has {', '.join(index.splits)}",
                        Exit.NO_INPUT)
    table = index.splits[source.split]
    sorted_folder = folder.with_name(f"{folder.name}-{source.split}-by-length")
    return index, select(table, lambda: {"samples": table.lengths.argsort(kind="stable")}, sorted_folder)["samples"]
