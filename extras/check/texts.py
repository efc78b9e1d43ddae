"""What the texts of a data set are like: see survey.py.

Tests: extras/check/tests/test_launches.py
"""

import textwrap
import unicodedata
from collections.abc import Sequence
from itertools import chain

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
    by_split = {split: [*texts_of(source, classes, [split])] for split in source.splits}
    rows_of = [(split, row) for split, found in by_split.items() for row in range(1, 1 + len(found))]
    every, texts, labels, places = [*chain(*by_split.values())], [], [], []
    for table in (train, val):
        numbers, rows = np.unique(table.texts, return_index=True)  # a long text may be several samples
        num_train = len(texts) or len(rows)
        texts += map(every.__getitem__, numbers.tolist())
        places += map(rows_of.__getitem__, numbers.tolist())
        labels.append(table.labels[rows])
    plain = ["\t".join(" ".join(part.split()) for part in unicodedata.normalize("NFKC", text).casefold().split("\t"))
             for text in texts]
    left_out = np.flatnonzero(np.isin(np.unique(train.texts), train.texts[sorted(train.left_out)])).tolist()
    odd = {"one character": np.flatnonzero([len({*text} - {" ", "\t"}) <= 1 for text in plain])}
    exact, same = (np.array([key_of(text.encode()) for text in each]) for each in (texts, plain))
    return Survey(num_train, np.concatenate(labels), exact, same, np.arange(len(texts)), np.zeros((0, 1), np.int8), odd,
                  {}, lambda index: f"{'val' if index >= num_train else 'train'}: {textwrap.shorten(texts[index], 60)}",
                  lambda index: "row {1} of {0}, without those left out".format(*places[index]), frozenset(left_out))
