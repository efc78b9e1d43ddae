"""The built-in texts, from the Python that runs this: no download, and no copy of them in the project.

text-classification: docstrings of eight packages of the standard library; the class is the package, and the packages'
names are masked. masked-lm: the language reference in pydoc_data.topics, one paragraph per line. A fifth is for
validation, chosen by a hash of the text. Texts that occur twice are left out, so that no text is in both splits.
"""

import ast
import csv
import hashlib
import platform
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from utils.errors import Exit, UserError

PACKAGES = ("asyncio", "email", "importlib", "logging", "unittest", "xml", "multiprocessing", "http")
VERSION = f"1-python-{platform.python_version()}"  # of the layout; each version of Python has other texts
SHORTEST = 20  # characters
VAL_EVERY = 5  # one text in five is for validation


def write_docstrings(root: Path) -> None:
    """Write train.csv and val.csv into the new folder `root`. Raises UserError (66)."""
    # collect
    rows: dict[str, str] = {}  # text: its package, or "" if it occurs in two packages
    for package in PACKAGES:
        for text in _docstrings(package):
            masked = re.sub("|".join(PACKAGES), "_", " ".join(text.split()), flags=re.IGNORECASE)
            if len(masked) >= SHORTEST:
                rows[masked] = package if rows.get(masked, package) == package else ""

    # write
    for split, is_val in (("train", False), ("val", True)):
        with (root / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows((text, label) for text, label in rows.items() if label and _is_val(text) == is_val)


def _docstrings(package: str) -> Iterator[str]:
    """The docstrings in a package's source files, in the order of files and lines; nothing is imported."""
    spec = find_spec(package)
    has_source = spec and spec.origin and spec.origin.endswith(".py")
    files = sorted(Path(spec.origin).parent.rglob("*.py")) if has_source else []
    if not files:
        raise UserError(f"the built-in texts come from the source of Python's package {package}, which this Python"
                        " lacks; pass your own with --data", Exit.NO_INPUT)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for file in files:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield text


def write_topics(root: Path) -> None:
    """Write train.txt and val.txt into the new folder `root`. Raises UserError (66)."""
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError:
        raise UserError("this Python lacks the built-in texts (pydoc_data); pass --data", Exit.NO_INPUT) from None
    texts = (text for name in sorted(topics) for text in topics[name].split("\n\n"))
    paragraphs = dict.fromkeys(" ".join(text.split()) for text in texts)
    for split, is_val in (("train", False), ("val", True)):
        chosen = [text for text in paragraphs if len(text) >= SHORTEST and _is_val(text) == is_val]
        (root / f"{split}.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")


def _is_val(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % VAL_EVERY == 0
