"""Gloo between nodes: the choice of its interface, and errors when the ranks cannot connect."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.errors import EXIT_USAGE, UsageError
from redline.training import distributed as network
from redline.training.distributed import GLOO_INTERFACE, LostRankError, choose_interface, join
from several import Fork, free_port, rank_environment, rank_logs

HOME = {"127.0.0.1": "lo", "10.1.0.7": "eth0", "10.2.0.7": "eth1"}
NEW_MOUNTS, NEW_HOSTNAME, NEW_NETWORK, BIND, PRIVATE = 0x20000, 0x4000000, 0x40000000, 0x1000, 0x44000


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A fake machine with eth0 and eth1: the address of its hostname, and its own address on the way to other hosts."""
    monkeypatch.setenv(GLOO_INTERFACE, "")  # so that what `choose_interface` sets is taken back

    def make(own: str | None, routes: dict[str, str], known: dict[str, str] = HOME, master: str = "node0") -> None:
        monkeypatch.setattr(network, "hostname_address", lambda: own)
        monkeypatch.setattr(network, "local_address", routes.get)
        monkeypatch.setattr(network, "addresses", lambda: known)
        monkeypatch.setenv("MASTER_ADDR", master)

    return make


@pytest.mark.parametrize(
    ("own", "routes", "several", "chosen"),
    [
        ("127.0.1.1", {"node0": "10.2.0.7", "192.0.2.1": "10.1.0.7"}, True, "eth1"),
        ("127.0.1.1", {"node0": "10.2.0.7"}, None, "eth1"),
        (None, {"node0": "10.2.0.7"}, True, "eth1"),
        ("127.0.1.1", {"node0": "127.0.1.1", "192.0.2.1": "10.1.0.7"}, True, "eth0"),  # the first node, by its name
        ("10.1.0.7", {"node0": "10.2.0.7"}, True, ""),  # the hostname is the administrator's choice
        ("127.0.1.1", {"node0": "10.2.0.7"}, False, ""),  # one node
    ],
)
def test_the_interface_to_the_other_nodes_is_chosen(
    host: Any, own: str | None, routes: dict[str, str], several: bool | None, chosen: str
) -> None:
    host(own, routes)
    interface = choose_interface(several)
    assert os.environ[GLOO_INTERFACE] == chosen
    assert interface.address == {"eth0": "10.1.0.7", "eth1": "10.2.0.7"}.get(chosen, own)


def test_without_a_route_only_a_single_interface_is_chosen(host: Any) -> None:
    host("127.0.1.1", {}, {"127.0.0.1": "lo", "10.2.0.7": "eth1"})
    assert choose_interface(True).name == "eth1"
    os.environ[GLOO_INTERFACE] = ""
    host("127.0.1.1", {})
    with pytest.raises(UsageError) as refused:
        choose_interface(True)
    assert all(word in str(refused.value) for word in (GLOO_INTERFACE, "eth0 (10.1.0.7)", "eth1 (10.2.0.7)"))


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "::1"])
def test_ranks_on_loopback_keep_loopback(host: Any, master: str) -> None:
    host("127.0.1.1", {"192.0.2.1": "10.1.0.7"}, master=master)
    choose_interface(None)
    assert os.environ[GLOO_INTERFACE] == ""


def test_a_missing_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_INTERFACE, "lo")
    assert choose_interface(True).name == "lo"
    monkeypatch.setenv(GLOO_INTERFACE, "nowhere7")
    with pytest.raises(UsageError, match="nowhere7"):
        choose_interface(True)


