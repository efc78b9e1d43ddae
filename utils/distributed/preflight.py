"""Preflight: cheap checks at every start.

A missing package or a wrong host name would fail later, with a traceback or a hang that explains nothing. Each check
prints one line with a way out. No torch at module level: the first check runs before any import that may be missing.
"""

import fcntl
import ipaddress
import os
import shlex
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from utils.errors import Exit, UserError, leave

REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
           "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "SLURM_RESTART_COUNT")
SIOCGIFFLAGS, IFF_UP = 0x8913, 1  # netdevice(7)
TASKS = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}  # how many each started


def require_packages() -> None:
    """Exit with 64 if a package is missing, is not the version of requirements.txt, or does not fit torch.

    The first rank of a node prints the message.
    """
    if problems := list(_package_problems()):
        python = Path(sys.executable)
        python = os.path.relpath(python) if python.is_relative_to(Path.cwd()) else python
        install = shlex.join([str(python), "-m", "pip", "install", "-r", os.path.relpath(REQUIREMENTS)])
        leave(f"train.py: {socket.gethostname()}: {'; '.join(problems)}: {install}", Exit.USAGE)


def require_numbers(program: str = "train.py") -> None:
    """Exit with 64 if a variable that a launcher sets to a number is none."""
    for name in NUMBERS:
        value, most = os.environ.get(name, "0"), 65535 if name == "MASTER_PORT" else 10**9
        if not value.isdecimal() or int(value) > most:
            leave(f"{program}: {name}={value} in the environment: must be a whole number up to {most}; unset it, or set"
                  " it as torchrun does", Exit.USAGE)


def words_about_tasks() -> str:
    """Where srun or mpirun started several tasks without torchrun, each of which trains alone; else ""."""
    found = [f"{name} started {os.environ[variable]} tasks, and each of them trains alone; to train together, start one"
             f" per machine: {name} ... ./launch.sh" for name, variable in TASKS.items()
             if os.environ.get(variable, "1").isdecimal() and int(os.environ.get(variable, 1)) > 1]
    is_alone = not {"LOCAL_RANK", "LOCKSTEP_LAUNCH_ID"} & os.environ.keys() and os.environ.get("WORLD_SIZE", "1") == "1"
    return found[0] if found and is_alone else ""


def _package_problems() -> Iterator[str]:
    try:
        from packaging.requirements import Requirement
        from packaging.version import Version
    except ImportError:
        yield "packaging is not installed"
        return
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    wanted = [("requirements.txt", Requirement(line)) for line in lines if line]
    with suppress(metadata.PackageNotFoundError):  # its compiled part fits one version of torch
        needs = map(Requirement, metadata.requires("torchvision") or ())
        wanted += [("torchvision", need) for need in needs if need.name == "torch"]
    for who, need in wanted:
        try:
            version = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            yield f"{need.name} is not installed"
            continue
        # A vendor's build 2.11.0a0+hash counts as 2.11.0.
        versions = version, Version(version).base_version
        if not any(need.specifier.contains(each, prereleases=True) for each in versions):
            yield f"{need.name} {version} is installed, but {who} needs {need.name}{need.specifier}"


def require_interface() -> str | None:
    """GLOO_SOCKET_IFNAME, if it is set. Raises UserError (64) if this host lacks an interface that it names."""
    given, existing = os.environ.get("GLOO_SOCKET_IFNAME"), [name for _, name in socket.if_nameindex()]
    if given and (missing := set(given.split(",")) - set(existing)):
        raise UserError(f"GLOO_SOCKET_IFNAME={given}: {socket.gethostname()} has no network interface"
                        f" {', '.join(missing)}; it has {', '.join(existing)}")
    return given or None


def require_loopback() -> None:
    """Raise UserError (64) where the loopback interface is down, as in a sandbox: the processes of a host meet there.
    """
    request = struct.pack("16sH", b"lo", 0)
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        if not struct.unpack("16sH", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1] & IFF_UP:
            raise UserError(f"the loopback network interface of {socket.gethostname()} is down, and even one process"
                            " needs it: `ip link set lo up`, as root")


def is_local(address: str) -> bool:
    """Whether every host reaches itself at this address: 127.0.1.1, ::1, 0.0.0.0."""
    return ipaddress.ip_address(address).is_loopback or ipaddress.ip_address(address).is_unspecified


def require_own_name() -> None:
    """Raise UserError (64) if other hosts cannot reach this one by its own name, at which gloo listens.

    launch.sh sets GLOO_SOCKET_IFNAME instead; this check is for launches without it.
    """
    if require_interface():
        return
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        address = None
    if address is None or is_local(address):
        problem = f"resolves to {address}, which other hosts cannot reach" if address else "does not resolve"
        raise UserError(f"host name {name} {problem}: start with ./launch.sh, or set GLOO_SOCKET_IFNAME to the host's"
                        " network interface")
