"""What this start is: the first of its launch or a restart; of a run that is finished, starts over or continues.

Torch is not imported, so a finished run answers at once.
"""

import os
import re
import socket
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import yaml

from utils.errors import Exit, UserError, leave, record_exit, rounded, say
from utils.files import ask_server, read_json
from utils.rundir.identity import compare, identity, run_path, train_on
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
        is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        if is_restart and _has_seen(last, [launch_id()]) and _is_final(last["exit_code"], last["message"]):
            record_exit(last["exit_code"])
            if os.environ.get("RANK", "0") == "0":  # of all nodes
                say("train.py: not restarted, because a restart would end in the same way:"
                    f" {last['state']}, {last['message']}")
            raise SystemExit(last["exit_code"])

    # a finished run. Several nodes may not see the same yet: main() asks rank 0.
    is_one_node = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    if is_one_node and (words := words_if_finished(config)):
        leave(words, Exit.DONE, sys.stdout)


def words_if_finished(config: Config) -> str | None:
    """What to tell the user if this run is finished: the same command has nothing to do. None if it is not."""
    path = run_path(config)
    try:
        if acts_fresh(config) or config.run.eval_only or config.mode:
            return None
        if read_json(path / "status.json").get("state") != "finished":
            return None
        compare(config, path)
        if yaml.safe_load((path / "config.yaml").read_text())["data"] != identity(config)["data"]:
            return None  # it may be the same data in another place: main() compares fingerprints
        summary = read_json(path / "summary.json")
    except (UserError, OSError, yaml.YAMLError):
        return None  # open_run reports it on all ranks
    figures = ", ".join(f"{name} {rounded(value)}" for name, value in summary.items() if isinstance(value, float))
    end = "--max-steps" if config.run.max_steps == summary.get("step") else "--epochs"
    return (f"{path} is finished: step {summary.get('step')}, {figures}\n--fresh starts over"
            + train_on(config, path, [end, "N"]))


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