def test_the_addresses_of_this_machine() -> None:
    assert network.addresses()["127.0.0.1"] == "lo"
    assert network.local_address("127.0.0.1") == "127.0.0.1"
    assert network.local_address("no such host") is None


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (3, 2), (0, 0)])
def test_a_rank_beyond_the_world_is_refused(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    for name, value in rank_environment(rank, size, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as refused:
        join("cpu", 5.0)
    assert refused.value.exit_code == EXIT_USAGE
    assert refused.value.where == "RANK"


def test_no_rank_waits_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo waits five times its own timeout for a rank that has registered and cannot be reached."""
    for name, value in rank_environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(GLOO_INTERFACE, "lo")
    over = threading.Event()
    monkeypatch.setattr("torch.distributed.init_process_group", lambda **_: over.wait(30))
    monkeypatch.setattr("torch.distributed.new_group", lambda **_: None)
    begin = time.monotonic()
    with pytest.raises(LostRankError) as lost:
        join("cpu", 0.2)
    over.set()
    assert time.monotonic() - begin < 10
    assert all(word in str(lost.value) for word in ("127.0.0.1 (lo)", GLOO_INTERFACE, os.environ["MASTER_PORT"]))
    assert "NCCL" not in str(lost.value)


class Hosts:
    """Two machines: network namespaces with their own hostname and /etc/hosts, connected by a virtual cable."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.forks = folder, list[Fork]()

    def run(self, action: Callable[[], int | None], **more: str) -> list[int]:
        port = free_port()
        for rank in range(2):
            numbers = rank_environment(rank, 2, port) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environment = {**numbers, "MASTER_ADDR": "10.77.0.1", GLOO_INTERFACE: "", **more}
            self.forks.append(
                Fork(lambda r=rank: self._machine(r, action), environment, self.folder / f"rank-{rank}.log")
            )
        self._wait_for(lambda: all((self.folder / f"apart-{rank}").exists() for rank in range(2)))
        first, second = (str(fork.pid) for fork in self.forks)
        ip("link", "add", "cable0", "netns", first, "type", "veth", "peer", "name", "cable1", "netns", second)
        (self.folder / "joined").touch()
        self._wait_for(lambda: all(fork.poll() is not None for fork in self.forks))
        return [int(fork.code or 0) for fork in self.forks]

    def _wait_for(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, rank_logs(self.folder, range(2))
            time.sleep(0.01)

    def _machine(self, rank: int, action: Callable[[], int | None]) -> int | None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(NEW_MOUNTS | NEW_HOSTNAME | NEW_NETWORK) == 0
        socket.sethostname(f"host{rank}")
        hosts = self.folder / f"hosts-{rank}"
        hosts.write_text(f"127.0.0.1 localhost host{rank}\n")
        assert libc.mount(b"none", b"/", None, PRIVATE, None) == 0
        assert libc.mount(bytes(hosts), b"/etc/hosts", None, BIND, None) == 0
        (self.folder / f"apart-{rank}").touch()
        self._wait_for((self.folder / "joined").exists)
        ip("link", "set", "lo", "up")
        ip("addr", "add", f"10.77.0.{rank + 1}/24", "dev", f"cable{rank}")
        ip("link", "set", f"cable{rank}", "up")
        self._wait_for(lambda: network.local_address("10.77.0.1") is not None)
        return action()


def ip(*words: str) -> None:
    subprocess.run([shutil.which("ip") or "/sbin/ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Any:
    if not (shutil.which("ip") or Path("/sbin/ip").exists()):
        pytest.skip("there is no `ip` here: apt-get install iproute2")
    tried = subprocess.run(["unshare", "--mount", "--uts", "--net", "ip", "link"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no network namespaces here ({tried.stderr.strip()}); they need root")
    made = Hosts(tmp_path)
    yield made
    for fork in made.forks:
        fork.end()


def test_hosts_whose_names_resolve_to_loopback_find_each_other(hosts: Hosts) -> None:
    def meet() -> int:
        ranks = join("cpu", 20.0)
        assert os.environ[GLOO_INTERFACE] == f"cable{ranks.rank}"
        assert ranks.sum(1.0) == [2.0]
        ranks.barrier()
        return 0

    assert hosts.run(meet) == [0, 0], rank_logs(hosts.folder, range(2))


def test_unreachable_hosts_are_reported_within_the_timeout(hosts: Hosts) -> None:
    def fail() -> int:
        begin = time.monotonic()
        with pytest.raises(LostRankError) as lost:
            join("cpu", 2.0)
        assert time.monotonic() - begin < 9, "gloo alone waits 35 s"
        assert "127.0.0.1 (lo)" in str(lost.value)
        return 3

    assert hosts.run(fail, **{GLOO_INTERFACE: "lo"}) == [3, 3], rank_logs(hosts.folder, range(2))


class Agent:
    """torchrun's store, which outlives restarted ranks, and those ranks."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed import TCPStore

        self.folder = folder
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, rank: int, restart: int, late: float = 0.0) -> Fork:
        def meet() -> int:
            time.sleep(late)
            ranks = join("cpu", 20.0)
            assert ranks.sum(1.0) == [2.0]
            ranks.barrier()
            return 0

        shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(restart)}
        environment = {**rank_environment(rank, 2, self.store.port), **shared}
        return Fork(meet, environment, self.folder / f"rank-{rank}.log")

    def wait(self, *forks: Fork) -> None:
        deadline = time.monotonic() + 60
        while any(fork.poll() is None for fork in forks) and time.monotonic() < deadline:
            time.sleep(0.01)
        for fork in forks:
            fork.end()
        assert [fork.code for fork in forks] == [0] * len(forks), rank_logs(self.folder, range(2))


def test_restarted_ranks_ignore_keys_of_dead_ranks_in_the_agents_store(tmp_path: Path) -> None:
    """First rank 1 is late, so that rank 0 finds the address of its predecessor; then rank 0 is late."""
    agent = Agent(tmp_path)
    agent.wait(agent.start(0, 0), agent.start(1, 0))
    agent.wait(agent.start(0, 1), agent.start(1, 1, late=1.0))
    agent.wait(agent.start(0, 2, late=1.0), agent.start(1, 2))


def test_nodes_with_different_restart_counts_meet(tmp_path: Path) -> None:
    """Each torchrun agent counts restarts itself. Here rank 0 was restarted once more than rank 1."""
    agent = Agent(tmp_path)
    agent.wait(agent.start(0, 0), agent.start(1, 0))
    before = agent.store.get("redline/leader")
    dead = agent.start(0, 1)
    deadline = time.monotonic() + 60
    while agent.store.get("redline/leader") == before and time.monotonic() < deadline:
        time.sleep(0.01)
    dead.end()
    waiting = agent.start(1, 1)
    agent.wait(agent.start(0, 2, late=0.5), waiting)
