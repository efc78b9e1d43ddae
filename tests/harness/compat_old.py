"""The part of compat.py that runs in a checkout of the older program, and makes runs with it.

    python -m tests.harness.compat_old FOLDER    # cases.json there says which; FOLDER/NUMBER is what becomes of each

FOLDER/NUMBER gets the runs, undisturbed/NAME and disturbed/NAME; said and rows.csv of an evaluation; predicted.csv; or
failed, with the reason. It needs of its tree: Launch and TORCHRUN of tests/conftest.py, and tests/harness/forked.py.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, TORCHRUN, Launch
from tests.harness.forked import forking_torchrun_main, script_main

DONE, STOPPED = 0, 75  # exit codes
STATES = {"finished": "finished", "stopped": "stopped", "killed": "running"}  # in status.json
LAUNCHES: list[Launch] = []


def launch(folder: Path, processes: int, words: list[Any], cache: str = "cache") -> Launch:
    """A script of this tree, with its words. cache: a name in the parent of `folder`."""
    several = [*TORCHRUN, f"--nproc-per-node={processes}"] if processes > 1 else []
    environment = os.environ | {"LOCKSTEP_CACHE": str(folder.parent / cache), "OMP_NUM_THREADS": "1"}
    program, words = forking_torchrun_main if several else script_main, [str(word) for word in (*several, *words)]
    LAUNCHES.append(started := Launch(program, words, environment, Path(tempfile.mkdtemp(dir=folder))))
    return started


def done(started: Launch, code: int = DONE) -> str:
    """What a launch said, once it has ended. Raises RuntimeError unless it did so with this exit code."""
    result = started.wait()
    if (found := result.code or result.returncode) != code:
        raise RuntimeError(f"exit code {found}\n{result.out}\n{result.err}")
    return result.out


def side_by_side(work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """The results for these items, of which two are worked on at a time. Nothing is left of an interrupted one."""
    with ThreadPoolExecutor(2) as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            for started in LAUNCHES:
                started.kill_all()
            os._exit(1)


def run_in(place: Path) -> Path | None:
    """The only run in a folder, if one is there."""
    runs = [path for path in place.glob("*") if not path.name.startswith(".")]
    assert len(runs) <= 1, f"there should be one run: {', '.join(path.name for path in runs)}"
    return runs[0] if runs else None


def train(folder: Path, case: dict[str, Any], name: str, end: str) -> Path:
    """Train to the given end. Returns the run directory: FOLDER/NAME/run, or what the program calls it itself."""
    place = folder / name if case["has_run_dir"] else ROOT / "runs"
    words = ["train.py", *case["words"], *(["--run-dir", place / "run"] if case["has_run_dir"] else [])]
    if end == "killed":
        started = launch(folder, case["processes"], words)
        file, line = place / "run" / "metrics.jsonl", f'"step": {case["step"]},'
        started.wait_for(lambda: file.exists() and line in file.read_text(), "no step to kill it at")
        started.kill_all()
    elif end == "stopped":
        done(launch(folder, case["processes"], [*words, "--stop-after", case["step"]]), STOPPED)
    else:
        done(launch(folder, case["processes"], words))
    run = run_in(place)
    state = json.loads((run / "status.json").read_text())["state"]
    assert state == STATES[end], f"a run that should be {end} is {state}"
    if not case["has_run_dir"]:
        (folder / name).mkdir()
        run = run.rename(folder / name / run.name)
    return run


def make(folder: Path, case: dict[str, Any]) -> None:
    """Both runs, and what this program says of the finished one. If that fails, FOLDER/failed says why."""
    try:
        folder.mkdir()
        run = train(folder, case, "undisturbed", "finished")
        words = ["train.py", *case["words"], "--run-dir", run, "--eval-only"]
        words += ["--output", folder / "rows.csv"] if case["has_rows"] else []
        (folder / "said").write_text(done(launch(folder, case["processes"], words)))
        if case["inputs"]:
            words = ["models/predict.py", run, case["inputs"], "--output", folder / "predicted.csv"]
            done(launch(folder, 1, words))
        train(folder, case, "disturbed", case["end"])
    except BaseException as error:  # pytest's failures are no Exception
        (folder / "failed").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    cases = json.loads((root / "cases.json").read_text())
    side_by_side(lambda number: make(root / str(number), cases[number]), [*range(len(cases))])
