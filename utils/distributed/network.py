"""The route from this host to another.

A host's own name often resolves to an address that others cannot reach (Debian: 127.0.1.1), so processes on several
hosts would wait for each other forever. The route is never wrong. launch.sh asks for it before it starts anything:

    python -m utils.distributed.network HOST PORT WAIT_S        # prints OWN_ADDRESS INTERFACE HOST_ADDRESS IS_OWN

PORT: must be free if HOST is this host; 0 = none. WAIT_S: how long to retry a name that does not resolve yet (a pod is
still starting). Imports no package.

Tests: tests/end_to_end/test_launch.py
"""

import fcntl
import socket
import struct
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

from utils.distributed.preflight import is_local, require_interface
from utils.errors import Exit, UserError, say

ELSEWHERE = "192.0.2.1"  # TEST-NET-1 (RFC 5737), on no network: reached by the default route; nothing is sent
_SIOCGIFCONF, _IFREQ = 0x8912, struct.Struct("16sHH4s16x")  # netdevice(7), on 64 bits


@dataclass(frozen=True)
class Route:
    """How this host reaches another."""

    own_address: str
    interface: str
    host_address: str

    @property
    def is_own(self) -> bool:
        """Whether the other host is this one."""
        return is_local(self.host_address) or self.own_address == self.host_address


def route_to(host: str) -> Route:
    """The route to `host`, a name or an address; the default route if it is a loopback address of this host.

    GLOO_SOCKET_IFNAME, if it is set, is the interface. Raises socket.gaierror or UnicodeError if the name does not
    resolve; UserError: 76 without a route, 64 if other hosts cannot reach that address or there is no such interface.
    """
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)  # IPv4 before IPv6
    is_here = is_local(address[0])
    with socket.socket(socket.AF_INET if is_here else family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9) if is_here else address)  # UDP: finds the route, sends nothing
        except OSError as error:
            if is_here:
                raise UserError(f"{host} resolves to {address[0]}, which other hosts cannot reach: give this host's"
                                " address") from None
            raise UserError(f"no route to host {host} ({error.strerror})", Exit.LOST_PEERS) from None
        own = probe.getsockname()[0]
    return Route(own, require_interface() or _interface(own), address[0])


def require_free(port: int) -> None:
    """Raise UserError (64) if another program on this host listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier launch's connections may linger
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(f"port {port} on this host: {error.strerror}; use another --master-port, the same on all"
                            " hosts") from None


def _interface(own: str) -> str:
    for name, address in _addresses():
        if address == own:
            return name
    raise UserError(f"no network interface has the address {own} of the route to other hosts: set GLOO_SOCKET_IFNAME")


def _addresses() -> list[tuple[str, str]]:
    """(interface, address) pairs."""
    buffer = array("B", bytes(_IFREQ.size * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        size, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))
    pairs = [(name.rstrip(b"\0").decode().partition(":")[0], socket.inet_ntoa(address))  # eth0:1 is another one of eth0
             for name, _, _, address in _IFREQ.iter_unpack(bytes(buffer[:size]))]
    file = Path("/proc/net/if_inet6")
    for line in file.read_text().splitlines() if file.exists() else []:
        digits, *_, name = line.split()
        pairs.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return pairs


def _main(host: str, port: int, wait_s: float) -> None:
    deadline, has_warned = time.monotonic() + wait_s, False
    while True:
        try:
            route = route_to(host)
            break
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() >= deadline or isinstance(error, UnicodeError):
                reason = getattr(error, "strerror", "not a valid host name")
                raise UserError(f"cannot resolve host name {host} ({reason})", Exit.LOST_PEERS) from None
            if not has_warned:
                say(f"launch.sh: --master-addr {host}: cannot resolve this host name yet; trying for {wait_s:g} s")
                has_warned = True
            time.sleep(1)
    if port and route.is_own:
        require_free(port)
    print(route.own_address, route.interface, route.host_address, int(route.is_own))


if __name__ == "__main__":
    try:
        _main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    except UserError as refusal:
        say(f"launch.sh: --master-addr {sys.argv[1]}: {refusal}")
        sys.exit(refusal.code)
