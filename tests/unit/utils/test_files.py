"""utils/files.py: small files are written whole, and caches are where the environment says."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from utils import files
from utils.errors import Exit, UserError
from utils.files import cache_path, read_checked, write_atomically, write_checked


def test_a_small_file_is_written_whole(tmp_path):
    for text in ("a long first content", "short"):
        write_atomically(tmp_path / "file", text)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "short")]


@pytest.mark.parametrize("environment, expected", [
    ({"LOCKSTEP_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
    ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/lockstep"),
    ({"HOME": "/c"}, "/c/.cache/lockstep"),
    ({"LOCKSTEP_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/lockstep")])
def test_the_cache_is_where_the_environment_says(monkeypatch, environment, expected):
    for name in ("LOCKSTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_path()) == expected


def test_a_user_without_a_home_is_told_what_to_give_and_needs_none_with_it(monkeypatch):
    """As docker -u and Kubernetes start a program: a number that is in no list of users."""
    for name in ("LOCKSTEP_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    with pytest.raises(UserError, match="LOCKSTEP_CACHE=FOLDER") as refused:
        cache_path()
    assert refused.value.code == Exit.CANNOT_CREATE
    monkeypatch.setenv("LOCKSTEP_CACHE", "/a")
    assert str(cache_path()) == "/a"


def test_a_checked_file_is_read_as_written_and_damage_is_found(tmp_path):
    file, value = tmp_path / "file", {"name": "a\udcff", "numbers": [1, 2.5, None]}
    write_checked(file, value)
    assert read_checked(file) == value
    good = file.read_bytes()
    for position in range(len(good)):
        for bad in (good[:position], good[:position] + bytes([good[position] ^ 1]) + good[position + 1:]):
            file.write_bytes(bad)
            with pytest.raises(ValueError):
                read_checked(file)


# --- a file system of several nodes, which remembers what was there


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only pass while something sleeps."""
    passed = [0.0]

    def sleep(seconds):
        passed[0] += seconds

    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: passed[0], sleep=sleep))
    return lambda: passed[0]


def error():
    raise OSError


@pytest.mark.parametrize(("hidden_s", "is_found", "num_told"), [(0, True, 0), (3, True, 0), (60, True, 1),
                                                                (90, False, 1)])
def test_what_another_node_wrote_is_looked_for_as_long_as_nfs_caches(
        clock, tmp_path, monkeypatch, hidden_s, is_found, num_told):
    told = []
    monkeypatch.setattr(files, "say", lambda text: told.append(clock()))
    found = files.wait_to_see(lambda: clock() >= hidden_s or error(), tmp_path / "run")
    assert (found, clock() <= files.CACHED_S + 1, len(told)) == (is_found, True, num_told)
    assert all(5 < when < 6 for when in told)


def test_looking_again_opens_every_folder_above_from_the_top(clock, tmp_path, monkeypatch):
    """NFS then asks the server."""
    opened, scandir = [], os.scandir
    monkeypatch.setattr(files.os, "scandir", lambda folder: opened.append(folder) or scandir(folder))
    files.wait_to_see(lambda: clock() > 0, tmp_path / "runs" / "run")
    assert opened == [*reversed(tmp_path.parents), tmp_path, tmp_path / "runs"]


def test_a_folder_that_another_node_has_made_is_not_made_again(clock, tmp_path, monkeypatch):
    """It is listed, but a look at its name still finds nothing."""
    folder, exists = tmp_path / "made", Path.exists
    folder.mkdir()
    monkeypatch.setattr(Path, "exists", lambda path: exists(path) and (path != folder or clock() > 30))
    files.make_folder(folder, lambda partial: pytest.fail("made again"), is_whole=Path.exists)
    assert clock() > 30
