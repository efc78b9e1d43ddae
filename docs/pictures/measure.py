"""Real runs of the built-in digits, for the pictures: kills, recoveries, a save, rounding. 12 minutes on two cores.

    python -m docs.pictures.measure                      # all four; then python -m docs.pictures draws them
    python -m docs.pictures.measure loss|save|recovery|parting

Writes docs/pictures/measured/*.json, which are committed. Every kill is a SIGKILL.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.harness.run_directory import records, trained_steps, weights_sha256

ROOT, MEASURED = Path(__file__).parents[2], Path(__file__).with_name("measured")
COMMON = ["--precision", "fp32", "--threads", "1", "--workers", "0", "--log-every", "1", "--eval-every", "5000"]
SMALL = [*COMMON, "--model", "mobilenet_v3_small", "--optimizer", "adamw", "--lr", "0.002", "--image-size", "32",
         "--global-batch-size", "96", "--micro-batch-size", "16"]
CURVE = [*SMALL, "--strategy", "exact", "--max-steps", "60", "--save-every", "6"]
KILLS = ((2, 9), (4, 20), (1, 29), (3, 39), (4, 51))  # (processes of a start, step after which they are killed)
LAST_START = 2  # processes of the start that is left alone
RECOVERY = [*SMALL, "--epochs", "400", "--save-every", "3"]  # longer than its kills take
NUM_RECOVERIES, PAUSE_S = 10, (1, 8)  # a kill comes so long after the first step of a start
PARTING = [*SMALL, "--max-steps", "160"]
SAVE = [*COMMON, "--model", "resnet18", "--image-size", "16", "--global-batch-size", "16", "--micro-batch-size", "16",
        "--max-steps", "220", "--save-every", "20"]
LIMIT_S = 600
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


class Start:
    """One start of a run under torchrun, its output kept in a file beside the run directory."""

    def __init__(self, run: Path, processes: int, words: list[str], restarts: int = 0):
        self.run, self._out = run, Path(tempfile.mkstemp(".out", dir=run.parent)[1])
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
                   f"--nproc-per-node={processes}", f"--max-restarts={restarts}",
                   "train.py", *words, "--run-dir", str(run)]
        with self._out.open("w") as out:
            self.torchrun = subprocess.Popen(command, cwd=ROOT, env=ONE_THREAD, stdout=out, stderr=out)

    def ranks(self) -> list[int]:
        """Process ids of the ranks that live."""
        found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.torchrun.pid)], capture_output=True, text=True)
        return sorted(map(int, found.stdout.split()))

    def began_at(self) -> list[int]:
        """The step that it began at, and the steps that its restarts began at; 0 where there was no checkpoint yet."""
        found = re.findall(r"; (?:resumed at step (\d+)|a new run)\n", self._out.read_text())
        return [int(step or 0) for step in found]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Exits with the output where it ends, or nothing happens, before that."""
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            if self.torchrun.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{self._out.read_text()}\nmeasure: it ended, or hung, before it could be measured")
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL for torchrun and every rank."""
        for process in [self.torchrun.pid, *self.ranks()]:
            os.kill(process, signal.SIGKILL)
        self.torchrun.wait()


def losses(run: Path, after: int = 0) -> list[float]:
    """The training loss of each step on record after that one."""
    return [record["loss"] for record in records(run) if record["split"] == "train" and record["step"] > after]


def measure_loss(folder: Path) -> dict[str, Any]:
    """A run left alone on one process, and one killed five times on changing numbers of processes."""
    run = folder / "undisturbed"
    if Start(run, 1, CURVE).torchrun.wait():
        sys.exit("measure: the undisturbed run failed")
    undisturbed = {"losses": losses(run), "weights": weights_sha256(run)}
    run, starts = folder / "killed", []

    def note(start: Start, processes: int) -> None:
        resumed = start.began_at()[0]
        starts.append({"processes": processes, "resumed": resumed, "losses": losses(run, resumed)})

    for processes, step in KILLS:
        start = Start(run, processes, CURVE)
        start.wait_until(lambda step=step: trained_steps(run) >= step)
        start.kill()
        note(start, processes)
    start = Start(run, LAST_START, CURVE)
    start.torchrun.wait()
    note(start, LAST_START)
    return {"undisturbed": undisturbed, "killed": {"starts": starts, "weights": weights_sha256(run)}}


def measure_recovery(folder: Path) -> dict[str, Any]:
    """Kills of a random rank of two at random moments; torchrun restarts both."""
    draw, run, kills = random.Random(0), folder / "recovery", []
    start = Start(run, 2, RECOVERY, restarts=NUM_RECOVERIES)
    start.wait_until(lambda: trained_steps(run) > 3)  # from here on there is a checkpoint
    for _ in range(NUM_RECOVERIES):
        time.sleep(draw.uniform(*PAUSE_S))
        kills.append(recovery(start, draw.randrange(2)))
        print(kills[-1], flush=True)
    start.torchrun.send_signal(signal.SIGTERM)
    start.torchrun.wait()
    return {"processes": 2, "kills": kills}


def recovery(start: Start, rank: int) -> dict[str, float]:
    """Kill a rank, and wait for the next step that is finished after the restart."""
    victim = next(process for process in start.ranks() if is_rank(process, rank))
    num_starts, reached = len(start.began_at()), trained_steps(start.run)
    killed_at = time.time()
    os.kill(victim, signal.SIGKILL)

    def is_back() -> bool:
        nonlocal reached
        steps = trained_steps(start.run)
        if len(start.began_at()) > num_starts:
            return True
        reached = max(reached, steps)  # the other rank may have finished its step
        return False

    start.wait_until(is_back)
    resumed = start.began_at()[-1]
    start.wait_until(lambda: trained_steps(start.run) > resumed)
    lines = map(json.loads, (start.run / "metrics.jsonl").read_text().splitlines())
    finished = next(datetime.fromisoformat(line["time"]) for line in lines if line["step"] == resumed + 1)
    return {"rank": rank, "seconds": round(finished.timestamp() - killed_at, 2), "reached": reached, "resumed": resumed}


def is_rank(process: int, rank: int) -> bool:
    """Whether a process was started as this rank."""
    return f"RANK={rank}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")


def measure_save(folder: Path) -> dict[str, Any]:
    """The save of median length, of those of a run on one process; in ms from the beginning of its copy."""
    run, spans = folder / "save", folder / "spans.json"
    subprocess.run([sys.executable, "-m", "docs.pictures.timed", str(spans), *SAVE, "--run-dir", str(run)], cwd=ROOT,
                   env=ONE_THREAD, check=True, stdout=subprocess.DEVNULL)
    steps, others = [], []
    for span in json.loads(spans.read_text()):
        (steps if span["name"] == "step" else others).append(span)
    copies, writes = ([span for span in others if span["name"] == name] for name in ("copy", "write"))
    saves = list(zip(copies, writes, strict=True))[1:-1]  # the first reads nothing back, beside the last is no step
    median = sorted(saves, key=lambda save: save[1]["end"] - save[0]["begin"])[len(saves) // 2]
    zero, end = median[0]["begin"], median[1]["end"]
    usual_ms = sorted(span["end"] - span["begin"] for span in steps)[len(steps) // 2]

    def near(found: list[dict[str, Any]], margin_ms: float) -> list[dict[str, Any]]:
        return [{"name": span["name"], "begin": round(span["begin"] - zero, 2), "end": round(span["end"] - zero, 2)}
                for span in found if span["end"] > zero - margin_ms and span["begin"] < end + margin_ms]

    lengths = [{"copy": round(copy["end"] - copy["begin"], 1), "save": round(write["end"] - copy["begin"], 1)}
               for copy, write in saves]
    newest = max((run / "checkpoints").glob("step-*"))
    mib = round(sum(file.stat().st_size for file in newest.iterdir()) / 2**20)
    return {"model": "ResNet-18", "mib": mib, "usual_step_ms": round(usual_ms, 1), "saves": lengths,
            "steps": near(steps, 1.2 * usual_ms), "spans": near(others, 0)}


def measure_parting(folder: Path) -> dict[str, Any]:
    """The same run on one process and on three, under ddp: sums are rounded in another order."""
    found = {}
    for processes in (1, 3):
        run = folder / str(processes)
        if Start(run, processes, PARTING).torchrun.wait():
            sys.exit(f"measure: the run on {processes} processes failed")
        found[str(processes)] = losses(run)
    return found


def facts() -> dict[str, Any]:
    """What a figure depends on besides the program."""
    import torch
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {"cpu": cpu[1] if cpu else "unknown", "cores": os.cpu_count(), "load": round(os.getloadavg()[1]),
            "torch": torch.__version__.partition("+")[0]}


MEASURES = {"loss": measure_loss, "save": measure_save, "recovery": measure_recovery,
            "parting": measure_parting}


def main() -> None:
    """Measure what is named, or everything."""
    MEASURED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MEASURES:
        with tempfile.TemporaryDirectory(prefix="lockstep-pictures-") as folder:
            found = MEASURES[name](Path(folder))
        text = re.sub(r"\n(\s{3,}|  (?=[\]}]))", " ", json.dumps(facts() | found, indent=1))  # one line an entry
        (MEASURED / f"{name}.json").write_text(text + "\n")
        print(f"measured {name}", flush=True)


if __name__ == "__main__":
    main()
