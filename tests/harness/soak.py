"""`make soak KILLS=200 SEED=0`: a small run under random SIGKILLs; its end must be that of an undisturbed run.

Every kill hits a random process (a rank, a data loading process, torchrun itself) at a random moment: of the start-up
or of the training. torchrun restarts what it can, an outer loop the rest. Compared with the undisturbed run, at the end
of each run: final weights by sha256, state.pt tensor by tensor, metrics.jsonl but its timings, RUN/eval byte by byte,
how many different samples each epoch had, which must be all. No process and no shared memory may be left.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.conftest import TORCHRUN, Launch, write_photos, write_texts
from tests.harness.forked import torchrun_main
from tests.harness.launches import OWN_STACK, SHARED_MEMORY, trained
from tests.harness.run_directory import outcome, trained_steps
from utils.errors import Exit

COMMON = ["--global-batch-size", 24, "--micro-batch-size", 4, "--threads", 1, "--precision", "bf16",
          "--log-every", 1, "--save-every", 4]
IMAGES = ["--model", "mobilenet_v3_small", "--image-size", 32, "--epochs", 8]
TEXTS = ["--task", "masked-lm", "--model", "bert-tiny", "--vocab-size", 200, "--max-length", 32, "--epochs", 8]
SAMPLES = 57
GONE_S = 10  # within which no process of a launch that has ended may be left
IDLE_STARTS = 25  # in a row, none of which makes a step: more than kills account for
LIMIT_S = 120  # for a launch to make a step
EXPECTED = (0, Exit.HARDWARE, Exit.STOPPED, Exit.LOST_PEERS)  # done; a worker, torchrun, a rank was killed


@dataclass
class Kind:
    """One sort of run, and what was seen of it."""

    name: str
    words: list[Any]
    processes: tuple[int, ...]  # of a start, drawn anew each time
    kills: dict[str, int] = field(default_factory=lambda: {"rank": 0, "worker": 0, "torchrun": 0})
    failures: list[str] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)  # from a kill to the next new step
    repeated: list[int] = field(default_factory=list)  # steps computed again after a kill
    runs: int = 0
    starts: int = 0
    wall_s: float = 0.0
    undisturbed_s: float = 0.0  # training of one undisturbed run, start-up left out


KINDS = (
    Kind("ddp, images, 2 processes", [*IMAGES, "--strategy", "ddp"], (2,)),
    Kind("ddp, images, 3 processes", [*IMAGES, "--strategy", "ddp"], (3,)),
    Kind("exact, images, 1-4 processes", [*IMAGES, "--strategy", "exact"], (1, 2, 3, 4)),
    Kind("exact, texts, 1-4 processes", [*TEXTS, "--strategy", "exact"], (1, 2, 3, 4)),
)


class Soak:
    """One kind of run in a folder, killed until there were `kills` kills and the last run is done."""

    def __init__(self, kind: Kind, folder: Path, data: Path, draw: random.Random):
        self.kind, self.folder, self.draw = kind, folder, draw
        self.words = [*kind.words, *COMMON, "--data", data]
        self.environment = os.environ | {"LOCKSTEP_CACHE": str(folder.parent / "cache"), "OMP_NUM_THREADS": "1"}
        folder.mkdir()

    def start(self, run: Path, processes: int, workers: int) -> Launch:
        """A launch of `run`, under torchrun always."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        words = [*TORCHRUN, f"--nproc-per-node={processes}", "--max-restarts=3",
                 "train.py", *self.words, "--run-dir", run, "--workers", workers]
        self.kind.starts += 1
        return Launch(torchrun_main, [str(word) for word in words], self.environment, folder)

    def undisturbed(self) -> dict[str, Any]:
        """What the runs must come to."""
        run = self.folder / "undisturbed"
        result = self.start(run, self.kind.processes[0], workers=0).wait()
        if result.returncode:
            sys.exit(f"{result.text}\nsoak: the undisturbed run failed")
        times = [datetime.fromisoformat(json.loads(line)["time"])
                 for line in (run / "metrics.jsonl").read_text().splitlines()]
        self.kind.undisturbed_s = (times[-1] - times[0]).total_seconds()
        return found(run)

    def soak(self, kills: int) -> None:
        """Runs, one after the other."""
        expected, began = self.undisturbed(), time.monotonic()
        while sum(self.kind.kills.values()) < kills:
            run = self.folder / f"run-{self.kind.runs}"
            try:
                self.one_run(run, kills)
                difference = [what for what, value in found(run).items() if value != expected[what]]
                if difference:
                    raise AssertionError(f"differs from the undisturbed run in {', '.join(difference)}")
                shutil.rmtree(run)
            except AssertionError as error:
                self.kind.failures.append(f"{run}: {error}")
                print(f"FAILED {self.kind.failures[-1]}", flush=True)
            self.kind.runs += 1
            self.kind.wall_s = time.monotonic() - began
            print(line(self.kind), flush=True)

    def one_run(self, run: Path, kills: int) -> None:
        """Start, kill, start again, until the run is finished."""
        # pending: (time of the last kill, step reached) until a new step is seen.
        launch, pending, said = None, None, ""
        starts_at: list[int] = []  # the step that the run was at, of every start
        while True:
            if launch is None:
                starts_at.append(trained_steps(run))
                if starts_at[-IDLE_STARTS:] == [starts_at[-1]] * IDLE_STARTS:
                    raise AssertionError(f"{IDLE_STARTS} starts without a step")
                launch = self.start(run, self.draw.choice(self.kind.processes), self.draw.choice((0, 2)))
            # A third of the kills come while the processes start, the others while they train.
            at, wants_step = time.monotonic() + self.draw.uniform(0, 8), self.draw.random() < 2 / 3
            before, deadline = trained_steps(run), time.monotonic() + LIMIT_S
            while launch.process.poll() is None:
                step = trained_steps(run)
                if pending and step != pending[1] and is_newer(run, pending[0]):
                    self.kind.recoveries_s.append(time.time() - pending[0])
                    pending = None
                if wants_step and (step != before or (pending is None and step)):
                    wants_step, at = False, time.monotonic() + self.draw.uniform(0, 3)
                if not wants_step and time.monotonic() > at and sum(self.kind.kills.values()) < kills:
                    victim, number = self.victim(launch)
                    reached = trained_steps(run)
                    os.kill(number, signal.SIGKILL)
                    self.kind.kills[victim] += 1
                    pending = (time.time(), reached)
                    break
                if time.monotonic() > deadline and step == before:
                    launch.kill_all()
                    raise AssertionError(f"no step within {LIMIT_S} s: {launch._result().text}")
                time.sleep(0.01)
            if launch.process.poll() is None and victim != "torchrun":
                continue  # torchrun restarts
            said += self.ended(launch).out
            launch = None
            state = (json.loads((run / "status.json").read_text())["state"] if (run / "status.json").exists()
                     else "absent")
            if state == "finished":
                self.kind.repeated += repeated_steps(said)
                return

    def victim(self, launch: Launch) -> tuple[str, int]:
        """A random kind of process of the launch, and the id of one of these."""
        parents = launch.parents()
        ranks = [pid for pid, parent in parents.items() if parent == launch.process.pid]
        workers = [pid for pid, parent in parents.items() if parent in ranks]
        found = {"rank": ranks, "worker": workers, "torchrun": [launch.process.pid]}
        name = self.draw.choice([name for name, pids in found.items() if pids] + ["worker"] * bool(workers))
        return name, self.draw.choice(sorted(found[name]))

    def ended(self, launch: Launch) -> Any:
        """The result of a launch whose torchrun has ended or was killed: nothing is left, no start failed by itself."""
        launch.process.wait()
        deadline = time.monotonic() + GONE_S
        while left := launch.parents():
            if time.monotonic() > deadline:
                launch.kill_all()
                raise AssertionError(f"{len(left)} processes left: {left} {launch._result().text}")
            time.sleep(0.02)
        result = launch._result()
        if result.code not in EXPECTED or OWN_STACK in result.err:
            raise AssertionError(f"a start failed: {result.text}")
        shutil.rmtree(launch.folder)
        return result


