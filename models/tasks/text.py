"""What the two text tasks share: a tokenizer, token ids made once per node, an encoder in the Hugging Face format."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from data import demo
from data.batch import Batch
from data.left_out import find_left_out, names_of
from data.sampler import WINDOW, Lengths
from data.splits import ValSplit, hold_out, require_split, select
from data.tables.table import TEXTS
from data.texts.index import TextIndex, TextSource, open_texts, read_texts
from data.texts.text_set import TextSample, TokenTable, padded, row_number
from data.texts.tokenizer import text_of_padding
from models.tasks.base import Task
from models.text.bert import EncoderSpec, build_encoder, config_of, save_model_folder
from models.text.hub import find_folder, resolve_encoder, resolve_tokenizer
from utils.distributed.world import World
from utils.files import cache_path
from utils.hardware.vendor import width_multiple
from utils.rundir.resolved import UNSET
from utils.rundir.run import Run
from utils.settings.config import MaskedLMConfig, TextClassificationConfig, TextRegressionConfig

SCRATCH_WIDTH = 128  # of an encoder: Adam's rate of a wider one from scratch falls as its width grows (docs/models.md)
# Pretrained ones of these widths, or of less and of more, have pretrained_lr and 0.4 times that; between them it falls
# with the logarithm of the width. Measured at 384; at 1024 BERT-large's rate (Mosbach et al., 2021).
WIDTHS, SHARE_OF_WIDEST = (384, 1024), 0.4


class TextTask(Task):
    """See models/tasks/base.py. Building it tokenizes the data once per node. Collective."""

    unit = "txt"
    head: ClassVar[type]  # transformers' AutoModelFor...: an encoder with the head of the task
    scratch_lr: ClassVar[Mapping[str, float]]  # base_lr of SCRATCH_WIDTH from scratch ...
    pretrained_lr: ClassVar[Mapping[str, float]] = {"adamw": 5e-5, "sgd": 0.03}  # ... and not

    def __init__(self, config: TextClassificationConfig | TextRegressionConfig | MaskedLMConfig, run: Run, world: World,
                 label_columns: tuple[str, ...], label_kind: str, split_long: bool):
        self._config, self._run, self._world = config, run, world
        self.has_weights = config.model.pretrained
        self.origin = f"with the weights of {config.model.model}" if self.has_weights else "from scratch"

        # what is read
        cache, val = cache_path(), ValSplit(config.data.val_fraction, config.run.seed)
        root = demo.data_root(config.data.data, config.run.task, cache, world)  # Collective.
        source = TextSource(
            root=root, inputs=TEXTS, input_column=config.text.text_column, label_columns=label_columns,
            label_kind=label_kind, group_column=config.data.group_column, skip_bad=config.data.bad_samples == "skip",
            split=config.run.split, tokenizer="",
            max_length=config.text.max_length, split_long=split_long)

        # encoder's config and tokenizer
        left_out = {*map(row_number, names_of(config.data, run))}
        self._encoder = resolve_encoder(config.model.model, run, world)  # Collective.
        width = getattr(config_of(config.model.model, self._encoder), "hidden_size", None) or 768
        rates, share = self.scratch_lr, min(1, SCRATCH_WIDTH / width)
        if self.has_weights:
            place = math.log(width / WIDTHS[0]) / math.log(WIDTHS[1] / WIDTHS[0])
            rates, share = self.pretrained_lr, SHARE_OF_WIDEST ** min(1, max(0, place))
        self.base_lr = rates | {"adamw": rates["adamw"] * share}
        self._tokenizer, digest = resolve_tokenizer(  # Collective.
            config, self._encoder, lambda: read_texts(source, left_out), run, world)
        self.source = source = replace(source, tokenizer=digest)

        # the width of batches
        self._pad_to = run.resolve("pad_to", "auto", partial(width_multiple, world.device.type))

        # token ids: the first process of a node writes them, the others map what it has written
        opened = partial(_open_splits, source, self._tokenizer, val, cache)
        world.on_rank_zero(lambda: opened() and None, per_node=True)  # Collective.
        index, self.eval_table = world.everywhere(opened, takes_long=True)  # Collective.
        self.classes, self.fingerprint, self.notes = index.classes, index.fingerprint, index.notes
        self._text_columns, train = index.text_columns, index.splits["train"]
        self.train_table = train.leaving_out(
            find_left_out(config.data, run, train, self.eval_table),
            text_of_padding(self._tokenizer, is_pair=len(self._text_columns) > 1))
        with warnings.catch_warnings(action="ignore"):  # the array is read-only; nobody writes the tensor
            self.lengths = Lengths(torch.from_numpy(self.train_table.lengths), WINDOW)

    def build_model(self, initial_weights: bool) -> nn.Module:
        """The encoder that --model names, with this task's head. Collective. Raises UserError (64, 66)."""
        config, weights = self._config.model, None
        if initial_weights and config.pretrained:
            weights = find_folder(config.model, self._run, self._world)  # Collective.
        own_head = self._config.run.eval_only
        shortest = max(1, self._tokenizer.num_special_tokens_to_add()) if initial_weights and not own_head else 0
        spec = EncoderSpec(self.head, self._tokenizer, self._config.text.max_length, self.classes, own_head,
                           self._report, shortest)
        model, self._encoder_config = self._world.everywhere(  # Collective.
            lambda: build_encoder(spec, config, self._encoder, weights))
        self._encoder_config.architectures = [type(model).__name__]
        return model

    def _tried(self, name: str, find: Callable[[], Any], words: Mapping[Any, str]) -> Any:
        """What find() says of the model on rank 0, kept. words: notes on the model, by what it says. Collective."""
        if (kept := getattr(self._run.resolved, name)) is not UNSET:
            return kept
        answer = self._world.on_rank_zero(find, takes_long=True)  # Collective.
        self._run.keep(**{name: answer})
        if answer in words and not self._run.is_read_only:
            self._run.note(f"{self._config.model.model} {words[answer]}")
        return answer

    def _report(self, text: str, is_head_new: bool) -> None:
        self._run.note(text)
        self.has_new_head |= is_head_new

    def encoder_inputs(self, samples: Sequence[TextSample]) -> dict[str, Tensor]:
        """As wide as the longest sample or a little wider; see data.texts.text_set.padded."""
        return padded(samples, self._tokenizer.pad_token_id, self._config.text.max_length, self._pad_to,
                      self._run.resolved.padding_side)

    def preview(self, batch: Batch) -> list[str]:
        """The tokens of each sample in words, without padding."""
        ids, owners = batch.inputs["input_ids"], batch.inputs.get("owners")                # [R, T]
        samples = ids if owners is None else [ids[owners == index] for index in range(len(batch.sample_weight))]
        return [self._tokenizer.decode(sample[sample != self._tokenizer.pad_token_id]) for sample in samples]

    def listing(self) -> Iterator[tuple[str, str]]:
        """Texts, a pair as A<tab>B, with what the label columns hold."""
        for split in ("train", "val"):
            for _, row in self.source.rows(split) if split in self.source.splits else ():
                yield "\t".join(row.texts), ",".join(row.labels)

    def save_model(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Loads into transformers: AutoModel..., pipeline."""
        described = {"task": self._config.run.task, "text_columns": list(self._text_columns),
                     "max_tokens": self._config.text.max_length}
        if self.objective:  # what else decides is the encoder's problem_type
            described |= {name: value for name, value in self.objective.described().items() if name != "loss"}
        save_model_folder(weights, self._encoder_config, described, self._tokenizer, folder)

    def example(self, size: int) -> Batch:
        """The longest sample of train or of what is evaluated, `size` times; with a mask, which takes memory, too.

        The last token is masked, because transformers drops a mask of nothing but ones.
        """
        batch = self.collate(self._longest(size))
        mask = torch.ones_like(batch.inputs["input_ids"])
        mask[:, 1:][:, -1:] = 0  # not the first token, if it is the only one
        return replace(batch, inputs={"attention_mask": mask} | batch.inputs)

    def _longest(self, size: int) -> list[Any]:
        samples, longest = self.train_set, int(self.train_table.lengths.argmax())
        if self.eval_table.lengths[-1] > self.train_table.lengths.max():  # _eval is in order of length
            samples, longest = self.eval_set, len(self.eval_table) - 1
        return [samples[0, longest]] * size


def _open_splits(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, val: ValSplit, cache: Path
) -> tuple[TextIndex, TokenTable]:
    """The token ids, with val held out of train if the data have no val; and what is evaluated, in order of length.

    So evaluation batches are padded little, and the order depends on the data alone. Raises UserError (64, 65, 66, 74).
    """
    # splits
    index = open_texts(source, tokenizer, cache)
    folder = index.folder
    if "val" not in index.splits:
        folder = val.folder(folder)
        groups = index.splits["train"].texts if source.split_long and index.groups is None else index.groups
        splits, note = hold_out(index.splits, val, source.root, folder, groups)
        index = replace(index, splits=splits, notes=(*index.notes, note))
    require_split(source.split, index.splits, source.root)

    # in order of length
    table = index.splits[source.split]
    sorted_folder = folder.with_name(f"{folder.name}-{source.split}-by-length")
    return index, select(table, lambda: {"samples": table.lengths.argsort(kind="stable")}, sorted_folder)["samples"]
