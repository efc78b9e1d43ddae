"""What this start of a launch is: the first or a restart, of a run that is finished, begins anew or goes on.

No torch: a finished run says so in a moment.
"""

import os
import re
import socket
import sys
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from utils.errors import Exit, UserError, record_exit, say
from utils.files import read_json
from utils.rundir.identity import compare, identity, run_path
from utils.settings.config import Config

FINAL = (Exit.USAGE, Exit.BAD_DATA, Exit.NO_INPUT, Exit.CANNOT_CREATE, Exit.OTHER_RUN, Exit.DIVERGED, Exit.NO_CHECKPOINT)


def finish_early(config: Config) -> None:
    """If this very run is finished already, say so and leave with 0, before torch is imported.

    If torchrun restarts what no restart mends, leave with the same code as the start before: torchrun cannot be told not to. (After
    a SIGTERM it restarts only if it sent that itself: another node came or went.)
    """
    path = run_path(config)
    try:
        last = read_json(path / "status.json")
        is_final = last.get("exit_code") in FINAL or (
            last.get("exit_code") == Exit.STOPPED and not re.search("SIGTERM(?! to rank)", last["message"]))
        if _is_restart() and _has_seen(last, [launch_id()]) and is_final:
            record_exit(last["exit_code"])
            if os.environ.get("RANK", "0") == "0":
                say(f"train.py: no restart: {last['state']}, {last['message']}")
            raise SystemExit(last["exit_code"])
        if acts_fresh(config) or config.run.eval_only or last.get("state") != "finished":
            return
        compare(config, path)
        if yaml.safe_load((path / "config.yaml").read_text())["data"] != identity(config)["data"]:
            return  # which may be the same data in another place: that takes a look at them
        summary = read_json(path / "summary.json")
    except (UserError, OSError, yaml.YAMLError):
        return  # open_run says so to all ranks
    figures = ", ".join(f"{name} {value:.4f}" for name, value in summary.items() if isinstance(value, float))
    if os.environ.get("RANK", "0") == "0":
        say(f"{path} is finished: step {summary.get('step')}, {figures}\n"
            f"--fresh starts over; to train on, start a new run from it: --model {path / 'model'} --pretrained", sys.stdout)
    raise SystemExit(0)


def early_device(config: Config) -> str:
    """--device, or what this run kept for `auto`: asked before there is a process group."""
    kept = {} if acts_fresh(config) else read_json(run_path(config) / "auto.json")
    return config.device.device if config.device.device != "auto" else kept.get("device", "auto")


def acts_fresh(config: Config, launches: Collection[str | None] | None = None) -> bool:
    """Whether --fresh clears the run directory at this start: the first that somebody asked for.

    Not where torchrun, launch.sh --retries or Slurm starts it again.
    launches: launch_id() of all nodes; None = this node alone is known yet.
    """
    path = run_path(config)
    if not config.run.fresh or not (path / "config.yaml").exists():
        return False
    try:
        return not _has_seen(read_json(path / "status.json"), [*(launches or [launch_id()]), *slurm_starts()[:-1]])
    except UserError:  # it is damaged, and --fresh is the way out
        return True


def _is_restart() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def _has_seen(status: Mapping[str, Any], launches: Collection[str | None]) -> bool:
    """Whether one of these took part in the last start. One is enough: nodes come and go."""
    return not set(launches).isdisjoint(status.get("launch") or ())


def slurm_starts() -> list[str]:
    """Every start of this Slurm job up to this one: Slurm starts a job again under the same number. Empty elsewhere."""
    job, restarts = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", 0))
    return [f"slurm job {job} restart {number}" for number in range(restarts + 1)] if job else []


def launch_id() -> str | None:
    """What all starts on this node share in one launch: what launch.sh calls it; else its torchrun. None without both.

    torchrun is known by its host, its process and when that began: its own --rdzv-id may be used again.
    """
    if given := os.environ.get("LOCKSTEP_LAUNCH_ID"):
        return given
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    with open(f"/proc/{os.getppid()}/stat") as file:
        began = file.read().rpartition(")")[2].split()[19]  # proc_pid_stat(5): starttime
    return f"{socket.gethostname()} {os.getppid()} {began}"
