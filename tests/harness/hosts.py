"""Hosts that are network namespaces of this machine: own addresses on one bridge, cut, silenced and slowed at will.

    with hosts(2) as (first, second):
        start_launcher("--nnodes", 2, ..., inside=first.inside())
        second.cut()

They are called n1, n2, ...; their own name resolves to 127.0.1.1, as Debian sets machines up.
Needs root.
"""

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest


class Host:
    """A network namespace on `bridge`; its address is NETWORK+NUMBER. names: what it sees as /etc/hosts."""

    def __init__(self, bridge: str, number: int, names: Path, network: str):
        self.namespace, self.link, self.address, self._bridge, self._names = (
            f"{bridge}-{number}", f"{bridge}.{number}", f"{network}{number}", bridge, names)
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        size = ["/64", "nodad"] if ":" in network else ["/24"]
        _ip("-n", self.namespace, "addr", "add", self.address + size[0], "dev", "eth0", *size[1:])
        _ip("-n", self.namespace, "link", "set", "eth0", "up")
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        self.plug()

    def plug(self) -> None:
        """On the network, as at first."""
        subprocess.run(self.inside("iptables", "--flush"), check=False, capture_output=True)  # which few need
        _ip("link", "set", self.link, "master", self._bridge, "up")

    def cut(self) -> None:
        """The cable is out: both ends notice."""
        _ip("link", "set", self.link, "down")

    def silence(self) -> None:
        """A black hole: what is sent gets lost without an answer."""
        _ip("link", "set", self.link, "nomaster")

    def drop(self) -> None:
        """The same by a firewall of its own."""
        for chain, side in (("INPUT", "--in-interface"), ("OUTPUT", "--out-interface")):
            subprocess.run(self.inside("iptables", "--append", chain, side, "eth0", "--jump", "DROP"), check=True)

    def slow(self, rate: str) -> None:
        """All that it gets comes no faster than this ("2mbit")."""
        shape = ["root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", self.link, *shape], check=True)

    def inside(self, *words: object) -> list[str]:
        """The words as a command that runs on this host. (`ip netns exec` hides the control groups from Slurm.)"""
        enter = (f"mount --bind {shlex.quote(str(self._names))} /etc/hosts"
                 f" && exec nsenter --net=/run/netns/{self.namespace} \"$@\"")
        return ["unshare", "--mount", "sh", "-c", enter, "sh", *map(str, words)]


@contextmanager
def remembering(folder: Path, seconds: int) -> Iterator[list[str]]:
    """For Host.inside: there `folder` is a network disk, which remembers for so long that a name was not there."""
    view = Path(tempfile.mkdtemp())
    if shutil.which("bindfs") is None:
        pytest.skip("needs bindfs")
    caches = ",".join(f"{what}_timeout={seconds}" for what in ("negative", "entry", "attr"))
    subprocess.run(["bindfs", "-o", caches, folder, view], check=True)
    try:
        yield ["sh", "-c", f"mount --bind {shlex.quote(str(view))} {shlex.quote(str(folder))} && exec \"$@\"", "sh"]
    finally:
        subprocess.run(["umount", view], check=True)
        view.rmdir()


@contextmanager
def hosts(count: int, network: str = "10.77.0.") -> Iterator[list[Host]]:
    """So many hosts on a network of their own; "fd77::": by IPv6 alone. Skips the test where that is not permitted."""
    bridge = f"ls{os.getpid() % 100000}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = folder / "hosts"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n"
                         + "".join(f"{network}{number} n{number}\n" for number in range(1, count + 1)))
        try:
            _ip("netns", "add", bridge)
            _ip("netns", "del", bridge)
            _ip("link", "add", bridge, "type", "bridge")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs root, iproute2, and to be permitted network namespaces ({error})")
        stack.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        found = []
        for number in range(1, count + 1):
            found.append(Host(bridge, number, names, network))
            stack.callback(_ip, "netns", "del", found[-1].namespace)
            stack.callback(_ip, "link", "del", found[-1].link)  # first: with its namespace it would go some time later
        yield found


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
