"""What this start is: the first of its launch or a restart; of a run that is finished, starts over or continues.

Torch is not imported, so a finished run answers at once.
"""

import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from utils.errors import Exit, UserError, record_exit, rounded, say
from utils.files import ask_server, read_json
from utils.rundir.identity import compare, identity, run_path
from utils.settings.config import Config

# a restart would end in the same way
FINAL = (Exit.USAGE, Exit.BAD_DATA, Exit.NO_INPUT, Exit.CANNOT_CREATE, Exit.OTHER_RUN, Exit.DIVERGED,
         Exit.NO_CHECKPOINT)


def finish_early(config: Config) -> None:
    """If this run is finished, say so and exit with 0. If a restart cannot help, exit as the start before did.

    torchrun has no way to be asked not to restart. After a SIGTERM it restarts only if it sent the signal
    itself: another node joined or left.
    """
    path = run_path(config)
    ask_server(path / "status.json")

    # a restart that cannot help
    with suppress(UserError, OSError):  # open_run reports it on all ranks
        last = read_json(path / "status.json")
        is_final = _has_seen(last, [launch_id()]) and _is_final(last.get("exit_code"), last.get("message", ""))
        ending = last if is_final else _last_ending()
        if ending and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
            record_exit(ending["exit_code"])
            if os.environ.get("RANK", "0") == "0":
                say("train.py: not restarted, because a restart would end in the same way:"
                    f" {ending['state']}, {ending['message']}")
            raise SystemExit(ending["exit_code"])

    # a finished run. Several nodes may not see the same yet: main() asks rank 0.
    is_one_node = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    if is_one_node and (words := words_if_finished(config)):
        if os.environ.get("RANK", "0") == "0":
            say(words, sys.stdout)
        raise SystemExit(0)


def words_if_finished(config: Config) -> str | None:
    """What to tell the user if this run is finished: the same command has nothing to do. None if it is not."""
    path = run_path(config)
    try:
        if acts_fresh(config) or config.run.eval_only or read_json(path / "status.json").get("state") != "finished":
            return None
        compare(config, path)
        if yaml.safe_load((path / "config.yaml").read_text())["data"] != identity(config)["data"]:
            return None  # it may be the same data in another place: main() compares fingerprints
        summary = read_json(path / "summary.json")
    except (UserError, OSError, yaml.YAMLError):
        return None  # open_run reports it on all ranks
    figures = ", ".join(f"{name} {rounded(value)}" for name, value in summary.items() if isinstance(value, float))
    return (f"{path} is finished: step {summary.get('step')}, {figures}\n--fresh starts over; to train longer, start a"
            f" new run from it: --model {shlex.quote(str(path / 'model'))}")


def keep_ending(state: str, code: int, message: str) -> None:
    """Tell torchrun's restarts on this node that they cannot help. The first process to call it is heard.

    For a start that leaves no run directory. The file lies in the folder that this torchrun made for its processes'
    error files: it belongs to one launch, outlives its processes, needs no name of its own, and torchrun leaves it to
    the system's cleaning as it does its own. (Without torchrun nothing restarts a process but a user.)
    """
    file = _ending_file()
    if file is not None and _is_final(code, message):
        with suppress(OSError), file.open("x") as writer:
            json.dump({"state": state, "exit_code": code, "message": message}, writer)


def _last_ending() -> dict[str, Any]:
    """What keep_ending kept; empty if nothing."""
    file = _ending_file()
    return read_json(file) if file is not None else {}


def _ending_file() -> Path | None:
    """In FOLDER of TORCHELASTIC_ERROR_FILE=FOLDER/attempt_N/LOCAL_RANK/error.json (torch 2.11 to 2.15)."""
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return attempt.with_name("lockstep-ending.json") if attempt.name.startswith("attempt_") else None


def _is_final(code: int | None, message: str) -> bool:
    """Whether a restart would end in the same way."""
    return code in FINAL or (code == Exit.STOPPED and not re.search("SIGTERM(?! to rank)", message))


def device_of_run(config: Config) -> str:
    """--device, or what `auto` became in this run. Known before the process group exists."""
    kept = {} if acts_fresh(config) else read_json(run_path(config) / "auto.json")
    return config.device.device if config.device.device != "auto" else kept.get("device", "auto")


def acts_fresh(config: Config, launches: Collection[str | None] | None = None) -> bool:
    """Whether --fresh clears the run directory at this start: once per launch.

    Not when torchrun, launch.sh --retries or Slurm starts it again.
    launches: launch_id() of all nodes; None = only this node's is known so far.
    """
    path = run_path(config)
    if not config.run.fresh or not (path / "config.yaml").exists():
        return False
    try:
        return not _has_seen(read_json(path / "status.json"), [*(launches or [launch_id()]), *slurm_starts()[:-1]])
    except UserError:  # status.json is damaged, and --fresh is the way out
        return True


def _has_seen(status: Mapping[str, Any], launches: Collection[str | None]) -> bool:
    """Whether one of these launches took part in the last start. One is enough: nodes join and leave."""
    return not set(launches).isdisjoint(status.get("launch") or ())


def slurm_starts() -> list[str]:
    """Every start of this Slurm job up to this one: Slurm restarts a job under the same id. Empty without Slurm."""
    job, restarts = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT", 0))
    return [f"slurm job {job} restart {number}" for number in range(restarts + 1)] if job else []


def launch_id() -> str | None:
    """The id that all starts of one launch share on this node: from launch.sh, else of torchrun; None without both.

    A torchrun is its host, its process id and its start time: two launches may have the same --rdzv-id.
    """
    if given := os.environ.get("LOCKSTEP_LAUNCH_ID"):
        return given
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    with open(f"/proc/{os.getppid()}/stat") as file:
        began = file.read().rpartition(")")[2].split()[19]  # proc_pid_stat(5): starttime
    return f"{socket.gethostname()} {os.getppid()} {began}"
