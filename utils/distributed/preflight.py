"""Cheap checks at every start, of what would fail later or in words that help nobody: one line for each finding, with a way out.

No torch at module level: the first check is made before anything is imported that may be missing.
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from utils.errors import Exit, UserError, record_exit, say

REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"


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
