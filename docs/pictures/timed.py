"""train.py with a clock at what a save does: the spans of every thread, into a JSON file. For docs/pictures/measure.py.

    python -m docs.pictures.timed SPANS.json [settings of train.py]
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from engine.records import log
from engine.records import steps as records
from utils.numerics import optimizers
from utils.rundir import checkpoint, checkpoint_folder

SPANS: list[dict[str, Any]] = []


def timed(name: str, function: Callable) -> Callable:
    """`function`, which leaves a span. "{}" in the name is the file that it was given."""
    @wraps(function)
    def with_clock(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            files = [word.name for word in args if isinstance(word, Path)]
            span(name.format(*files[:1] or [""]), began)
    return with_clock


def span(name: str, began: float) -> None:
    """Until now."""
    SPANS.append({"name": name, "begin": 1000 * began, "end": 1000 * time.perf_counter()})


def put_clocks(spans: Path) -> None:
    """Around the parts of a step and of a save; close() writes the file, because train.py leaves by os._exit."""
    set_lr, log_step, write = optimizers.set_lr, records.log_step, checkpoint_folder.CheckpointFolder.write
    close = checkpoint.Checkpoints.close
    step_began = [0.0]

    def set_lr_first(*args: Any) -> None:
        step_began[0] = time.perf_counter()
        set_lr(*args)

    def log_step_last(*args: Any) -> None:
        log_step(*args)
        span("step", step_began[0])

    def write_files(folder: checkpoint_folder.CheckpointFolder, name: str, files: dict[str, Callable],
                    best: int | None) -> None:
        write(folder, name, {file: timed(f"write {file}", function) for file, function in files.items()}, best)

    def close_and_tell(checkpoints: checkpoint.Checkpoints) -> None:
        close(checkpoints)
        spans.write_text(json.dumps(SPANS))

    optimizers.set_lr, records.log_step = set_lr_first, log_step_last
    checkpoint.Checkpoints.save = timed("copy", checkpoint.Checkpoints.save)
    checkpoint.Checkpoints._write = timed("write", checkpoint.Checkpoints._write)
    checkpoint.Checkpoints.close = close_and_tell
    log.Log.flush = timed("fsync records", log.Log.flush)
    checkpoint_folder.CheckpointFolder.write = write_files
    checkpoint_folder.CheckpointFolder._remove_old = timed("remove", checkpoint_folder.CheckpointFolder._remove_old)
    checkpoint_folder.sync = timed("fsync {}", checkpoint_folder.sync)
    checkpoint_folder._digest = timed("sha256 {}", checkpoint_folder._digest)
    os.rename = timed("rename {}", os.rename)


if __name__ == "__main__":
    put_clocks(Path(sys.argv[1]))
    sys.argv[:2] = ["train.py"]
    sys.path.insert(0, "")
    runpy.run_path("train.py", run_name="__main__")
