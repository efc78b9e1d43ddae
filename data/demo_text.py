"""The built-in texts, from the Python that runs this: no download, and no copy of them in the project.

text-classification: docstrings of eight packages of the standard library, the package to be told from the text; the packages' names
are masked. masked-lm: the language reference in pydoc_data.topics, a paragraph a line. A fifth is for validation; which one is a
function of the text, and texts that occur twice are left out, so that none is on both sides.
"""

import ast
import csv
import hashlib
import platform
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from utils.errors import Exit, UserError

PACKAGES = ("asyncio", "email", "importlib", "logging", "unittest", "xml", "multiprocessing", "http")
LAYOUT_VERSION = 1
SHORTEST = 20  # characters
VAL_SHARE = 5  # one in so many


def source(task: str) -> tuple[str, Callable[[Path], None]]:
    """The folder's name for `task`, and what writes its files. The texts differ from one version of Python to the next."""
    name, write = {"text-classification": ("docstrings", _write_docstrings), "masked-lm": ("topics", _write_topics)}[task]
    return f"{name}-{LAYOUT_VERSION}-python-{platform.python_version()}", write


def linear_baseline(train: Any, val: Any) -> float:
    """Accuracy (0..1) on `val` of ridge regression on TF-IDF of token counts, one against all. Both: TokenTable. A few seconds."""
    import numpy as np

    vocabulary = int(train.ids.max()) + 1

    def counts(table: Any) -> np.ndarray:  # [N, V]
        rows = [np.bincount(table.ids[begin:end], minlength=vocabulary)[:vocabulary] for begin, end in table.spans]
        return np.stack(rows).astype(np.float32)

    train_counts = counts(train)
    idf = np.log(len(train) / np.maximum(1, (train_counts > 0).sum(axis=0)))
    train_x, val_x = (np.log1p(matrix) * idf for matrix in (train_counts, counts(val)))
    train_x, val_x = (matrix / np.maximum(1e-9, np.linalg.norm(matrix, axis=1, keepdims=True)) for matrix in (train_x, val_x))
    one_hot = np.eye(int(train.labels.max()) + 1, dtype=np.float32)[train.labels]
    mean = one_hot.mean(axis=0)
    dual = np.linalg.solve(train_x @ train_x.T + np.eye(len(train_x), dtype=np.float32), one_hot - mean)  # [N, C]
    return float(((val_x @ (train_x.T @ dual) + mean).argmax(axis=1) == val.labels).mean())


def _write_docstrings(root: Path) -> None:
    rows: dict[str, str] = {}
    for package in PACKAGES:
        for text in _docstrings(package):
            masked = re.sub("|".join(PACKAGES), "_", " ".join(text.split()), flags=re.IGNORECASE)
            if len(masked) >= SHORTEST:
                rows[masked] = package if rows.get(masked, package) == package else ""  # "": it stands in two packages
    root.mkdir(parents=True)
    for split, is_val in (("train", False), ("val", True)):
        with (root / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows((text, label) for text, label in rows.items() if label and _is_val(text) == is_val)


def _docstrings(package: str) -> Iterator[str]:
    """The docstrings in a package's source files, in the order of files and lines; nothing is imported."""
    spec = find_spec(package)
    files = sorted(Path(spec.origin).parent.rglob("*.py")) if spec and spec.origin and spec.origin.endswith(".py") else []
    if not files:
        raise UserError(f"this Python lacks the source of its package {package}, of which the built-in texts are made; pass your own by"
                        " --data", Exit.NO_INPUT)
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                yield text


def _write_topics(root: Path) -> None:
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError:
        raise UserError("this Python has no pydoc_data, of which the built-in texts are made; pass your own by --data",
                        Exit.NO_INPUT) from None
    paragraphs = dict.fromkeys(" ".join(text.split()) for name in sorted(topics) for text in topics[name].split("\n\n"))
    root.mkdir(parents=True)
    for split, is_val in (("train", False), ("val", True)):
        chosen = [text for text in paragraphs if len(text) >= SHORTEST and _is_val(text) == is_val]
        (root / f"{split}.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")


def _is_val(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % VAL_SHARE == 0
