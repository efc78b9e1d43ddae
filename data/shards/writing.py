"""A tar file of samples: the same bytes for the same samples, there as a whole or not at all.

Tests: tests/end_to_end/test_shards.py
"""

import io
import os
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from uuid import uuid4

from utils.errors import Exit, UserError, some
from utils.files import write_atomically

CLASSES = "classes.txt"  # the names of the classes, of which a label is the number of the line, counted from 0


def read_classes(file: str | Path) -> list[str]:
    """The lines of classes.txt. Raises OSError, UnicodeDecodeError."""
    return Path(file).read_text(encoding="utf-8-sig").rstrip("\n").split("\n")


def write_classes(folder: Path, names: Sequence[str]) -> None:
    """Write classes.txt. Raises UserError (65) for names that do not come back from it, (73) over others; OSError."""
    file = folder / CLASSES
    if file.exists() and read_classes(file) != [*names]:
        raise UserError(f"{folder} was packed from other data; use an empty --output", Exit.CANNOT_CREATE)
    write_atomically(file, "".join(f"{name}\n" for name in names))
    if read_classes(file) != [*names]:
        file.unlink()
        raise UserError(f"a class has an empty name, or one with a line break; rename it ({some(map(ascii, names))})",
                        Exit.BAD_DATA)


def write_shard(file: Path, samples: Iterable[tuple[str, bytes, object]]) -> None:
    """samples: (name of the image in the tar file, its bytes, its label). Raises OSError."""
    partial = file.with_name(f".{file.name}.{uuid4().hex}")  # several processes may write one
    try:
        with partial.open("wb") as opened:
            with tarfile.open(fileobj=opened, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for name, content, label in samples:
                    for member, data in ((name, content), (f"{name.rpartition('.')[0]}.cls", str(label).encode())):
                        info = tarfile.TarInfo(member)  # of nobody, in 1970
                        info.size = len(data)
                        archive.addfile(info, io.BytesIO(data))
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
