"""A tar file of samples: the same bytes for the same samples, there as a whole or not at all.

Tests: tests/end_to_end/test_shards.py
"""

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4


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
