"""The pictures of the documentation are what the code draws today; `python -m docs.pictures` draws them again."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from docs.pictures import loss, rooms, shares
from docs.pictures.__main__ import FOLDER, PICTURES
from docs.pictures.measured import load
from docs.pictures.svg import WIDTH
from tests.conftest import ROOT

SVG = "{http://www.w3.org/2000/svg}"
LIMIT = 30_000  # bytes: light enough to read in a diff


@pytest.mark.parametrize("name", PICTURES)
def test_a_committed_picture_is_what_is_drawn(name):
    assert (FOLDER / f"{name}.svg").read_text() == PICTURES[name](), "draw the pictures again: python -m docs.pictures"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_small_and_its_text_is_text(name):
    content = (FOLDER / f"{name}.svg").read_bytes()
    root = ElementTree.fromstring(content)
    assert (root.get("width"), root.tag, len(content) < LIMIT) == (str(WIDTH), f"{SVG}svg", True)
    assert root.find(f"{SVG}title").text in [text.text for text in root.iter(f"{SVG}text")]


def test_shares_are_the_samplers():
    """Counted by hand: 6 micro-batches on 1, 2, 3 and 4 ranks, the last uneven; each micro-batch is drawn once."""
    counts = {world_size: [len(share) for share in shares.shares(world_size)] for world_size in shares.PROCESSES}
    assert counts == {1: [6], 2: [3, 3], 3: [2, 2, 2], 4: [2, 2, 1, 1]}
    texts = ElementTree.fromstring(shares.draw()).iter(f"{SVG}text")
    drawn = [text.text for text in texts if text.get("class") == "on"]
    assert sorted(drawn) == sorted([*map(str, range(6))] * len(counts))


def test_the_killed_run_is_the_undisturbed_one_bit_by_bit():
    found = load("loss")
    assert set(loss.differences(found)) == {0.0}
    assert len(found["killed"]["starts"]) == 6 and found["killed"]["weights"] == found["undisturbed"]["weights"]


def test_the_map_has_every_file_of_the_program_once():
    drawn = [f"{room}/{name}" for room, names in rooms.rooms().items() for name in names]
    assert len(drawn) == len(set(drawn)) == len(rooms.files())


def test_rooms_import_from_rooms_below_them_alone():
    floor = {room: number for number, row in enumerate(rooms.floors()) for room in row}
    edges = [(room, other) for room, needs in rooms.imports().items() for other in needs]
    assert [(room, other) for room, other in edges if floor[other] <= floor[room]] == []


def test_every_room_has_a_purpose():
    assert set(rooms.rooms()) == set(rooms.PURPOSE)


@pytest.mark.long
def test_every_part_of_a_save_that_the_picture_times_is_there():
    """In a process of its own, because put_clocks replaces functions."""
    work = "import pathlib, docs.pictures.timed as timed; timed.put_clocks(pathlib.Path('spans.json'))"
    done = subprocess.run([sys.executable, "-c", work], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
