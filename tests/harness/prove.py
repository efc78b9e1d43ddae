"""`make prove`: one run on 1, 2, 3 and 4 processes, one that grows and shrinks, one killed and stopped: one hash.

Trains the built-in digits under --strategy exact and compares the sha256 of the final weights and of all records but
timings. Batches and threads are left to `auto`, which looks at no number of processes there.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.harness.run_directory import records, weights_sha256

ROOT = Path(__file__).parents[2]
SETTINGS = ["--strategy", "exact", "--global-batch-size", "64", "--max-steps", "30", "--log-every", "1",
            "--save-every", "4"]


def start(processes: int, run: Path, *words: str) -> subprocess.Popen:
    """One launch of the demo under torchrun, its output kept in RUN.log."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
               f"--nproc-per-node={processes}", "train.py", *SETTINGS, "--run-dir", str(run), *words]
    with run.with_suffix(".log").open("a") as log:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)


def finish(processes: int, run: Path, *words: str) -> None:
    """A launch that runs to its end (or to --stop-after). Exits with its output where that fails."""
    start(processes, run, *words).wait()
    state = json.loads((run / "status.json").read_text())["state"] if (run / "status.json").exists() else "absent"
    if state != ("stopped" if words else "finished"):
        sys.exit(f"{run.with_suffix('.log').read_text()}\nprove: on {processes} processes the run is {state}")


def kill_amid(processes: int, run: Path, step: int) -> None:
    """A launch whose every process gets SIGKILL once it has trained for `step` steps."""
    launch, records = start(processes, run), run / "metrics.jsonl"
    while not records.exists() or f'"step": {step},' not in records.read_text():
        if launch.poll() is not None:
            sys.exit(f"{run.with_suffix('.log').read_text()}\nprove: ended before it could be killed")
        time.sleep(0.02)
    workers = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launch.pid)], capture_output=True, text=True).stdout.split()
    for process in [launch.pid, *map(int, workers)]:
        os.kill(process, signal.SIGKILL)
    launch.wait()


def digest(run: Path) -> tuple[str, str]:
    """(sha256 of the newest checkpoint's weights, sha256 of the records without timings), the first 16 digits."""
    return weights_sha256(run)[:16], hashlib.sha256(json.dumps(records(run)).encode()).hexdigest()[:16]


def main() -> None:
    """Print the table; exit with 1 if it does not hold one hash."""
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        print("processes                                              weights           records")

        def show(name: str, run: Path) -> None:
            rows.append((name, *digest(run)))
            print("{:<54} {}  {}".format(*rows[-1]), flush=True)

        for processes in (1, 2, 3, 4):
            run = Path(folder) / f"on-{processes}"
            finish(processes, run)
            show(str(processes), run)
        if (found := json.loads((run / "auto.json").read_text())["micro_batches"]) < processes:
            sys.exit(f"prove: {found} micro-batches are no work for {processes} processes")
        run = Path(folder) / "grown"
        finish(1, run, "--stop-after", "8")
        finish(4, run, "--stop-after", "8")
        finish(2, run)
        show("1, stopped 8 steps on; 4, stopped 8 steps on; then 2", run)
        run = Path(folder) / "killed"
        kill_amid(4, run, step=6)
        finish(3, run, "--stop-after", "9")
        finish(2, run)
        show("4, killed after step 6; 3, stopped 9 steps on; then 2", run)
    hashes = {row[1:] for row in rows}
    print(f"{len(hashes)} hash{'' if len(hashes) == 1 else 'es'} in {time.monotonic() - began:.0f} s")
    sys.exit(len(hashes) != 1)


if __name__ == "__main__":
    main()
