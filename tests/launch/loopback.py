"""SLURM on this machine: one node with two CPUs on the loopback interface, or two nodes with one CPU each.

There are two partitions; `urgent` preempts `batch`. Two nodes are two machines of `hosts`, because Debian builds slurmd
without the option to run several on one machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

SETTINGS = """
ClusterName=loopback
SlurmctldHost={host}({address})
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmdTimeout={patience}
KillWait={kill_wait}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until the credentials of its first start have expired: 120 s by default, at least 5 s.
AuthInfo=socket={home}/munge,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
{nodes}
PartitionName=batch Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""
ONE_NODE = "NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN"
TWO_NODES = "\n".join(f"NodeName=host{n} NodeAddr=10.78.0.{n + 1} CPUs=1 State=UNKNOWN" for n in range(2))
ADMIN_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"  # where Debian has the daemons


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def until(condition: Callable[[], Any], seconds: float, describe: Callable[[], str]) -> Any:
    """Wait until the condition returns a true value, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := condition():
            return answer
        time.sleep(0.1)
    raise AssertionError(f"after {seconds:.0f} s: {describe()}")


class Slurm:
    def __init__(self, hosts: Any = None, patience: int = 300) -> None:
        """`patience` is the number of seconds after which the controller gives up a node that does not answer."""
        self.hosts, self.patience = [] if hosts is None else hosts.hosts, patience
        self.home = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket has 107 characters
        self.environment = {**os.environ, "SLURM_CONF": str(self.home / "slurm.conf")}
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        names = [f"host{number}" for number in range(len(self.hosts))] or ["localhost"]
        for folder in ("state", *(f"spool-{name}" for name in names)):
            (self.home / folder).mkdir()
        host = socket.gethostname().split(".")[0]
        place = {"host": "host0", "address": "10.78.0.1"} if self.hosts else {"host": host, "address": "127.0.0.1"}
        facts = {**place, "home": self.home, "nodes": TWO_NODES if self.hosts else ONE_NODE.format(host=host)}
        ports = {"controller_port": free_port(), "node_port": free_port()}
        (self.home / "slurm.conf").write_text(
            SETTINGS.format(**facts, **ports, patience=self.patience, kill_wait=30 if not self.hosts else 5)
        )
        key = self.home / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        try:
            paths = {"key-file": key, "socket": self.home / "munge", "pid-file": self.home / "munged.pid"}
            files = [f"--{name}={path}" for name, path in {**paths, "seed-file": self.home / "seed"}.items()]
            self._start("munged", "--foreground", "--force", *files)
            until((self.home / "munge").exists, 20, self._logs)
            self._start("slurmctld", "-D", "-c")
            for number in range(len(names)):
                self.start_node(number)
            until(lambda: self.states() == dict.fromkeys(names, "idle"), 60, self._logs)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start_node(self, number: int) -> None:
        self._start("slurmd", "-D", host=number)

    def states(self) -> dict[str, str]:
        """Return the state of each node; `*` at its end means that it does not answer."""
        lines = self.ask("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def __exit__(self, *_: object) -> None:
        if len(self._started) > 1:
            self.ask("scancel", "--user=root", "--quiet")
            end = time.monotonic() + 10
            while self.ask("squeue", "--noheader").strip() and time.monotonic() < end:
                time.sleep(0.1)
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        self._end_orphans()
        shutil.rmtree(self.home, ignore_errors=True)

    def _end_orphans(self) -> None:
        """Kill job steps of cancelled jobs, which would keep trying to reach the controller that has ended."""
        ours = f"SLURM_CONF={self.home / 'slurm.conf'}".encode()
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and ours in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)

    def _start(self, name: str, *options: str, host: int = 0) -> None:
        command = shutil.which(name, path=ADMIN_PATH)
        assert command is not None
        with open(self.home / f"{name}-{host}.log", "ab") as log:
            words = self.command(command, *options, host=host)
            self._started.append(subprocess.Popen(words, env=self.environment, stdout=log, stderr=log))

    def command(self, *words: str, host: int = 0, folder: Path | None = None) -> list[str]:
        """Return the command as it is typed on a node."""
        return list(self.hosts[host].command(*words, folder=folder) if self.hosts else words)

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.home.glob("*.log")))

    def ask(self, *command: str) -> str:
        done = subprocess.run(self.command(*command), env=self.environment, capture_output=True, text=True, timeout=30)
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the output of `scontrol show job`."""
        words = self.ask("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def await_end(self, number: str, seconds: float, log: Path) -> dict[str, str]:
        def ended() -> dict[str, str] | None:
            facts = self.job(number)
            running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SIGNALING", "STAGE_OUT")
            return None if facts.get("JobState") in running else facts

        def describe() -> str:
            return f"{self.job(number)}\n{log.read_text() if log.exists() else 'no log'}"

        return dict(until(ended, seconds, describe))
