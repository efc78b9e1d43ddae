"""What the two text tasks share: a tokenizer, token ids made once per node, an encoder in the Hugging Face format."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from data import demo
from data.splits import hold_out
from data.text import TextSource, TokenTable, open_texts, read_texts, tokenize
from data.tokenizer import settle_tokenizer
from models.bert import build_encoder, find_folder, save_model_folder, settle_encoder, takes_types
from models.tasks.base import Batch
from utils.config import MaskedLMConfig, TextClassificationConfig
from utils.distributed import World
from utils.errors import Exit, UserError
from utils.files import cache_path
from utils.run import Run


class TextTask:
    """See models/tasks/base.py. Building it tokenizes the data once per node. Collective."""

    eval_batch = 64
    unit = "txt"

    def __init__(self, config: TextClassificationConfig | MaskedLMConfig, run: Run, world: World, label_column: str | None, cuts: bool):
        self._config, text, cache = config, config.text, cache_path()
        root = demo.data_root(config.data.data, config.run.task, cache, world)
        self._run, self._world = run, world
        self._encoder, tokenizer_folder = settle_encoder(config.model.model, run, world), None
        if "tokenizer" not in run.kept:
            named = config.model.model if text.tokenizer == "auto" else text.tokenizer
            tokenizer_folder = find_folder(named, run, world)
            if text.tokenizer != "auto" and tokenizer_folder is None:
                raise UserError(f"--tokenizer {text.tokenizer} is a size of --model and has no tokenizer; leave it out,"
                                " and one is trained")
        source = TextSource(root, text.text_column, label_column, "", text.max_length, cuts, config.data.bad_samples == "skip",
                            config.run.split)
        self._tokenizer = settle_tokenizer(tokenizer_folder, takes_types(self._encoder), lambda: read_texts(source),
                                           text.vocab_size, run, world)
        source = replace(source, tokenizer=run.kept["tokenizer"])
        world.once(lambda: tokenize(source, self._tokenizer, cache), per_node=True)
        index = open_texts(source, cache)
        splits, self.notes = index.splits, index.notes
        if "val" not in splits:
            texts = splits["train"].texts if cuts else None
            splits, note = hold_out(splits, root, config.data.val_fraction, config.run.seed, texts)
            self.notes = (*self.notes, note)
        if config.run.split not in splits:
            raise UserError(f"--split {config.run.split}: {root} has no such split; it has {', '.join(splits)}", Exit.NO_INPUT)
        self.classes, self.fingerprint, self._text_columns = index.classes, index.fingerprint, index.text_columns
        self._train = splits["train"]
        self.lengths = torch.from_numpy(self._train.lengths)
        self._eval = _by_length(splits[config.run.split])

    def build_model(self, initial_weights: bool) -> nn.Module:
        """The encoder that --model names, with this task's head. Collective. Raises UserError (64, 66)."""
        config, loads = self._config, initial_weights and self._config.model.pretrained
        weights = find_folder(config.model.model, self._run, self._world) if loads else None
        model = build_encoder(config.run.task, config.model, self._encoder, weights, self._tokenizer,
                              config.text.max_length, self.classes)
        model.config.architectures = [type(model).__name__]
        self._encoder_config = model.config
        return model

    def save_model(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Loads into transformers: AutoModel..., pipeline."""
        described = {"task": self._config.run.task, "text_columns": list(self._text_columns), "max_tokens": self._config.text.max_length}
        save_model_folder(weights, self._encoder_config, described, self._tokenizer, folder)

    def example(self, size: int) -> Batch:
        """The longest sample of train, `size` times."""
        return self.collate([self.train_set[0, int(self._train.lengths.argmax())]] * size)


def _by_length(table: TokenTable) -> TokenTable:
    """Samples of like length stand together, so that batches are padded little; the order is one of the data alone."""
    return table.select(table.lengths.argsort(kind="stable"))
