"""data/demo_text.py: the built-in texts are whole, no text is on both sides, and no label stands in its text."""

import asyncio
import csv
import inspect
import logging
import os
import re
import subprocess
import sys
import unittest
from collections import Counter
from email.message import Message
from http.cookiejar import Cookie
from importlib.abc import Loader
from multiprocessing.pool import Pool
from pathlib import Path
from pydoc_data.topics import topics
from xml.sax.handler import ContentHandler

import pytest

from data import demo_text
from data.demo import SETTINGS, unpack_demo
from data.demo_text import PACKAGES, SHORTEST
from data.tables.table import TEXTS
from data.texts.index import TextSource, read_texts
from utils.errors import Exit, UserError
from utils.settings.command_line import parse_command_line
from utils.settings.config import settings

ROOT = Path(__file__).parents[3]
TASKS = ("text-classification", "masked-lm")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def docstrings(cache):
    """{split: [(text, label)]}"""
    found = {}
    for split in ("train", "val"):
        with (unpack_demo("text-classification", cache) / f"{split}.csv").open(encoding="utf-8", newline="") as file:
            header, *found[split] = map(tuple, csv.reader(file))
            assert header == ("text", "label")
    return found


@pytest.fixture(scope="module")
def paragraphs(cache):
    """{split: [text]}"""
    files = {split: unpack_demo("masked-lm", cache) / f"{split}.txt" for split in ("train", "val")}
    return {split: file.read_bytes().decode().removesuffix("\n").split("\n") for split, file in files.items()}


def masked(text):
    """On one line, without the packages' names."""
    return re.sub("|".join(PACKAGES), "_", " ".join(text.split()), flags=re.IGNORECASE)


# --- docstrings of packages


@pytest.mark.parametrize("thing",
                         [asyncio.Queue, Message, Loader, logging.Formatter, unittest.TestCase, ContentHandler, Pool,
                          Cookie])
def test_a_docstring_is_there_under_its_package(docstrings, thing):
    text, package = masked(inspect.getdoc(thing)), thing.__module__.split(".")[0]
    assert [label for rows in docstrings.values() for found, label in rows if found == text] == [package]


def test_every_docstring_that_one_package_alone_has_is_there_once(docstrings):
    packages = {}
    for package in PACKAGES:
        for text in demo_text._docstrings(package):
            packages.setdefault(masked(text), set()).add(package)
    of_one = [(text, min(found)) for text, found in packages.items() if len(found) == 1 and len(text) >= SHORTEST]
    assert sorted(docstrings["train"] + docstrings["val"]) == sorted(of_one) and len(of_one) > 1500


def test_names_of_packages_and_line_breaks_are_in_no_text(docstrings):
    texts = [text for rows in docstrings.values() for text, _ in rows]
    assert [text for text in texts if re.search("|".join(PACKAGES), text, re.IGNORECASE)
            or text != " ".join(text.split())] == []


def test_every_package_has_its_share_of_both_splits(docstrings):
    train, val = (Counter(label for _, label in docstrings[split]) for split in ("train", "val"))
    assert set(train) == set(val) == set(PACKAGES)
    assert min(val.values()) >= 10 and min(train.values()) >= 100


def test_a_docstring_occurs_once_and_in_one_package(tmp_path, monkeypatch):
    """One of two packages is left out; one that a package has twice occurs once."""
    for package, own in (("first_one", "only in FIRST_ONE, and twice"),
                         ("second_one", "not here in first_one, only in second_one")):
        (tmp_path / package / "deep").mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text(f"'{own}'\nraise ImportError('it was imported')\n")
        (tmp_path / package / "deep/er.py").write_text(f"async def f():\n '{own}'\n class C: 'of {package},   in both"
                                                       " \\n of them'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo_text, "PACKAGES", ("first_one", "second_one"))
    root = unpack_demo("text-classification", tmp_path)
    lines = [line for split in ("train", "val") for line in (root / f"{split}.csv").read_text().splitlines()
             if line != "text,label"]
    assert sorted(lines) == ['"not here in _, only in _",second_one', '"only in _, and twice",first_one']


def test_a_python_without_the_source_of_a_package_is_66(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_text, "PACKAGES", ("logging", "sys"))
    with pytest.raises(UserError, match="package sys, which this Python lacks") as error:
        unpack_demo("text-classification", tmp_path)
    assert (error.value.code, list(tmp_path.rglob("*.csv"))) == (Exit.NO_INPUT, [])


# --- the language reference


def test_every_long_paragraph_of_the_reference_is_one_line(paragraphs):
    """Every paragraph of the reference that is long enough is there once on a line."""
    expected = {" ".join(text.split()) for topic in topics.values() for text in topic.split("\n\n")}
    found = paragraphs["train"] + paragraphs["val"]
    assert sorted(found) == sorted(text for text in expected if len(text) >= SHORTEST) and len(found) > 1500


def test_texts_read_from_the_reference_are_its_paragraphs(paragraphs, cache):
    source = TextSource(str(unpack_demo("masked-lm", cache)), TEXTS, "auto", (), tokenizer="", max_length=64,
                        split_long=True)
    assert list(read_texts(source)) == paragraphs["train"]


# --- both


@pytest.mark.parametrize("texts", ["docstrings", "paragraphs"])
def test_about_a_fifth_is_for_validation(texts, request):
    train, val = (len(request.getfixturevalue(texts)[split]) for split in ("train", "val"))
    assert abs(val / (train + val) - 52 / 256) < 0.04  # 4 sigma for 1,900 texts; 52 of 256 bytes are multiples of 5


@pytest.mark.parametrize("task", TASKS)
def test_two_processes_write_the_same_bytes(task, cache, tmp_path):
    program = f"import sys, pathlib, data.demo; print(data.demo.unpack_demo({task!r}, pathlib.Path(sys.argv[1])))"
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT,
                         env=os.environ | {"PYTHONHASHSEED": "5"},
                         capture_output=True, text=True, check=True)
    here, there = unpack_demo(task, cache), Path(run.stdout.strip())
    assert here.relative_to(cache) == there.relative_to(tmp_path)
    assert {file.name: file.read_bytes() for file in here.iterdir()} == {file.name: file.read_bytes()
                                                                         for file in there.iterdir()}


@pytest.mark.parametrize("task", TASKS)
def test_settings_are_settings_of_the_task(task):
    config = parse_command_line(["--task", task], SETTINGS)
    assert {name: settings(config)[name] for name in SETTINGS[task]} == SETTINGS[task]
