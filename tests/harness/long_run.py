"""What a run of three million steps costs more than a short one: a start, a save, ask.replay --list, --chain-only.

    python -m tests.harness.long_run                # --steps 3000000

A short run is trained and stopped; a copy of it gets the records and links that a run of so many steps would have.
Seconds and MB (of the largest process) are printed of both, and exit code 1 where the difference is beyond LIMITS.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT
from tests.harness.forging import content_of, seal
from utils.rundir.chain import FILE, digest_of, read_lines
from utils.rundir.checkpoint_folder import name_of

LIMITS = 5.0, 100.0  # seconds and MB more than a short run
LOG_EVERY, SAVE_EVERY, EVAL_EVERY = 10, 1000, 10_000  # steps; the first two are the defaults
WORDS = ["--model", "small-cnn", "--global-batch-size", "64", "--max-steps", "9999999", "--epochs", "999999",
         "--workers", "0", "--precision", "fp32", "--save-every", str(SAVE_EVERY), "--report", "off"]


def measured(*command: str, code: int = 0) -> tuple[float, float, str]:
    """Seconds, MB, and what it printed."""
    done = subprocess.run(["/usr/bin/time", "-f", "COST %e %M", sys.executable, *command], cwd=ROOT, text=True,
                          capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == code, f"{command}: {done.stdout}{done.stderr}"
    seconds, kilobytes = re.search(r"COST ([\d.]+) (\d+)", done.stderr).groups()
    return float(seconds), int(kilobytes) / 1024, done.stdout + done.stderr


def lengthened(run: Path, steps: int) -> None:
    """Give a stopped run the past of `steps` more steps: its records and links, and its position."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_split = {record["split"]: record for record in lines}
    by_split.setdefault("val", {"split": "val", "step": 0, "epoch": 0.0, "samples": 0, "loss": 1.0, "top1": 0.5})
    digest, size, links, previous = hashlib.sha256(), 0, read_lines(run)[:1], read_lines(run)[0]["link"]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(LOG_EVERY, steps + 1, LOG_EVERY):
            for split in ["train"] + ["val"] * (step % EVAL_EVERY == 0):
                line = json.dumps(by_split[split] | {"step": step}) + "\n"
                digest.update(line.encode())
                size += len(line)
                file.write(line)
            if step % SAVE_EVERY == 0:
                link = links[0] | {"step": step, "previous": previous, "content": digest.hexdigest(),
                                   "metrics": {"bytes": size, "sha256": digest.hexdigest()}}
                links.append(link | {"link": (previous := digest_of(link))})
    shutil.rmtree(run / "model", ignore_errors=True)  # no link says that there is one
    [old] = sorted((run / "checkpoints").glob("step-*"))[-1:]
    trainer = json.loads((old / "trainer.json").read_text())
    trainer["progress"] |= {"step": steps, "evaluated_step": steps}
    (old / "trainer.json").write_text(json.dumps(trainer))
    new = old.rename(old.with_name(name_of(steps, 1, False)))
    links[-1] |= {"content": content_of(new), "samples": json.loads((new / "MANIFEST.json").read_text())["link"].get(
        "samples", {})}
    links[-1]["link"] = digest_of(links[-1])
    seal(new, links[-1])
    (run / FILE).write_text("".join(f"{json.dumps(link)}\n" for link in links))
    for other in (run / "checkpoints").glob("step-*"):
        if other != new:
            shutil.rmtree(other)


def costs(run: Path) -> dict[str, tuple[float, float]]:
    """Seconds and MB of each command."""
    step = read_lines(run)[-1]["step"]
    found = {"--chain-only": measured("-m", "ask.verify", str(run), "--chain-only")[:2],
             "replay --list": measured("-m", "ask.replay", str(run), "--step", str(step), "--list")[:2]}
    *start, words = measured("train.py", *WORDS, "--run-dir", str(run), "--stop-after", "2", code=75)
    waited = float(re.search(r"training waited ([\d.]+) s", words)[1])
    return found | {"a start, two steps and a save": tuple(start), "of that, waiting for the save": (waited, 0.0)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        short, long = Path(folder) / "short", Path(folder) / "long"
        measured("train.py", *WORDS, "--run-dir", str(short), "--stop-after", "30", code=75)
        shutil.copytree(short, long)
        lengthened(long, given.steps)
        rows, is_worse = [costs(short), costs(long)], False
        print(f"{'':<32}{'short':>18}{f'{given.steps} steps':>22}{'more':>18}")
        for name in rows[0]:
            few, many = (row[name] for row in rows)
            more = [there - here for here, there in zip(few, many, strict=True)]
            is_worse |= any(value > limit for value, limit in zip(more, LIMITS, strict=True))
            shown = [f"{seconds:.1f} s {megabytes:.0f} MB" for seconds, megabytes in (few, many, more)]
            print(f"{name:<32}{shown[0]:>18}{shown[1]:>22}{shown[2]:>18}")
    sys.exit(is_worse)
