"""utils/files.py: small files are written whole, and caches are where the environment says."""

import pytest

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
