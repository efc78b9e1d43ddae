"""One tar file: the samples in it, by the names of their members; scanned once, kept in the cache.

    shard = open_shard("train-000.tar")             # names, places, keys and labels of its images
    read_member("/data/train-000.tar/cat/1.jpg")    # bytes; any process, at any time

The layout is WebDataset's: members with one name up to the first dot are a sample: KEY.jpg, and KEY.cls or KEY.json,
which has its label.
Legend: M images.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from stat import S_ISREG
from typing import Any

import numpy as np

from data.images.index import EXTENSIONS
from data.shards.headers import Member, Reader, members_of, shown
from utils.array_folder import digest_of, kept_arrays
from utils.errors import Exit, UserError
from utils.files import cache_path

CACHE_VERSION = 2
ENDING = ".tar"
MAX_LABEL = 2**16  # bytes of a KEY.cls or KEY.json
MAX_WORD = 1024  # bytes of the label in it
MAX_OPEN = 64  # tar files that a process keeps open


@dataclass(frozen=True, eq=False)
class Shard:
    """The images of a tar file, sorted by name."""

    names: np.ndarray  # [M] bytes: of their members
    places: np.ndarray  # [M, 2] int64: first byte, size
    keys: np.ndarray  # [M] bytes: by which a folder would be sorted: FOLDER, NUL, FILE, with the dots that were escaped
    labels: np.ndarray  # [M] bytes, UTF-8; empty: it has none
    others: np.ndarray  # [1] int64: members that are of no sample of images

    def __len__(self) -> int:
        return len(self.names)


def open_shard(path: str) -> Shard:
    """The index of a tar file as it is now, from the cache or by a scan. Raises UserError (65, 66, 74)."""
    try:
        stat = os.stat(path)
        if not S_ISREG(stat.st_mode):
            raise UserError(f"{path} is not a regular file, so it cannot be read as a tar file", Exit.BAD_DATA)
        name = digest_of(CACHE_VERSION, os.path.abspath(path), stat.st_size, stat.st_mtime_ns)
        return Shard(**kept_arrays(cache_path() / f"shard-{name}", lambda: _scan(path)))
    except OSError as error:
        code = Exit.NO_INPUT if isinstance(error, FileNotFoundError) else Exit.IO
        raise UserError(f"cannot read {path}: {error.strerror}", code) from None


def member_of(name: bytes) -> bytes:
    """The member that a file of this name becomes: a dot in the KEY, which the first dot ends, is %2E there.

    And %2E is %252E, %252E is %25252E, and so on, so that each has its own.
    """
    folder, slash, file = name.rpartition(b"/")
    stem, dot, ending = file.rpartition(b".")
    return folder + slash + re.sub(rb"%((?:25)*2E)", rb"%25\1", stem).replace(b".", b"%2E") + dot + ending


def shard_of(path: str) -> tuple[str, str]:
    """The tar file of SHARD.tar/MEMBER, and the member."""
    parts = path.split(f"{ENDING}/")
    first = next((n for n in range(1, len(parts) - 1) if os.path.isfile(f"{ENDING}/".join(parts[:n]) + ENDING)),
                 len(parts) - 1)  # also a folder above may be called x.tar
    return f"{ENDING}/".join(parts[:first]) + ENDING, f"{ENDING}/".join(parts[first:])


def names_in(folder: str) -> tuple[str, frozenset[str]]:
    """The tar file of SHARD.tar/FOLDER, and the names of the images in this folder.

    Raises UserError (65, 66, 74), OSError where no tar file is meant.
    """
    shard, inside = shard_of(f"{folder}/")
    if not os.path.isfile(shard):
        raise FileNotFoundError(2, "there is no such file", shard)
    return shard, frozenset(_names_by_folder(shard).get(os.path.normpath(f"/{inside}")[1:], ()))


@lru_cache
def _names_by_folder(shard: str) -> Mapping[str, list[str]]:
    found = defaultdict(list)
    for name in open_shard(shard).names.tolist():
        folder, file = os.path.split(os.fsdecode(name))
        found[folder].append(file)
    return found


def stat_of(path: str) -> tuple[int, int]:
    """Size, and time of the last change in ns, of a file; of SHARD.tar/MEMBER the time of the tar file. Raises OSError.
    """
    try:
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns
    except NotADirectoryError:
        shard, _, (_, size) = _find(path)
        return size, os.stat(shard).st_mtime_ns


def is_member(path: str) -> bool:
    """Whether it is SHARD.tar/MEMBER of an image that is there."""
    with suppress(OSError):
        return bool(_find(path))
    return False


def read_member(path: str) -> bytes:
    """The bytes of SHARD.tar/MEMBER. Raises OSError."""
    _, file, (offset, size) = _find(path)
    data = os.pread(file.descriptor, size, offset)
    if len(data) < size:
        raise OSError(0, "the tar file has become shorter", path)
    return data


def _find(path: str) -> tuple[str, "_File", list[int]]:
    """The tar file of SHARD.tar/MEMBER, opened; first byte and size of the member. Raises OSError."""
    name, member = shard_of(path)
    with suppress(UserError):
        (state, names, places), file = _index(name), _opened(name)
        if file.state != state:
            raise OSError(0, "the tar file has changed since it was scanned", path)
        place = int(np.searchsorted(names, wanted := np.bytes_(os.fsencode(member))))
        if place < len(names) and names[place] == wanted:
            return name, file, places[place].tolist()
    raise FileNotFoundError(2, "there is no such image in the tar file", path)


class _File:
    """An open file, closed when nobody holds it any more."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.state = _state(os.fstat(self.descriptor))

    def __del__(self) -> None:
        os.close(self.descriptor)


