"""RUN/metrics.jsonl as rank 0 appends to it: its size and hash are known at any moment, and it goes back with a run.

    file = RecordFile(path, progress, kept)     # kept: how it began when the checkpoint of `progress` was saved
    file.write(line)
    file.written()                              # {"bytes", "sha256"}, for the next link of the run's chain
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.files import json_lines, lines_of, write_atomically
from utils.rundir.chain import hashed
from utils.rundir.state import Progress

LONGEST = 2**20  # bytes that the records of one step have together, at most


class RecordFile:
    """The file up to the position `done`, to append to: without later records, and without a line that a kill cut off.

    kept: how it begins, {"bytes", "sha256"}, if that is known: then nothing but its end is read as records. It is
    complete at every moment.
    """

    def __init__(self, path: Path, done: Progress, kept: Mapping[str, Any]):
        self.path, self._done = path, done
        self._hash, self._num_bytes = hashed(path, kept["bytes"])
        if is_known := self._num_bytes > 0 and self.written() == kept:
            os.truncate(path, self._num_bytes)
        if not is_known or not all(map(self._is_past, last_records(path))):
            write_atomically(path, b"".join(self._past()))
            self._hash, self._num_bytes = hashed(path)
        self._file = path.open("ab")

    def written(self) -> dict[str, Any]:
        """The records up to now, as a link of the run's chain has them."""
        return {"bytes": self._num_bytes, "sha256": self._hash.hexdigest()}

    def write(self, line: str) -> None:
        """Append a record."""
        content = f"{line}\n".encode()
        self._file.write(content)
        self._file.flush()
        self._hash.update(content)
        self._num_bytes += len(content)

    def sync(self) -> None:
        """Bring it to the disk; from any thread."""
        if not self._file.closed:  # close() may come before the last save has ended
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """No record follows."""
        self._file.close()

    def _past(self) -> Iterator[bytes]:
        for line in lines_of(self.path):
            with suppress(ValueError):
                if self._is_past(json.loads(line)):
                    yield line + b"\n"

    def _is_past(self, record: Mapping[str, Any]) -> bool:
        return record["step"] <= (self._done.evaluated_step if record["split"] == "val" else self._done.step)


def last_records(path: Path) -> Iterator[dict[str, Any]]:
    """The last records of the file, at least those of one step."""
    return json_lines(path, path.stat().st_size - LONGEST if path.exists() else 0)
