"""Texts or pairs in a table with one class each, several labels, or numbers; any encoder of transformers.

Legend: B samples, T tokens, C outputs, D features.

Tests: tests/unit/models/tasks/test_text.py
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification

from data.batch import Batch
from data.tables.source import table_at
from data.tables.table import Columns, Row, read_rows, require_columns
from data.texts.index import sample_rows
from data.texts.text_set import TextSample, TextSet
from data.texts.tokenizer import load_tokenizer
from models.linear_head import mean_over_tokens
from models.objectives import build_objective, kind_of, label_columns_of, values_of
from models.output import Output, Prediction, Predictions, widened
from models.tasks.text import TextTask
from models.text.bert import BUILT, load_classifier, max_tokens, read_config
from models.text.hub import find_folder
from models.text.own_classifier import OwnConfig, outputs_for_ids
from models.text.padding import find_padding_side, outputs_for_texts
from models.trial import notes_on_outputs
from utils.distributed.world import World
from utils.errors import Exit, UserError, first_line, say, some
from utils.files import file_sha256
from utils.rundir.run import Run
from utils.settings.config import TextClassificationConfig, TextRegressionConfig

MAX_TOKENS = 512  # of a text whose features are asked for, or what the encoder takes, if that is less


class LabelledTextTask(TextTask):
    """--task text-classification and text-regression: see models/tasks/base.py. Collective."""

    head = AutoModelForSequenceClassification
    head_lr_factor = 10.0  # it starts from noise; the pretrained weights below it bear small steps only
    scratch_lr: ClassVar = {"adamw": 1e-3, "sgd": 0.05}

    def __init__(self, config: TextClassificationConfig | TextRegressionConfig, run: Run, world: World):
        super().__init__(config, run, world, label_columns_of(config.labels), kind_of(config.labels), split_long=False)
        self.train_set = self.unaugmented = TextSet(self.train_table)
        self.eval_set = TextSet(self.eval_table)
        model = None
        if config.run.eval_only and not run.is_there and self._encoder is not None:
            model = read_config(self._encoder).to_dict()
        self.objective = build_objective(
            config, self.classes, self.train_table.labels, self.eval_table.labels, model,
            self.train_table.left_out)
        self.notes += self.objective.notes
        self.metrics, self.best = self.objective.metrics, self.objective.best

    def collate(self, samples: Sequence[TextSample]) -> Batch:
        """Padded to the longest of them."""
        labels = self.objective.encode([sample.label for sample in samples])
        return Batch(self.encoder_inputs(samples), labels, torch.tensor([sample.weight for sample in samples]),
                     digests=tuple(sample.digest for sample in samples))

    def build_model(self, initial_weights: bool) -> nn.Module:
        """See TextTask. Collective."""
        model = super().build_model(initial_weights)  # Collective.
        side = self._tried(  # Collective.
            "padding_side", lambda: find_padding_side(model, self._tokenizer, self._config.text.max_length),
            {None: "reads padding, too: what it predicts for a text depends on the lengths of the texts beside it",
             "": "fails on two texts of different lengths, so whether it reads padding is not known"})
        self._tokenizer.padding_side = side or self._tokenizer.padding_side
        self._tokenizer.init_kwargs["padding_side"] = self._tokenizer.padding_side  # these are saved
        if initial_weights and isinstance(self._encoder_config, OwnConfig):
            for note in notes_on_outputs(self._config.model.model, outputs_for_ids(model, len(self._tokenizer))):
                self._run.note(note)
        described = self.objective.described()
        if described.get("loss") == "bce":  # transformers' pipeline takes the sigmoid then, as models.predict does
            self._encoder_config.problem_type = "multi_label_classification"
        if "target_mean" in described:  # it gives the outputs as they are
            self._encoder_config.problem_type = "regression"
        return model

    def forward(self, model: nn.Module, batch: Batch) -> Output:
        """The loss in float32."""
        logits = widened(model(**batch.inputs).logits)  # [B, C]
        losses = self.objective.losses(logits, batch.labels, model.training)  # [B]
        return Output(losses * batch.sample_weight, logits)

    def inputs(self) -> list[tuple[int, str]]:
        """Texts, read again and then kept; a pair as A<tab>B. Raises UserError (65, 74) if that fails."""
        order = self.eval_table.texts.argsort()
        return [(int(index), "\t".join(self._rows[index].texts)) for index in order]

    def groups(self, of_train: bool = False) -> list[str] | None:
        """Those of the rows, read again."""
        if not self.source.columns.group:
            return None
        if not of_train:
            return [row.group for row in self._rows]
        rows = sample_rows(replace(self.source, split="train"), self.classes, self.train_table.texts)
        return [rows[number].group for number in self.train_table.texts.tolist()]

    @cached_property
    def _rows(self) -> list[Row]:
        """Of eval_set, in its order."""
        numbers = self.eval_table.texts.tolist()                                                 # [N]
        rows = sample_rows(self.source, self.classes, self.eval_table.texts)
        return [rows[number] for number in numbers]

    def next_steps(self, run: str, python: str) -> dict[str, str]:
        """Predict; train on own texts."""
        own = f"{python} train.py --task {self._config.run.task} --data FILE.csv    with the columns text and label"
        texts = "a text" if len(self._text_columns) == 1 else r"a text\tanother text"
        return {"predict": f"printf '{texts}\\n' | {python} -m models.predict {run} -", "your own data": own}

    @staticmethod
    def predict(folder: Path, inputs: Sequence[str], device: torch.device, batch_size: int,
                is_wanted: Callable[[int], bool] = lambda number: True) -> Predictions:
        """inputs: tables with the columns of training; text files, and - for standard input, with one text per line.

        A pair is A<tab>B.
        """
        # inputs
        described = json.loads((folder / "config.json").read_text())
        if missing := {"text_columns", "max_tokens"} - set(described):
            raise UserError(f"{folder} is of no text run: config.json lacks {some(sorted(missing))}", Exit.NO_INPUT)
        rows, num_rows = rows_of(inputs, tuple(described["text_columns"]))

        # model
        (model, config), tokenizer = load_classifier(folder), load_tokenizer(str(folder))
        side = find_padding_side(model, tokenizer, described["max_tokens"])
        described["classes"] = [config.id2label[index] for index in range(config.num_labels)]
        num_batches = None if num_rows is None else -(-num_rows // batch_size)
        outputs = partial(outputs_for_texts, model.to(device), tokenizer, described["max_tokens"], side)
        batches = predictions_of(lambda texts: values_of(described, outputs(texts)), rows, batch_size, is_wanted)
        return Predictions(described, batches, model, num_batches)


def rows_of(inputs: Sequence[str], columns: tuple[str, ...]) -> tuple[Iterator[tuple[Path, Row]], int | None]:
    """The rows of tables and text files, each with its file; and how many there are, None with standard input.

    columns: of the texts. Raises UserError (65, 66).
    """
    paths, wanted = [Path("/dev/stdin") if name == "-" else table_at(name) for name in inputs], Columns(columns, ())
    for path in paths:
        require_columns(path, wanted.texts, "give a table with the columns of training")

    def rows() -> Iterator[tuple[Path, Row]]:
        return ((path, row) for path in paths for row in read_rows(path, wanted, keep_blank=True))

    return rows(), None if "-" in inputs else sum(1 for _ in rows())


def predictions_of(
    predict: Callable[[Sequence[Sequence[str]]], np.ndarray], rows: Iterator[tuple[Path, Row]], batch_size: int,
    is_wanted: Callable[[int], bool]
) -> Iterator[list[Prediction]]:
    """Batches of predictions for rows; an empty text has none. predict: B texts to [B, C]."""
    for number, batch in enumerate(iter(lambda: list(islice(rows, batch_size)), [])):
        if not is_wanted(number):
            yield []
            continue
        is_good = [all(map(str.strip, row.texts)) for _, row in batch]
        good = [row.texts for (_, row), good in zip(batch, is_good, strict=True) if good]
        values = iter(predict(good) if good else ())  # of the good ones
        yield [Prediction("\t".join(row.texts), next(values)) if good else
               Prediction("\t".join(row.texts), None, f"{path} line {row.line}: a text is empty")
               for (path, row), good in zip(batch, is_good, strict=True)]


def of_texts(given: argparse.Namespace, world: World, is_wanted: Callable[[int], bool]) -> Predictions:
    """See models.features.open_features. Collective."""
    # weights
    if given.model in BUILT:
        raise UserError(f"--model {given.model} is built from scratch and has no weights; name a model folder, or a"
                        " transformers name")
    alone = Run(Path(), {}, {"start": 1, "cores_per_process": 1}, say, lock=None)  # it keeps nothing
    folder = find_folder(given.model, alone, world)  # Collective.
    given.weights_sha256 = world.everywhere(  # Collective.
        lambda: [file_sha256(file) for file in sorted(Path(folder).glob("model*.safetensors"))], takes_long=True)
    encoder, longest = world.everywhere(partial(_load_encoder, folder), takes_long=True)  # Collective.
    model, tokenizer = MeanPooled(encoder).to(world.device).eval(), load_tokenizer(folder)
    if world.is_main:
        say(f"predict: the features of a text are the mean of the last layer of {given.model} over its tokens, of which"
            f" there are at most {longest}", sys.stderr)

    # texts
    columns = tuple(given.text_column.split(","))
    rows, count = world.everywhere(partial(rows_of, given.inputs, columns), takes_long=True)  # Collective.
    outputs = partial(outputs_for_texts, model, tokenizer, longest, None)
    batches = predictions_of(lambda texts: outputs(texts).cpu().numpy(), rows, given.batch_size, is_wanted)
    return Predictions({}, batches, model, -(-count // given.batch_size))


def _load_encoder(folder: str) -> tuple[nn.Module, int]:
    """The encoder in a model folder, with its weights; the most tokens of a text. Raises UserError (66)."""
    read_config(folder)  # raises UserError
    try:
        encoder, found = AutoModel.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False,
            output_loading_info=True)
    except Exception as error:  # whatever the library raises about values
        raise UserError(f"--model {folder} has no weights that can be read ({first_line(error)}); it needs"
                        " model.safetensors", Exit.NO_INPUT) from None
    if lacking := [name for name in found["missing_keys"] if not name.startswith("pooler.")]:
        raise UserError(f"--model {folder}: its weights lack {some(sorted(lacking))}; name another", Exit.NO_INPUT)
    return encoder, int(min(MAX_TOKENS, max_tokens(encoder)))


class MeanPooled(nn.Module):
    """An encoder whose features are the mean over tokens; its last layer is there for blocks.watch_features to see."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder, self.last = encoder, nn.Linear(encoder.config.hidden_size, 1)

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        """inputs: as models.text.padding.encode_texts gives them."""
        hidden = self.encoder(**inputs).last_hidden_state                                       # [B, T, D]
        return SimpleNamespace(logits=self.last(mean_over_tokens(hidden, inputs)))
