"""The processes that train one run together, and how they agree.

Whoever starts them (torchrun, SLURM) puts RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT into the
environment. Tensors of a GPU travel by NCCL; what hosts tell each other is a few bytes by gloo, which waits for no GPU.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from redline.errors import UsageError, UserError
from redline.training.heartbeat import HEARTBEAT

if TYPE_CHECKING:  # a process that is alone needs none of it, and torch takes seconds to import
    import torch.distributed as dist
import array
import fcntl
import ipaddress
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

# ----------------------------------------------------------------------------------------------------
# Choose the network interface by which gloo reaches the other nodes.
#
# Every gloo process offers the others one address. By itself gloo takes the address that the machine's hostname
# resolves to. On many machines /etc/hosts maps the hostname to 127.0.0.1 or 127.0.1.1: every node then offers its own
# loopback address, and no other node can connect to it. `choose_interface` finds the interface that leads to the
# other nodes and sets GLOO_SOCKET_IFNAME before `ranks.join` creates the process group.


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


PATIENCE = timedelta(days=2)  # for the first rank's preparations; whether it still lives, the watch knows
_GRACE = 5.0  # seconds: a watch notices a hung rank before the others give up on it
_LOOK_EVERY_S = 0.02


class LostRankError(UserError):
    """Another process of the run is gone, or does not answer."""

    why = "lost"


@dataclass(frozen=True)
class Ranks:
    """One of `size` processes. Alone it agrees with itself, and says nothing to anyone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those of its node
    nodes: int = 1
    joined: bool = False  # there is a process group, be it of one
    patient: Any = None  # the group in which one may wait for long

    @property
    def is_main(self) -> bool:
        """It alone writes the lock, the log and the screen."""
        return self.rank == 0

    def max(self, *numbers: float) -> list[float]:
        """Of each number the highest among all ranks."""
        return self._reduced(numbers, "MAX")

    def sum(self, *numbers: float) -> list[float]:
        return self._reduced(numbers, "SUM")

    def _reduced(self, numbers: Sequence[float], how: str) -> list[float]:
        if self.size == 1:
            return list(numbers)
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(numbers, dtype=torch.float64)
        with self._together():
            dist.all_reduce(tensor, getattr(dist.ReduceOp, how))
        return [float(number) for number in tensor.tolist()]

    def broadcast(self, value: Any) -> Any:
        """What the first rank has, as JSON knows it; the others wait for it, however long it takes."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        text = json.dumps(value).encode() if self.is_main else b""
        size = torch.tensor([len(text)])
        with self._together():
            dist.broadcast(size, 0, group=self.patient)
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)
            content = content if self.is_main else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(content, 0, group=self.patient)
        return value if self.is_main else json.loads(bytes(content.tolist()))

    def barrier(self) -> None:
        """Until all are here."""
        self.broadcast(None)
        self.max(0.0)

    # --- beside the steps: background threads must not mix their messages with those of the loop

    def post(self, key: str, value: Any) -> None:
        _store().set(key, json.dumps(value))

    def peek(self, key: str) -> Any:
        """What was posted under the key; None if nothing was, or nobody can be asked any more."""
        if self.size == 1:
            return None
        try:
            return json.loads(_store().get(key)) if _store().check([key]) else None
        except RuntimeError:  # the store went with the process that hosted it
            return None

    def wait_for(self, key: str, timeout: float = PATIENCE.total_seconds()) -> Any:
        """What was posted under the key, as soon as it is."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with self._together():
                if _store().check([key]):
                    return json.loads(_store().get(key))
            time.sleep(_LOOK_EVERY_S)
        raise LostRankError(f"rank {self.rank} waited {timeout:.0f} s for {key}.")

    def delete(self, *keys: str) -> None:
        for key in keys:
            _store().delete_key(key)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            with HEARTBEAT.waiting():
                yield
        except RuntimeError as error:  # gloo's, and the store's
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            what = f"rank {self.rank} of {self.size} lost the others ({reason[:200]})."
            raise LostRankError(what, fix="`redline train --resume RUN` goes on from the last checkpoint.") from None

    def leave(self) -> None:
        if self.joined:
            import torch.distributed as dist

            dist.destroy_process_group()


SINGLE_PROCESS = Ranks()


