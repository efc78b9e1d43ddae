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
    return [line.strip() for line in Path(file).read_text(encoding="utf-8-sig").rstrip("\n").split("\n")]


def write_classes(folder: Path, names: Sequence[str]) -> None:
    """Write classes.txt, if it is not there. Raises UserError (65) for names that would not come back, OSError."""
    if wrong := [ascii(name) for name in names if name != name.strip() or not name or {*"\r\n"} & {*name}
                 or name != name.encode(errors="replace").decode()]:
        raise UserError(f"the names of classes stand in {CLASSES}, each on a line, in UTF-8; rename {some(wrong)}",
                        Exit.BAD_DATA)
    if not (folder / CLASSES).exists():
        write_atomically(folder / CLASSES, "".join(f"{name}\n" for name in names))


def write_shard(file: Path, samples: Iterable[tuple[str, bytes, object]]) -> None:
    """Nothing if it is there. samples: (name of the image in the tar file, its bytes, its label). Raises OSError."""
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
        if not file.exists():  # who reads it already knows its time
            os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
