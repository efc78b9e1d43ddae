"""The way from this machine to another, for launch.sh, which asks before it starts anything:

    python -m utils.distributed.network HOST PORT WAIT_S        # prints OWN_ADDRESS INTERFACE HOST_ADDRESS IS_OWN

PORT: must be free if HOST is this machine; 0 = none. WAIT_S: so long for a name that is not known yet, as of a pod that is to come.
Where a host's own name leads is often wrong (Debian: 127.0.1.1), the route is not. No package is imported.
"""

import fcntl
import socket
import struct
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

from utils.distributed.preflight import leads_home, require_interface
from utils.errors import Exit, UserError, say

ELSEWHERE = "192.0.2.1"  # TEST-NET-1 (RFC 5737), on nobody's network: the way there is the default route; nothing is sent
_SIOCGIFCONF, _IFREQ = 0x8912, struct.Struct("16sHH4s16x")  # netdevice(7), on 64 bits


@dataclass(frozen=True)
class Route:
    """How this machine reaches a host."""

    own_address: str
    interface: str
    host_address: str

    @property
    def is_own(self) -> bool:
        """Whether that host is this machine."""
        return leads_home(self.host_address) or self.own_address == self.host_address


def route_to(host: str) -> Route:
    """The route to `host`, a name or an address. Where it is this machine by a loopback address: the route to all others.

    GLOO_SOCKET_IFNAME, where it is set, is the interface. Raises socket.gaierror or UnicodeError where the name is not known;
    UserError: 76 where there is no way, 64 where it is this machine alone, or where there is no such interface.
    """
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)  # IPv4 before IPv6
    is_home = leads_home(address[0])
    with socket.socket(socket.AF_INET if is_home else family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9) if is_home else address)  # UDP: finds the route, sends nothing
        except OSError as error:
            if is_home:
                raise UserError(f"{host} leads to {address[0]}, where no other machine finds this one: give its address") from None
            raise UserError(f"there is no route to {host} ({error.strerror})", Exit.LOST_PEERS) from None
        own = probe.getsockname()[0]
    return Route(own, require_interface() or _interface(own), address[0])


def require_free(port: int) -> None:
    """Raise UserError (64) if another program of this machine listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a launch before this may still be dying
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(f"port {port} of this machine: {error.strerror}; give another --master-port, to all machines") from None


def _interface(own: str) -> str:
    for name, address in _addresses():
        if address == own:
            return name
    raise UserError(f"no network interface has the address {own}, from which others are reached: set GLOO_SOCKET_IFNAME")


def _addresses() -> list[tuple[str, str]]:
    """(interface, address) pairs."""
    buffer = array("B", bytes(_IFREQ.size * 256))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        size, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iL", len(buffer), buffer.buffer_info()[0])))
    pairs = [(name.rstrip(b"\0").decode().partition(":")[0], socket.inet_ntoa(address))  # eth0:1 is one more of eth0
             for name, _, _, address in _IFREQ.iter_unpack(bytes(buffer[:size]))]
    file = Path("/proc/net/if_inet6")
    for line in file.read_text().splitlines() if file.exists() else []:
        digits, *_, name = line.split()
        pairs.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return pairs


def _main(host: str, port: int, wait_s: float) -> None:
    deadline, has_said = time.monotonic() + wait_s, False
    while True:
        try:
            route = route_to(host)
            break
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() >= deadline or isinstance(error, UnicodeError):
                reason = getattr(error, "strerror", "it cannot be one")
                raise UserError(f"nobody knows the name {host} ({reason})", Exit.LOST_PEERS) from None
            if not has_said:
                say(f"launch.sh: --master-addr {host}: nobody knows that name yet; it may take {wait_s:g} s")
                has_said = True
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
