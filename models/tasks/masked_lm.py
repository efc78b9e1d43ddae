"""Masked language modelling: predict the tokens that were masked; any encoder of transformers with such a head.

Texts of any lengths share a batch, several in a row. Batches of texts of similar lengths, which would need no packing,
teach less: some hold nothing but headings (figures: benchmarks/README.md).

Legend: B samples, R rows of them, T tokens of a row, P predicted tokens, V vocabulary.

Tests: tests/unit/models/tasks/test_text.py
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

from data.batch import Batch
from data.labels import CLASSES
from data.texts.masking import MASK_PROBABILITY, MaskedSample, MaskedTextSet, num_predicted
from data.texts.text_set import packed
from data.texts.tokenizer import is_special
from models.losses import cross_entropies
from models.metrics.metric import LOWER, Metric
from models.output import Output, Predictions, widened
from models.own import TEXT_MODELS
from models.tasks.text import TextTask
from models.text.padding import find_first_position, with_mask
from models.text.sparse_prediction import SparsePrediction
from utils.distributed.world import World
from utils.errors import UserError
from utils.rundir.run import Run
from utils.settings.config import MaskedLMConfig

MAX_COUNTED, MAX_GUESSED = 10**7, 10**4  # tokens and samples that the baseline uses


class MaskedLM(TextTask):
    """See models/tasks/base.py. Collective."""

    best = "loss"
    head = AutoModelForMaskedLM
    scratch_lr: ClassVar = {"adamw": 1e-3, "sgd": 0.15}

    def __init__(self, config: MaskedLMConfig, run: Run, world: World):
        # data
        if "," in config.text.text_column:
            raise UserError(f"--text-column {config.text.text_column}: --task masked-lm reads one column")
        if config.model.model in TEXT_MODELS:
            raise UserError(f"--model {config.model.model}: the networks for texts in models/own.py learn labels or"
                            " numbers; --task masked-lm needs an encoder, such as bert-small")
        super().__init__(config, run, world, label_columns=(), label_kind=CLASSES, split_long=True)
        if self._tokenizer.mask_token_id is None:
            raise UserError("--task masked-lm needs a tokenizer with a mask token; give another --tokenizer or --model")

        # masks; in evaluations the same ones in every run
        self.train_set = MaskedTextSet(self.train_table, self._tokenizer, MASK_PROBABILITY, config.run.seed)
        self.eval_set = MaskedTextSet(self.eval_table, self._tokenizer, MASK_PROBABILITY, seed=0)
        self.metrics = (
            Metric(_loss_sums, _loss_values, is_count=False, names={"loss": LOWER, "perplexity": LOWER}),)

    def collate(self, samples: Sequence[MaskedSample]) -> Batch:
        """`positions` [P] are places in the flattened [R x T] tokens."""
        # texts of one length fill their rows, and are faster without a mask
        return self._batch(samples, is_packed=self._packs and len({len(sample.text.ids) for sample in samples}) > 1)

    def example(self, size: int) -> Batch:
        """As packed texts are, which most batches have."""
        return self._batch(self._longest(size), is_packed=True) if self._packs else super().example(size)

    @property
    def _packs(self) -> bool:
        return self._run.resolved.first_position is not None

    def _batch(self, samples: Sequence[MaskedSample], is_packed: bool) -> Batch:
        texts = [sample.text for sample in samples]
        if is_packed:
            inputs, starts = packed(texts, self._tokenizer.pad_token_id, self._config.text.max_length, self._pad_to,
                                    self._run.resolved.first_position)
        else:
            inputs = self.encoder_inputs(texts)
            width = inputs["input_ids"].shape[1]
            starts = [row * width for row in range(len(texts))]
        positions = np.concatenate([start + sample.positions for start, sample in zip(starts, samples, strict=True)])
        return Batch(inputs | {"positions": torch.from_numpy(positions)},
                     torch.from_numpy(np.concatenate([sample.targets for sample in samples])),
                     torch.tensor([text.weight for text in texts]), digests=tuple(text.digest for text in texts))

    def normalizer(self, indices: Tensor) -> float:
        """Predicted tokens in the global batch."""
        num_ordinary = self.train_table.num_ordinary[indices.numpy()]
        return float(num_predicted(num_ordinary, MASK_PROBABILITY).sum())

    def build_model(self, initial_weights: bool) -> nn.Module:
        """The encoder with its language modelling head, computed for the predicted tokens alone. Collective.

        Raises UserError (64, 66).
        """
        model = super().build_model(initial_weights)
        SparsePrediction.add_to(model)
        ids = np.resize(np.flatnonzero(~is_special(self._tokenizer)), self._config.text.max_length)
        self._tried(  # Collective.
            "first_position", lambda: find_first_position(model, ids, self._tokenizer.pad_token_id),
            {None: "cannot read several texts in a row: batches hold texts of similar lengths"})
        if self._packs:
            self.lengths = replace(self.lengths, window=1)
        return model

    def forward(self, model: nn.Module, batch: Batch) -> Output:
        """Cross-entropy of the predicted tokens, in float32."""
        logits = widened(model(**with_mask(batch.inputs)).logits)  # [P, V]
        losses = cross_entropies(logits, batch.labels, self._config.loss, model.training)  # [P]
        return Output(losses * _token_weight(batch), logits)

    def sample_losses(self, output: Output, batch: Batch) -> Tensor:
        """[B]: the losses of a text's predicted tokens, added."""
        return torch.zeros_like(batch.sample_weight).index_add(0, _owners(batch), output.losses)

    def baselines(self) -> dict[str, float]:
        """The loss of guessing by the frequency of tokens in train. Of much data, a part is used."""
        special = is_special(self._tokenizer)
        counts = 1.0 + np.bincount(self.train_table.ids[:MAX_COUNTED], minlength=len(special))
        for begin, end in self.train_table.spans[sorted(self.train_table.left_out)]:
            counts -= np.bincount(self.train_table.ids[begin:min(end, MAX_COUNTED)], minlength=len(special))
        shares = counts / counts[~special].sum()
        chosen = range(0, len(self.eval_set), -(-len(self.eval_set) // MAX_GUESSED))
        targets = np.concatenate([self.eval_set[0, i].targets for i in chosen])
        return {"guessing by the tokens' frequency": float(-np.log(shares[targets]).mean())}

    def next_steps(self, run: str, python: str) -> dict[str, str]:
        """Fine-tune it; train on own texts."""
        train = f"{python} train.py --task"
        return {"fine-tune": f"{train} text-classification --data FILE.csv --model {run}/model",
                "your own data": f"{train} masked-lm --data FILE.txt    with one text per line"}

    @staticmethod
    def predict(folder: Path, inputs: Sequence[str], device: torch.device, batch_size: int,
                is_wanted: Callable[[int], bool] = lambda number: True) -> Predictions:
        """There are no classes to predict. Raises UserError (64)."""
        raise UserError(f"{folder} has no classes: fine-tune it (train.py --task text-classification --model {folder}),"
                        f" or fill masks: transformers.pipeline('fill-mask', model='{folder}')")


def _token_weight(batch: Batch) -> Tensor:
    """[P]: the sample_weight of each predicted token's sample."""
    return batch.sample_weight[_owners(batch)]


def _owners(batch: Batch) -> Tensor:
    """[P]: the place in the batch of each predicted token's sample."""
    ids, positions, owners = batch.inputs["input_ids"], batch.inputs["positions"], batch.inputs.get("owners")
    return positions // ids.shape[1] if owners is None else owners.flatten()[positions]


def _loss_sums(output: Output, batch: Batch) -> Tensor:
    return torch.stack([output.loss_sum.double(), _token_weight(batch).double().sum()])


def _loss_values(sums: Tensor) -> dict[str, float]:
    loss = float(sums[0]) / float(sums[1])
    return {"loss": loss, "perplexity": math.exp(min(loss, 700))}  # e^710 is beyond a float
