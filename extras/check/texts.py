"""What the texts of a data set are like: see survey.py.

Tests: extras/check/tests/test_launches.py
"""

import textwrap
import unicodedata
from collections.abc import Sequence

import numpy as np

from data.texts.index import TextSource, texts_of
from data.texts.text_set import TokenTable
from extras.check.survey import Survey, key_of
from models.tasks.base import Task
from models.tasks.text import TextTask
from utils.distributed.world import World


def survey_of(task: Task, world: World) -> Survey | None:
    """Of whole texts; None for a task of another kind. Collective."""
    if not isinstance(task, TextTask):
        return None
    return world.everywhere(  # Collective.
        lambda: survey_texts(task.source, task.classes, task.train_table, task.eval_table), takes_long=True)


def survey_texts(source: TextSource, classes: Sequence[str], train: TokenTable, val: TokenTable) -> Survey:
    """Look at whole texts. Raises UserError (65, 74) if the files cannot be read as before."""
    every, texts, labels = [*texts_of(source, classes, source.splits)], [], []
    for table in (train, val):
        numbers, rows = np.unique(table.texts, return_index=True)  # a long text may be several samples
        num_train = len(texts) or len(rows)
        texts += map(every.__getitem__, numbers.tolist())
        labels.append(table.labels[rows])
    plain = ["\t".join(" ".join(part.split()) for part in unicodedata.normalize("NFKC", text).casefold().split("\t"))
             for text in texts]
    odd = {"one character": np.flatnonzero([len({*text} - {" ", "\t"}) <= 1 for text in plain])}
    exact, same = (np.array([key_of(text.encode()) for text in each]) for each in (texts, plain))
    split_of = lambda index: "val" if index >= num_train else "train"  # noqa: E731
    return Survey(num_train, np.concatenate(labels), exact, same, np.arange(len(texts)), np.zeros((0, 1), np.int8), odd,
                  {}, lambda index: f"{split_of(index)}: {textwrap.shorten(texts[index], 60)}",
                  lambda index: f"{split_of(index)} row {1 + index - (num_train if index >= num_train else 0)}")
