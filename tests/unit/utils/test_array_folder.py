"""utils/array_folder.py: arrays in a cache are whole or not there, made by one process at a time, mapped by all."""

import errno
import fcntl
import os
import re
import select
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.harness.mapped import is_mapped
from utils import array_folder
from utils.array_folder import kept_arrays, open_arrays
from utils.files import make_folder

ARRAYS = {"flat": np.arange(5, dtype=np.int64), "pairs": np.arange(6, dtype=np.uint16).reshape(3, 2),
          "part": np.arange(10.0)[::3], "empty": np.zeros(0, np.uint8),
          "no pairs": np.zeros((0, 2), np.int32)}


def contents(arrays):
    return {name: (array.dtype, array.shape, array.tolist()) for name, array in arrays.items()}


def never():
    pytest.fail("made again")


# --- what is kept


def test_arrays_come_back_as_they_were_and_are_made_once(tmp_path):
    for make in (lambda: ARRAYS, never):
        assert contents(kept_arrays(tmp_path / "cache" / "new", make)) == contents(ARRAYS)
    assert [path.name for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


@pytest.mark.parametrize("large", [1, 2**26])
def test_arrays_are_mapped_and_cannot_be_written(large, monkeypatch, tmp_path):
    monkeypatch.setattr(array_folder, "LARGE", large)
    before = os.listdir("/proc/self/fd")
    found = kept_arrays(tmp_path / "new", lambda: ARRAYS)
    assert (len(os.listdir("/proc/self/fd")) == len(before)) == (large > 1)
    mapped = {name: (is_mapped(array), array.flags.writeable) for name, array in found.items() if array.size}
    assert mapped == dict.fromkeys(["flat", "pairs", "part"], (True, False))


def shorten(file):
    os.truncate(file, file.stat().st_size - 1)


def lengthen(file):
    file.write_bytes(file.read_bytes() + b"\0")


@pytest.mark.parametrize(("name", "damage"), [
    ("flat", shorten), ("flat", lengthen), ("flat", Path.unlink), ("empty", lengthen), ("empty", Path.unlink),
    ("about.json", shorten), ("about.json", lengthen), ("about.json", Path.unlink)])
def test_what_has_another_size_than_was_written_is_made_anew(tmp_path, name, damage):
    kept_arrays(tmp_path / "new", lambda: ARRAYS)
    damage(tmp_path / "new" / name)
    assert open_arrays(tmp_path / "new") is None
    assert contents(kept_arrays(tmp_path / "new", lambda: ARRAYS)) == contents(ARRAYS)
    assert contents(open_arrays(tmp_path / "new")[1]) == contents(ARRAYS)


def test_a_cache_that_cannot_be_written_leaves_the_arrays_in_memory():
    assert contents(kept_arrays(Path("/proc/nowhere/new"), lambda: ARRAYS)) == contents(ARRAYS)
    with pytest.raises(OSError, match="nowhere"):
        make_folder(Path("/proc/nowhere/new"), never, open_arrays)


def test_an_error_of_who_makes_it_leaves_nothing_behind(tmp_path):
    def write(partial):
        (partial / "flat").write_bytes(b"half")
        raise ValueError("a bad row")

    with pytest.raises(ValueError, match="a bad row"):
        make_folder(tmp_path / "cache" / "new", write, open_arrays)
    assert list((tmp_path / "cache").iterdir()) == []


def test_all_reaches_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    seen, fsync, rename = [], os.fsync, os.rename

    def noted_fsync(descriptor):
        seen.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_rename(old, new, **options):
        seen.append((Path(old), Path(new)))
        rename(old, new, **options)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    kept_arrays(tmp_path / "new", lambda: ARRAYS)
    at = next(i for i, one in enumerate(seen) if isinstance(one, tuple))
    partial, folder = seen[at]
    assert set(seen[:at]) >= {partial, partial / "about.json", *(partial / name for name in ARRAYS)}
    assert folder == tmp_path / "new"
    assert seen[at + 1:] == [tmp_path]  # the name itself


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_folder_that_another_node_makes_meanwhile_stays(tmp_path, number):
    """Without locks between nodes both write. The other's is there once this one has asked `number` times."""
    asked, made, own, other = [], [], tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        kept_arrays(folder, lambda: ARRAYS)

    def is_whole(folder):
        found = open_arrays(folder)
        asked.append(folder)
        if len(asked) == number:
            made.append(other.rename(folder).stat().st_ino)
        return found

    make_folder(tmp_path / "new", lambda partial: shutil.copytree(own, partial, dirs_exist_ok=True), is_whole)
    assert made in ([], [(tmp_path / "new").stat().st_ino]) and open_arrays(tmp_path / "new") is not None


# --- several processes

MAKER = """
import sys
from pathlib import Path
from utils.array_folder import describe, open_arrays
from utils.files import make_folder

def write(partial):
    print("works", flush=True)
    if sys.stdin.readline() == "fail\\n":
        sys.exit(3)
    (partial / "array").write_bytes(b"1")
    describe(partial, {}, {"array": ("u1", ())})

make_folder(Path(sys.argv[1]), write, open_arrays)
print("found", flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """start(): a process that makes tmp_path/cache/new: prints "works", reads a line, prints "found"."""
    started = []

    def start():
        started.append(subprocess.Popen([sys.executable, "-c", MAKER, tmp_path / "cache" / "new"], cwd=ROOT, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def send(process, line):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def wait_until_blocked(process):
    """Until it waits for a lock; the kernel lists who does."""
    while not re.search(rf"->.* {process.pid} ", Path("/proc/locks").read_text()):
        assert not select.select([process.stdout], [], [], 0.005)[0], "it works too, or has ended"


def test_one_works_while_others_wait_and_find_what_it_made(start):
    first = start()
    assert first.stdout.readline() == "works\n"
    others = [start(), start()]
    for other in others:
        wait_until_blocked(other)
    send(first, "go on")
    assert [process.stdout.readline() for process in (first, *others)] == ["found\n"] * 3


@pytest.mark.rows(1)
@pytest.mark.parametrize("end", [subprocess.Popen.kill, lambda first: send(first, "fail")], ids=["killed", "failed"])
def test_where_the_one_that_works_ends_all_others_go_on_at_once(start, end, tmp_path):
    first = start()
    assert first.stdout.readline() == "works\n"
    others = [start(), start()]
    for other in others:
        wait_until_blocked(other)
    end(first)
    assert [other.stdout.readline() for other in others] == ["works\n"] * 2
    for other in others:
        send(other, "go on")
    assert [other.stdout.readline() for other in others] == ["found\n"] * 2
    assert [path.name for path in (tmp_path / "cache").glob("[!.]*")] == ["new"]


def test_without_locks_everyone_works(tmp_path, monkeypatch):
    def refuse(*_):  # as a file system without locks does; there is none here
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert contents(kept_arrays(tmp_path / "new", lambda: ARRAYS)) == contents(open_arrays(tmp_path / "new")[1])
