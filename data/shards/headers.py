"""Members of a tar file, by its headers alone: names, and where their bytes lie.

    for member in members_of("train-000.tar"): ...          # Member(name, offset, size)

POSIX ustar, with the long names and sizes of GNU tar and of pax (IEEE 1003.1). What an image cannot lie in is refused:
compressed files, sparse members, links. Every number of a header is checked before it is used: a file may be hostile.

Tests: tests/unit/data/shards/test_shard.py
"""

import io
import os
from collections.abc import Iterator
from typing import NamedTuple

from utils.errors import Exit, UserError, counted

BLOCK = 512  # bytes: of a header; what members are padded to
MAX_NAME = 1024  # bytes: the names of a tar file are an array, which is as wide as the longest
MAX_EXTENDED = 2**20  # bytes of a long name, or of pax records
_MAGIC = {b"\x1f\x8b": "gzip -d", b"BZh": "bzip2 -d", b"\xfd7zXZ": "xz -d", b"\x28\xb5\x2f\xfd": "zstd -d"}


class Member(NamedTuple):
    """A file in a tar file."""

    name: bytes
    offset: int  # of its first byte
    size: int  # bytes


class Reader(io.BufferedReader):
    """A file that is read at any place. What follows is in the buffer: small members stand close together."""

    def __init__(self, path: str):
        super().__init__(io.FileIO(path))
        self.path, self.size = path, os.fstat(self.fileno()).st_size

    def read_at(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset` on; fewer at the end of the file."""
        self.seek(offset)
        return self.read(size)


def members_of(reader: Reader) -> Iterator[Member]:
    """The regular files in a tar file, in its order; folders are left out. Raises UserError (65, 74)."""
    offset, long_name, long_size = 0, b"", -1
    while (header := reader.read_at(offset, BLOCK)).strip(b"\0"):
        # the header
        if len(header) < BLOCK or not _is_sound(header):
            raise _error(reader, offset, header)
        kind, begin = header[156:157], offset + BLOCK
        name, size = long_name or _name_in(header), long_size if long_size >= 0 else _number(header[124:136])
        if not 0 <= size <= reader.size - begin:
            raise _damaged(reader, f"member {shown(name[:99])} ends behind the end of the file, which is cut off"
                           if size >= 0 else f"the size of member {shown(name[:99])} is no number")
        offset = begin + -(-size // BLOCK) * BLOCK

        # what it says of the next one
        if kind in b"Lx":
            if size > MAX_EXTENDED:
                raise _damaged(reader, f"a name or an attribute of {counted(size, 'byte')}; {MAX_EXTENDED} are allowed")
            content = reader.read_at(begin, size)
            records = _records(reader, content) if kind == b"x" else {b"path": content.rstrip(b"\0")}
            long_name, long_size = records.get(b"path", long_name), int(records.get(b"size", long_size))
        if kind in b"LKxg":
            continue
        long_name, long_size = b"", -1

        # the member
        if len(name) > MAX_NAME or name.startswith(b"/") or b".." in name.split(b"/"):
            raise _damaged(reader, f"the name of member {shown(name[:99])} leads out of the tar file, or is longer than"
                           f" {MAX_NAME} bytes; make the file with shorter, relative names")
        if kind in b"12S":
            words, way_out = {b"1": ("a link", "--hard-dereference"), b"2": ("a link", "--dereference"),
                              b"S": ("sparse", "without --sparse")}[kind]
            raise _damaged(reader, f"member {shown(name)} is {words}; make the file with tar {way_out}")
        if kind in b"0\x007":
            yield Member(name.removeprefix(b"./"), begin, size)

    # blocks of zeros end a tar file
    if not header:
        raise _damaged(reader, "its end is missing, so it is cut off")
    while rest := reader.read_at(offset, MAX_EXTENDED):
        if rest.strip(b"\0"):
            raise _damaged(reader, "more follows behind its end, as if files were joined; give each of them")
        offset += len(rest)


def shown(name: bytes) -> str:
    """A name for a message: whatever it holds, a terminal shows it."""
    text = os.fsdecode(name)
    return text if text.isprintable() else ascii(text)


def _is_sound(header: bytes) -> bool:
    """Whether the sum of the header's bytes is what it says; some programs have added them as signed ones."""
    try:
        checksum = int(header[148:156].strip(b" \0") or b"-1", 8)
    except ValueError:
        return False
    unsigned = sum(header) - sum(header[148:156]) + 8 * 32
    return checksum == unsigned or checksum == unsigned - 256 * sum(byte > 127 for byte in header[:148] + header[156:])


def _number(field: bytes) -> int:
    """A size: octal, or in base 256. -1 if it is neither."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:]) if field[0] == 0x80 else -1
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return -1


def _name_in(header: bytes) -> bytes:
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _records(reader: Reader, content: bytes) -> dict[bytes, bytes]:
    """pax records, "LENGTH KEY=VALUE\\n" each. Raises UserError (65)."""
    records, place = {}, 0
    while place < len(content):
        length = content[place:place + 8].partition(b" ")[0]
        record = content[place:place + int(length)] if length.isdigit() else b""
        key, equals, value = record[len(length) + 1:-1].partition(b"=")
        if not (equals and record.endswith(b"\n") and len(record) == int(length)):
            raise _damaged(reader, "attributes (pax records) that cannot be read")
        if key.startswith(b"GNU.sparse"):
            raise _damaged(reader, "a sparse member; make the file with tar without --sparse")
        if key == b"size" and not (value.isdigit() and len(value) < 19):
            raise _damaged(reader, f"a member of the size {shown(value)}")
        records[key] = value
        place += len(record)
    return records


def _damaged(reader: Reader, problem: str) -> UserError:
    return UserError(f"{reader.path} is damaged, or no tar file that can be read: {problem}", Exit.BAD_DATA)


def _error(reader: Reader, offset: int, header: bytes) -> UserError:
    """What to raise where no header stands."""
    unpack = next((command for magic, command in _MAGIC.items() if offset == 0 and header.startswith(magic)), "")
    if unpack:
        return UserError(f"{reader.path} is compressed, and compressed files cannot be read at any place; unpack it:"
                         f" {unpack} {reader.path}", Exit.BAD_DATA)
    return _damaged(reader, f"there is no header at byte {offset}")
