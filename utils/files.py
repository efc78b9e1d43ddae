"""Small files: a reader sees the old or the new content, and damage is detected. And the folder of caches."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from utils.errors import Exit, UserError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; empty if there is none. Raises UserError (74)."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); restore it, or use another --run-dir or --fresh",
                        Exit.IO) from None


def sync(path: Path) -> None:
    """fsync a file or folder: it must reach the disk before it is renamed into place."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part of it."""
    partial = path.with_name(f".tmp-{path.name}")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_checked(path: Path, value: Any) -> None:
    """Write a JSON value with its checksum, so that damage is detected."""
    text = json.dumps(value)
    write_atomically(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def read_checked(path: Path) -> Any:
    """What write_checked wrote. Raises OSError, or ValueError if it is damaged."""
    digest, _, text = path.read_text().partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError(f"{path} is damaged")
    return json.loads(text)


def cache_path() -> Path:
    """The folder of caches: $LOCKSTEP_CACHE, else $XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("LOCKSTEP_CACHE") or home / "lockstep")