def launched_distributed() -> bool:
    """Whether this process is one of several, by its environment."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(device: str, timeout: float) -> Ranks:
    """Join the process group that the environment names; return ALONE where it names none."""
    if not launched_distributed():
        return SINGLE_PROCESS
    rank, size = (_whole(name) for name in ("RANK", "WORLD_SIZE"))
    if rank >= size:
        what = f"RANK={rank} is not possible with WORLD_SIZE={size}: ranks count from 0 to WORLD_SIZE - 1."
        raise UsageError(what, where="RANK", fix="Set both as torchrun would, the same WORLD_SIZE for every rank.")
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if size > 1 and not os.environ.get(name)]:
        fix = "Set them as torchrun would: where rank 0 listens for the others."
        raise UsageError(f"{' and '.join(missing)} not set, beside RANK and WORLD_SIZE.", fix=fix)
    import torch
    import torch.distributed as dist

    local = _whole("LOCAL_RANK", 0)
    here = _whole("LOCAL_WORLD_SIZE", size)
    interface = choose_interface(here < size if "LOCAL_WORLD_SIZE" in os.environ else None)
    options: dict[str, Any] = {"backend": "gloo", "timeout": timedelta(seconds=timeout + _GRACE)}
    if device == "cuda":
        card = _card(local, rank)
        torch.cuda.set_device(card)
        options |= {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", card)}

    def connect() -> Any:
        if device == "cuda":
            torch.cuda.set_device(card)  # the current device belongs to the thread
        dist.init_process_group(rank=rank, world_size=size, store=_agent_store(rank, size, timeout), **options)
        return dist.new_group(backend="gloo", timeout=PATIENCE)

    try:
        patient = _within(timeout, connect)
    except (RuntimeError, ValueError, TimeoutError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"rank {rank} of {size} did not find the others ({reason[:200]})."
        raise LostRankError(what, fix=_advice(str(error), interface)) from None
    nodes = 1 if here < 1 or size % here else size // here  # uneven ones are planned for as one
    return Ranks(rank, size, local, nodes, joined=True, patient=patient)


def _agent_store(rank: int, size: int, timeout: float) -> dist.Store | None:
    """Return the store of torchrun's agent under a prefix that only these ranks use; None where rank 0 hosts a store.

    The agent's store outlives the ranks that are restarted, with their keys. A restarted rank could read the address of
    a rank that has died before the new one has written its own. TORCHELASTIC_RESTART_COUNT is no prefix: every node
    counts for itself. So rank 0 draws a name, and the others take the name whose list of members has them.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist

    patience = timedelta(seconds=timeout)
    host, port = os.environ["MASTER_ADDR"], _whole("MASTER_PORT")
    store = dist.PrefixStore("redline", dist.TCPStore(host, port, size, is_master=False, timeout=patience))
    return dist.PrefixStore(_agreed_name(store, rank, size, time.monotonic() + timeout), store)


def _agreed_name(store: dist.Store, rank: int, size: int, deadline: float) -> str:
    """Return a name that the living ranks of one start agree on.

    Keys of earlier starts may still be in the store, but not this process's `own` name.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("leader", own)
    while time.monotonic() < deadline:
        name = own if rank == 0 else store.get("leader").decode()  # waits until there is one
        if rank == 0 and store.check(others := [f"{name}/{other}" for other in range(1, size)]):
            store.set(f"{name}/members", json.dumps([store.get(key).decode() for key in others]))
            return name
        if rank > 0:
            store.set(f"{name}/{rank}", own)
            if store.check([f"{name}/members"]) and own in json.loads(store.get(f"{name}/members")):
                return name
        time.sleep(_LOOK_EVERY_S)
    raise TimeoutError("not all ranks came to torchrun's store")


def _within(seconds: float, connect: Callable[[], Any]) -> Any:
    """Return what `connect` returns; raise TimeoutError if it takes longer.

    It runs in a thread because gloo waits five times its own timeout for a rank that has registered but cannot be
    reached, and two days in a group that is made with PATIENCE. A thread that still waits ends with the process:
    `cli.together.ended` leaves by os._exit.
    """
    result: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            result.append(connect())
        except BaseException as error:  # raised again below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=work, name="join", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not result:
        raise TimeoutError(f"waited parallel.timeout={seconds:g} s")
    return result[0]


def _advice(error: str, interface: Interface) -> str:
    master = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if "nccl" in error.lower():
        return f"MASTER_ADDR:MASTER_PORT is {master}; `redline doctor` checks NCCL."
    return (
        f"Every node must reach {master} (MASTER_ADDR:MASTER_PORT) and the address that each rank offers to gloo; "
        f"this rank offers {interface}. Choose another network with {GLOO_INTERFACE}=INTERFACE."
    )


def _card(local: int, rank: int) -> int:
    """A scheduler may show each process its own card alone."""
    import torch

    count = torch.cuda.device_count()
    if local >= count > 1:
        what = f"rank {rank} has no GPU of its own: it would be number {local}, and {count} are here."
        raise UserError(what, where="LOCAL_RANK", fix="Start as many processes on a node as it has GPUs.")
    return local if local < count else 0


def _whole(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{text!r} is not a number.", where=name, fix="torchrun and SLURM's launcher set it.")
    return int(text)


def _store() -> dist.Store:
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()
