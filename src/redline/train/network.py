"""Choose the network interface by which gloo reaches the other nodes.

Every gloo process offers the others one address. By itself gloo takes the address that the machine's hostname resolves
to. On many machines /etc/hosts maps the hostname to 127.0.0.1 or 127.0.1.1: every node then offers its own loopback
address, and no other node can connect to it. `choose_interface` finds the interface that leads to the other nodes and
sets GLOO_SOCKET_IFNAME before `ranks.join` creates the process group.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from redline.errors import UsageError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFCONF = 0x8912  # Linux: the IPv4 addresses of all interfaces
_IFREQ_BYTES, _MOST_ADDRESSES = 40, 512  # of struct ifreq on 64-bit Linux
_ELSEWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737): only the default route leads to it
_DISCARD_PORT = 9  # a connected UDP socket sends nothing; any port does


@dataclass(frozen=True)
class Interface:
    """What gloo offers to the other ranks; None where it is not known."""

    name: str | None
    address: str | None

    def __str__(self) -> str:
        return f"{self.address or 'an unknown address'} ({self.name or 'an unknown interface'})"


def choose_interface(several_nodes: bool | None) -> Interface:
    """Return the interface that gloo will use, and set GLOO_SOCKET_IFNAME if gloo would choose loopback by itself.

    `several_nodes` is None where the environment does not say it. GLOO_SOCKET_IFNAME stays as it is if it is set, and a
    hostname that resolves to a real address of this machine is taken as the administrator's choice of a network.
    """
    known = addresses()
    if given := os.environ.get(GLOO_INTERFACE):
        return _given(given, known)
    own = hostname_address()
    if several_nodes is False or (own is not None and not is_loopback(own)):
        return Interface(known.get(own or ""), own)
    master = os.environ.get("MASTER_ADDR", "")
    if several_nodes is None and (master == "localhost" or is_loopback(master)):
        return Interface(known.get(own or ""), own)
    # MASTER_ADDR leads to the network on which the ranks meet. On the first node its own name may resolve to loopback,
    # too: there the default route decides, and without one the only interface that is not loopback.
    address = next((a for a in (local_address(master), local_address(_ELSEWHERE)) if a and not is_loopback(a)), None)
    others = {address: name for address, name in known.items() if not is_loopback(address)}
    if address is None and len(set(others.values())) == 1:
        address = next(iter(others))
    if address in known:
        os.environ[GLOO_INTERFACE] = known[address]
        return Interface(known[address], address)
    if several_nodes and known:
        host = socket.gethostname()
        listed = ", ".join(f"{name} ({address})" for address, name in others.items()) or "none but loopback"
        what = f"hostname {host!r} resolves to {own or 'no address of this machine'}, which other nodes cannot reach."
        fix = f"Set {GLOO_INTERFACE} to the interface that leads to the other nodes. Here: {listed}."
        raise UsageError(what, where="MASTER_ADDR", fix=fix)
    return Interface(known.get(own or ""), own)


def _given(text: str, known: dict[str, str]) -> Interface:
    """Check GLOO_SOCKET_IFNAME, which may be a comma-separated list."""
    here = [name for _, name in socket.if_nameindex()]
    names = text.split(",")
    if missing := [name for name in names if name not in here]:
        what = f"there is no network interface {missing[0]!r} on {socket.gethostname()}."
        raise UsageError(what, where=GLOO_INTERFACE, fix=f"Use one of {', '.join(here)}, or unset it.")
    return Interface(text, next((address for address, name in known.items() if name in names), None))


def hostname_address() -> str | None:
    """Return the address that gloo takes by itself: the first that the hostname resolves to and that is this machine's.
    None if there is no such address; gloo then falls back to loopback."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
                return str(place[0])
    return None


def local_address(host: str) -> str | None:
    """Return this machine's own address on the way to `host`; None if `host` cannot be resolved or reached."""
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
    return None


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def addresses() -> dict[str, str]:
    """Map every address of this machine to the name of its interface; empty where the system is not Linux."""
    if sys.platform != "linux":
        return {}
    room = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(room), room.buffer_info()[0])
        filled = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    found = {}
    for start in range(0, filled, _IFREQ_BYTES):
        entry = room[start : start + _IFREQ_BYTES].tobytes()
        name = entry[:16].split(b"\0", 1)[0].decode().partition(":")[0]  # eth0:1 is another address of eth0
        found[socket.inet_ntoa(entry[20:24])] = name
    with suppress(OSError):  # a kernel without IPv6 has no such file
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return found
