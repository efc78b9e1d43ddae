"""The labelled samples that a run with some settings would be trained on, as lines of a table for other runs.

Legend: N samples.
"""

import json

import numpy as np

from data import demo
from data.images.table import TableFiles, is_table
from data.labels import SEPARATOR
from data.shards.index import build_image_index
from data.splits import ValSplit, sort_classes
from data.tables.source import RowReader, TableSource
from data.tables.table import IMAGES, TEXTS, Columns, Row
from models.objectives import kind_of, label_columns_of
from utils.errors import Exit, UserError, some
from utils.files import cache_path
from utils.settings.config import Config


def read_samples(config: Config) -> tuple[list[str], tuple[str, ...], np.ndarray, np.ndarray | None]:
    """Lines, names, labels, groups of all of train; what the data call val or test takes no part.

    lines: N, JSON with what a run needs of the columns; images by absolute paths. names, labels: see
    data.labels.LabelReader.encoded. groups: [N] integers, or None. Raises UserError: 65, also for names of folders and
    images that a table cannot hold, 66, 74.
    """
    data, is_image = config.data, hasattr(config, "images")
    root = data.data if data.data != "demo" else str(demo.unpack_demo(config.run.task, cache_path()))

    # folders of classes, or a table
    if is_image and not is_table(root):
        val = ValSplit(data.val_fraction, config.run.seed, only="train")
        columns = config.images.image_column, config.labels.label_column
        index = build_image_index(root, val, cache_path(), lambda text: None, columns)
        index = index.labelled(sort_classes(index.classes))  # in the order of a table's
        columns, names, train = Columns(("image",), ("label",)), index.classes, index.splits["train"]
        rows = [Row((train.path(number),), (names[label],), 0) for number, label in enumerate(train.labels)]
        labels = train.labels
        _require_table_can_hold(rows, root)
    else:
        column = config.images.image_column if is_image else config.text.text_column
        source = TableSource(root, IMAGES if is_image else TEXTS, column, label_columns_of(config.labels),
                             kind_of(config.labels), data.group_column, data.bad_samples == "skip")
        reader, files = RowReader(source), TableFiles()
        rows = [row._replace(texts=tuple(files.paths)) if is_image else row
                for row in reader.rows("train", *([files.problem] if is_image else []))]
        if not rows:
            raise reader.no_samples("train")
        columns, (names, encoded) = source.columns, reader.labels.encoded()
        labels = encoded["train"]

    # as lines
    wanted = (*columns.texts, *columns.labels, *([columns.group] if columns.group else []))
    lines = [json.dumps(dict(zip(wanted, (*row.texts, *row.labels, row.group), strict=False))) + "\n" for row in rows]
    groups = np.unique([row.group for row in rows], return_inverse=True)[1] if columns.group else None
    return lines, names, labels, groups


def _require_table_can_hold(rows: list[Row], root: str) -> None:
    """Raise UserError (65) if a name of a class or a path would not be read from a table as it is written there."""
    names = {name for row in rows for name in (*row.texts, *row.labels)}
    labels = {name for row in rows for name in row.labels if SEPARATOR in name}
    if wrong := labels | {name for name in names if name.encode("utf-8", "ignore").decode() != name}:
        raise UserError(f"--data {root}: ask.folds makes a table of these folders, where classes have no {SEPARATOR}"
                        f" and paths are UTF-8; rename {some(map(ascii, sorted(wrong)))}", Exit.BAD_DATA)
