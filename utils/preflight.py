"""Cheap checks at every start, of what would fail later or in words that help nobody: one line for each finding, with a way out.

No torch at module level: the first check is made before anything is imported that may be missing.
"""

import ipaddress
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from utils.errors import Exit, UserError, record_exit, say

REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"
SHARED_MEMORY = Path("/dev/shm")
PREFETCH = 2  # items that a data loading process keeps ready (torch's default); one more is on its way
STATES = 3  # times the weights: a checkpoint with Adam's two averages
GB = 1e9


def require_packages() -> None:
    """Leave with 64 where a package is missing or another than requirements.txt wants, or does not fit torch. One rank a node speaks."""
    if problems := list(_package_problems()):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            python = os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable
            say(f"train.py: {socket.gethostname()}: {'; '.join(problems)}: {python} -m pip install -r {os.path.relpath(REQUIREMENTS)}")
        record_exit(Exit.USAGE)
        raise SystemExit(int(Exit.USAGE))


def _package_problems() -> Iterator[str]:
    try:
        from packaging.requirements import Requirement
        from packaging.version import Version
    except ImportError:
        yield "packaging is not installed"
        return
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    wanted = [("requirements.txt", Requirement(line)) for line in lines if line]
    with suppress(metadata.PackageNotFoundError):  # its compiled part may fit one torch only
        wanted += [("torchvision", need) for need in map(Requirement, metadata.requires("torchvision") or ()) if need.name == "torch"]
    for who, need in wanted:
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            yield f"{need.name} is not installed"
            continue
        # A vendor's 2.11.0a0+hash is his 2.11.0.
        if not any(need.specifier.contains(each, prereleases=True) for each in (version, Version(version).base_version)):
            yield f"{need.name} {version} is installed, and {who} needs {need.name}{need.specifier}"


def require_interface() -> str | None:
    """GLOO_SOCKET_IFNAME, if it is set. Raises UserError (64) where this machine has no such interface (or one of several)."""
    given, there = os.environ.get("GLOO_SOCKET_IFNAME"), [name for _, name in socket.if_nameindex()]
    if given and (strange := set(given.split(",")) - set(there)):
        raise UserError(f"GLOO_SOCKET_IFNAME={given}: {socket.gethostname()} has no network interface {', '.join(strange)};"
                        f" it has {', '.join(there)}")
    return given or None


def leads_home(address: str) -> bool:
    """Whether every machine reaches itself there: 127.0.1.1, ::1, 0.0.0.0."""
    return ipaddress.ip_address(address).is_loopback or ipaddress.ip_address(address).is_unspecified


def require_own_name() -> None:
    """Raise UserError (64) where gloo would wait in vain for the other machines: where this one's own name leads.

    launch.sh says by GLOO_SOCKET_IFNAME where they are to be awaited; for launches without it.
    """
    if require_interface():
        return
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        address = "nowhere"
    if address == "nowhere" or leads_home(address):
        raise UserError(f"the name of this machine, {name}, leads to {address}, where no other machine finds it: start with ./launch.sh,"
                        " or set GLOO_SOCKET_IFNAME to its network interface")


def warn_of_room(run: Path, weight_bytes: int, keep: int, item_bytes: int, workers: int, world: Any, note: Callable[[str], None]) -> None:
    """Tell of a disk or a shared memory that may not do. Collective.

    run: where checkpoints go; so many stay. item_bytes: what a data loading process hands over at a time; workers: of each rank.
    """
    found = []
    if world.is_main:
        have = shutil.disk_usage(run).free + sum(file.stat().st_size for file in run.glob("checkpoints/*/*"))
        if have < (needed := ((keep + 1) * STATES + 1) * weight_bytes):  # one being written; RUN/model
            found.append(f"{run} has room for {have / GB:.3g} GB, and {keep} checkpoints, one more and RUN/model may take"
                         f" {needed / GB:.3g}: use a smaller --keep, or --run-dir on another disk")
    needed = workers * (PREFETCH + 1) * item_bytes * world.local_world_size
    if world.local_rank == 0 and SHARED_MEMORY.exists() and (free := shutil.disk_usage(SHARED_MEMORY).free) < needed:
        found.append(f"{SHARED_MEMORY} has {free / GB:.3g} GB free, and {world.local_world_size} x {workers} data loading processes may"
                     f" take {needed / GB:.3g}: docker run --ipc=host (or --shm-size), or --workers 0")
    for host, told in world.gather([socket.gethostname(), found]):
        for finding in told:
            note(f"warning: {host}: {finding}")
