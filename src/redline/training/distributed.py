"""The ranks that train one run together: how they find each other, agree on values, and wait for each other.

torchrun or SLURM's launcher starts them and sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Tensors of
a GPU are sent by NCCL. What the hosts tell each other is a few bytes by gloo, which does not wait for the GPU.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import json
import os
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.errors import UsageError, UserError
from redline.training.control import HEARTBEAT
from redline.training.supervisor import LOST

if TYPE_CHECKING:  # torch takes seconds to import, and a single process may not need it here
    import torch.distributed as dist

# Ranks wait this long for rank 0, which may prepare data for hours. The supervisor notices if it hangs or dies.
LONG_TIMEOUT = timedelta(days=2)
# Added to the timeout of collectives, so that a supervisor finds the rank that hangs before the others give up.
_SUPERVISOR_GRACE_S = 5.0
_POLL_S = 0.02


class LostRankError(UserError):
    """Another rank has ended or does not answer."""

    why = LOST


@dataclass(frozen=True)
class Ranks:
    """This process as one of `size` ranks. With one process every collective is a no-op."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on its node
    nodes: int = 1
    joined: bool = False  # there is a process group, possibly of one process
    long_group: Any = None  # a gloo group with LONG_TIMEOUT

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes the lock, the event log and the console."""
        return self.rank == 0

    def max(self, *numbers: float) -> list[float]:
        """Return the largest value of each number over all ranks."""
        return self._all_reduce(numbers, "MAX")

    def sum(self, *numbers: float) -> list[float]:
        return self._all_reduce(numbers, "SUM")

    def _all_reduce(self, numbers: Sequence[float], operation: str) -> list[float]:
        if self.size == 1:
            return list(numbers)
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(numbers, dtype=torch.float64)
        with self._collective():
            dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
        return [float(number) for number in tensor.tolist()]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value, which must be JSON, on every rank. The others wait up to LONG_TIMEOUT for it."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        text = json.dumps(value).encode() if self.is_main else b""
        size = torch.tensor([len(text)])
        with self._collective():
            dist.broadcast(size, 0, group=self.long_group)
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)
            content = content if self.is_main else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(content, 0, group=self.long_group)
        return value if self.is_main else json.loads(bytes(content.tolist()))

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.broadcast(None)
        self.max(0.0)

    # --- the key-value store, for background threads: collectives of two threads would be matched in the wrong order

    def post(self, key: str, value: Any) -> None:
        """Store a JSON value under a key that every rank can read."""
        _store().set(key, json.dumps(value))

    def peek(self, key: str) -> Any:
        """Return the value under the key, or None if there is none or the store is gone."""
        if self.size == 1:
            return None
        try:
            return json.loads(_store().get(key)) if _store().check([key]) else None
        except RuntimeError:  # the rank that hosted the store has ended
            return None

    def wait_for(self, key: str, timeout: float = LONG_TIMEOUT.total_seconds()) -> Any:
        """Wait for a value under the key and return it."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with self._collective():
                if _store().check([key]):
                    return json.loads(_store().get(key))
            time.sleep(_POLL_S)
        raise LostRankError(f"rank {self.rank} waited {timeout:.0f} s for {key}.")

    def delete(self, *keys: str) -> None:
        for key in keys:
            _store().delete_key(key)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Mark this rank as waiting for the others, and turn a failure of gloo or the store into LostRankError."""
        try:
            with HEARTBEAT.waiting():
                yield
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            what = f"rank {self.rank} of {self.size} lost the others ({reason[:200]})."
            raise LostRankError(what, fix="`redline train --resume RUN` continues from the last checkpoint.") from None

    def leave(self) -> None:
        if self.joined:
            import torch.distributed as dist

            dist.destroy_process_group()


SINGLE_PROCESS = Ranks()


def launched_distributed() -> bool:
    """Return whether the environment names a rank and a world size, as torchrun and SLURM's launcher set them."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(device: str, timeout: float) -> Ranks:
    """Join the process group that the environment names; return SINGLE_PROCESS if it names none."""
    if not launched_distributed():
        return SINGLE_PROCESS
    rank, size = (_env_int(name) for name in ("RANK", "WORLD_SIZE"))
    if rank >= size:
        what = f"RANK={rank} is not possible with WORLD_SIZE={size}: ranks count from 0 to WORLD_SIZE - 1."
        raise UsageError(what, where="RANK", fix="Set both as torchrun would, the same WORLD_SIZE for every rank.")
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if size > 1 and not os.environ.get(name)]:
        fix = "Set them as torchrun would, to the address and port at which rank 0 listens."
        raise UsageError(f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}.", fix=fix)
    import torch
    import torch.distributed as dist

    local = _env_int("LOCAL_RANK", 0)
    local_size = _env_int("LOCAL_WORLD_SIZE", size)
    interface = choose_interface(local_size < size if "LOCAL_WORLD_SIZE" in os.environ else None)
    options: dict[str, Any] = {"backend": "gloo", "timeout": timedelta(seconds=timeout + _SUPERVISOR_GRACE_S)}
    if device == "cuda":
        card = _gpu_index(local, rank)
        torch.cuda.set_device(card)
        options |= {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", card)}

    def connect() -> Any:
        if device == "cuda":
            torch.cuda.set_device(card)  # the current device is per thread, and this runs in another one
        dist.init_process_group(rank=rank, world_size=size, store=_agent_store(rank, size, timeout), **options)
        return dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)

    try:
        long_group = _with_timeout(timeout, connect)
    except (RuntimeError, ValueError, TimeoutError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"rank {rank} of {size} could not connect to the others ({reason[:200]})."
        raise LostRankError(what, fix=_connection_advice(str(error), interface)) from None
    # Nodes with different numbers of ranks are planned for as one node.
    nodes = 1 if local_size < 1 or size % local_size else size // local_size
    return Ranks(rank, size, local, nodes, joined=True, long_group=long_group)


def _agent_store(rank: int, size: int, timeout: float) -> dist.Store | None:
    """Return the store of torchrun's agent under a prefix that only these ranks use; None if rank 0 hosts a store.

    The agent's store outlives restarted ranks and keeps their keys. A restarted rank could read the address of a rank
    that has died before the new one has written its own. TORCHELASTIC_RESTART_COUNT cannot be the prefix, because
    every node counts for itself. So rank 0 draws a random name, and the others use the name whose list of members
    includes them.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist

    store_timeout = timedelta(seconds=timeout)
    host, port = os.environ["MASTER_ADDR"], _env_int("MASTER_PORT")
    store = dist.PrefixStore("redline", dist.TCPStore(host, port, size, is_master=False, timeout=store_timeout))
    return dist.PrefixStore(_agreed_name(store, rank, size, time.monotonic() + timeout), store)


def _agreed_name(store: dist.Store, rank: int, size: int, deadline: float) -> str:
    """Return a name that the living ranks of one start agree on.

    Keys of earlier starts may still be in the store, but no list of members there has the `own` name of this process.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("leader", own)
    while time.monotonic() < deadline:
        name = own if rank == 0 else store.get("leader").decode()  # waits until rank 0 has set it
        if rank == 0 and store.check(others := [f"{name}/{other}" for other in range(1, size)]):
            store.set(f"{name}/members", json.dumps([store.get(key).decode() for key in others]))
            return name
        if rank > 0:
            store.set(f"{name}/{rank}", own)
            if store.check([f"{name}/members"]) and own in json.loads(store.get(f"{name}/members")):
                return name
        time.sleep(_POLL_S)
    raise TimeoutError("not all ranks connected to torchrun's store")


def _with_timeout(seconds: float, connect: Callable[[], Any]) -> Any:
    """Return what `connect` returns; raise TimeoutError if it takes longer.

    It runs in a thread because gloo waits five times its own timeout for a rank that has registered but cannot be
    reached, and LONG_TIMEOUT in a group that is created with it. A thread that still waits ends with the process:
    `launch.session.exit_code_of` ends a failed rank with os._exit.
    """
    result: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            result.append(connect())
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=work, name="join", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not result:
        raise TimeoutError(f"waited parallel.timeout={seconds:g} s")
    return result[0]


def _connection_advice(error: str, interface: Interface) -> str:
    master = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if "nccl" in error.lower():
        return f"MASTER_ADDR:MASTER_PORT is {master}; `redline doctor` checks NCCL."
    return (
        f"Every node must reach {master} (MASTER_ADDR:MASTER_PORT) and the address that each rank offers to gloo; "
        f"this rank offers {interface}. Choose another network with {GLOO_INTERFACE}=INTERFACE."
    )


def _gpu_index(local: int, rank: int) -> int:
    """Return the GPU of this rank: its local rank, or 0 if the scheduler shows each process only its own GPU."""
    import torch

    count = torch.cuda.device_count()
    if local >= count > 1:
        what = f"rank {rank} needs GPU number {local}, but this node has {count} GPUs."
        raise UserError(what, where="LOCAL_RANK", fix="Start at most as many processes on a node as it has GPUs.")
    return local if local < count else 0


def _env_int(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{text!r} is not a number.", where=name, fix="torchrun and SLURM's launcher set it to one.")
    return int(text)


def _store() -> dist.Store:
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


# ----------------------------------------------------------------------------------------------------
# The network interface by which gloo reaches the other nodes.
#
# Every gloo process offers the others one address. By default gloo offers the address that the machine's hostname
# resolves to. On many machines /etc/hosts maps the hostname to 127.0.0.1 or 127.0.1.1: every node then offers its own
# loopback address, and no other node can connect to it. `choose_interface` finds the interface that leads to the
# other nodes and sets GLOO_SOCKET_IFNAME before `join` creates the process group.


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFCONF = 0x8912  # Linux: the IPv4 addresses of all interfaces
_IFREQ_BYTES, _MAX_ADDRESSES = 40, 512  # of struct ifreq on 64-bit Linux
_OUTSIDE_ADDRESS = "192.0.2.1"  # reserved for documentation (RFC 5737), so only the default route leads to it
_ANY_PORT = 9  # connecting a UDP socket sends nothing


@dataclass(frozen=True)
class Interface:
    """The interface that gloo offers to the other ranks. A field is None if it is not known."""

    name: str | None
    address: str | None

    def __str__(self) -> str:
        return f"{self.address or 'an unknown address'} ({self.name or 'an unknown interface'})"


def choose_interface(several_nodes: bool | None) -> Interface:
    """Return the interface that gloo will use, and set GLOO_SOCKET_IFNAME if gloo would choose loopback by itself.

    `several_nodes` is None if the environment does not say. GLOO_SOCKET_IFNAME stays as it is if it is set, and a
    hostname that resolves to a real address of this machine counts as the administrator's choice of a network.
    """
    known = addresses()
    if configured := os.environ.get(GLOO_INTERFACE):
        return _check_configured(configured, known)
    own = hostname_address()
    if several_nodes is False or (own is not None and not is_loopback(own)):
        return Interface(known.get(own or ""), own)
    master = os.environ.get("MASTER_ADDR", "")
    if several_nodes is None and (master == "localhost" or is_loopback(master)):
        return Interface(known.get(own or ""), own)
    # MASTER_ADDR leads to the network on which the ranks meet. On the first node MASTER_ADDR is the node's own name,
    # which may resolve to loopback too. There the default route decides, or else the only interface besides loopback.
    candidates = (local_address(master), local_address(_OUTSIDE_ADDRESS))
    address = next((a for a in candidates if a and not is_loopback(a)), None)
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


def _check_configured(text: str, known: dict[str, str]) -> Interface:
    """Check GLOO_SOCKET_IFNAME, which may be a comma-separated list."""
    here = [name for _, name in socket.if_nameindex()]
    names = text.split(",")
    if missing := [name for name in names if name not in here]:
        what = f"there is no network interface {missing[0]!r} on {socket.gethostname()}."
        raise UsageError(what, where=GLOO_INTERFACE, fix=f"Use one of {', '.join(here)}, or unset it.")
    return Interface(text, next((address for address, name in known.items() if name in names), None))


def hostname_address() -> str | None:
    """Return the address that gloo offers by default: the first one of the hostname that belongs to this machine.

    None if there is no such address. gloo then falls back to loopback.
    """
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
                return str(place[0])
    return None


def local_address(host: str) -> str | None:
    """Return this machine's own address on the way to `host`; None if `host` cannot be resolved or reached."""
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
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
    """Map every address of this machine to the name of its interface. Empty on systems other than Linux."""
    if sys.platform != "linux":
        return {}
    buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        filled = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    found = {}
    for start in range(0, filled, _IFREQ_BYTES):
        entry = buffer[start : start + _IFREQ_BYTES].tobytes()
        name = entry[:16].split(b"\0", 1)[0].decode().partition(":")[0]  # eth0:1 is a second address of eth0
        found[socket.inet_ntoa(entry[20:24])] = name
    with suppress(OSError):  # a kernel without IPv6 has no such file
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return found