def found(run: Path) -> dict[str, Any]:
    """Weights, records and state of a finished run. AssertionError where an epoch has not all samples."""
    if set(trained(run)) != {SAMPLES}:
        raise AssertionError(f"different samples that the epochs trained on: {trained(run)}")
    return outcome(run)


def is_newer(run: Path, moment: float) -> bool:
    """Whether the last record was written after `moment`."""
    last = (run / "metrics.jsonl").read_text().splitlines()[-1:]
    try:
        return bool(last) and datetime.fromisoformat(json.loads(last[0])["time"]).timestamp() > moment
    except ValueError:  # it is just being written
        return False


def repeated_steps(out: str) -> list[int]:
    """Of each resume in a run's output: steps that had been on the console before and came again."""
    steps, repeated, reached = re.findall(r"resumed at step (\d+)| step (\d+)/", out), [], 0
    for resumed, step in steps:
        if resumed and reached:
            repeated.append(reached - int(resumed))
        reached = int(resumed or step)
    return repeated


def line(kind: Kind) -> str:
    """What was seen, for people."""
    kills = ", ".join(f"{count} {name}" for name, count in kind.kills.items())
    quantiles = statistics.quantiles(kind.recoveries_s, n=20) if len(kind.recoveries_s) > 1 else [0.0] * 19
    goodput = kind.undisturbed_s * kind.runs / kind.wall_s if kind.wall_s else 0.0
    return (f"{kind.name}: {sum(kind.kills.values())} kills ({kills}), {kind.runs} runs, {len(kind.failures)} failures;"
            f" one kill per {kind.wall_s / max(1, sum(kind.kills.values())):.1f} s, goodput {100 * goodput:.0f} %;"
            f" recovery p50 {quantiles[9]:.1f} s,"
            f" p95 {quantiles[18]:.1f} s ({len(kind.recoveries_s)}); repeated steps per resume"
            f" {statistics.mean(kind.repeated or [0]):.1f} (at most {max(kind.repeated or [0])})")


def shared_memory() -> set[str]:
    """Names in /dev/shm that torch or multiprocessing made; not empty ones, of processes killed as they made them."""
    made = (path for path in SHARED_MEMORY.iterdir() if path.name.startswith(("torch_", "psm_", "sem.", "pymp")))
    return {path.name for path in made if path.stat().st_size}


def main() -> None:
    """Every kind in turn; exits with 1 if anything failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose name has this in it")
    words = parser.parse_args()
    before, began = shared_memory(), time.monotonic()
    kinds = [kind for kind in KINDS if words.only in kind.name]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lockstep-soak-") as folder:
        data = {"images": write_photos(Path(folder) / "photos"), "texts": write_texts(Path(folder) / "texts")}
        for number, kind in enumerate(kinds):
            draw = random.Random(f"{words.seed} {kind.name}")
            Soak(kind, Path(folder) / f"kind-{number}", data["texts" if "texts" in kind.name else "images"],
                 draw).soak(words.kills)
    left = shared_memory() - before
    print(f"\n{time.monotonic() - began:.0f} s, seed {words.seed}; left in /dev/shm: {len(left)}",
          *map(line, kinds), sep="\n")
    sys.exit(bool(left or any(kind.failures for kind in kinds)))


if __name__ == "__main__":
    main()