def _state(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


@cache
def _index(path: str) -> tuple[tuple[int, int], np.ndarray, np.ndarray]:
    """A tar file's size and time, and then its names and places: mapped, not read."""
    state, shard = _state(os.stat(path)), open_shard(path)
    return state, shard.names, shard.places


_opened = lru_cache(MAX_OPEN)(_File)


def _scan(path: str) -> dict[str, np.ndarray]:
    """What Shard has, by the name of the field."""
    with Reader(path) as reader:
        samples, num_others = _samples_in(reader)
        rows = sorted((image.name, image.offset, image.size, _key(image.name), _label(reader, key, parts))
                      for key, image, parts in samples)
    names, offsets, sizes, keys, labels = zip(*rows, strict=True) if rows else [()] * 5
    return {"names": np.array(names, np.bytes_), "places": np.array([offsets, sizes], np.int64).T.reshape(-1, 2),
            "keys": np.array(keys, np.bytes_), "labels": np.array(labels, np.bytes_), "others": np.array([num_others])}


def _samples_in(reader: Reader) -> tuple[Iterator[tuple[bytes, Member, dict[bytes, Member]]], int]:
    """(KEY, its image, {ending: member}) of each sample; and the number of members of other kinds."""
    parts_of: dict[bytes, dict[bytes, Member]] = {}
    for member in members_of(reader):
        folder, slash, file = member.name.rpartition(b"/")
        stem, _, ending = file.partition(b".")
        if not stem or b"\0" in member.name:
            continue
        parts = parts_of.setdefault(folder + slash + stem, {})
        if ending.lower() in parts:
            raise _wrong(reader, member.name, "is there twice, and a KEY must be one sample")
        parts[ending.lower()] = member
    images = {key: [ending for ending in parts if b"." + ending in _IMAGES] for key, parts in parts_of.items()}
    for key, endings in images.items():
        if len(endings) > 1:
            raise _wrong(reader, key, f"has several images ({', '.join(map(shown, endings))}); keep one")
        if not endings and {b"cls", b"json"} & parts_of[key].keys():
            raise _wrong(reader, key, "has a label and no image")
    num_others = sum(len({*parts_of[key]} - {*endings, b"cls", b"json"}) for key, endings in images.items())
    return ((key, parts_of[key][endings[0]], parts_of[key]) for key, endings in images.items() if endings), num_others


def _label(reader: Reader, key: bytes, parts: dict[bytes, Member]) -> bytes:
    """The label of a sample, as its .cls or the "label" of its .json has it; b"" without one. Raises UserError (65)."""
    found = {}
    for ending in (b"cls", b"json"):
        if not (member := parts.get(ending)) or (any(found.values()) and member.size > MAX_LABEL):
            continue
        if member.size > MAX_LABEL:
            raise _wrong(reader, member.name, f"has {member.size} bytes; a label has at most {MAX_LABEL}")
        text = reader.read_at(member.offset, member.size)
        try:
            found[ending] = text.decode().strip() if ending == b"cls" else _word(json.loads(text))
        except (ValueError, RecursionError):
            raise _wrong(reader, member.name, "is no text in UTF-8, or no JSON") from None
    labels = {label for label in found.values() if label}
    if len(labels) > 1:
        raise _wrong(reader, key, f"has the labels {' and '.join(map(repr, sorted(labels)))}; keep one")
    label = "".join(labels)
    if len(label.encode(errors="replace")) > MAX_WORD or not label.isprintable():
        raise _wrong(reader, key, f"has the label {label[:99]!a}; a label is printable, of at most {MAX_WORD} bytes")
    return label.encode()


def _word(value: Any) -> str:
    label = value.get("label", value.get("cls", "")) if isinstance(value, dict) else value
    return str(label) if isinstance(label, str | int) and not isinstance(label, bool) else ""


def _key(name: bytes) -> bytes:
    folder, _, file = name.rpartition(b"/")
    return folder + b"\0" + re.sub(rb"%25((?:25)*2E)", rb"%\1", re.sub(rb"%2E", b".", file) if b"%" in file else file)


def _wrong(reader: Reader, name: bytes, problem: str) -> UserError:
    return UserError(f"{reader.path}: {shown(name)} {problem}", Exit.BAD_DATA)


_IMAGES = {ending.encode() for ending in EXTENSIONS}
