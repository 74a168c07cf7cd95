"""SLURM on the loopback interface: one node with two CPUs and two partitions; `urgent` preempts `batch`."""

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
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until the credentials of its first start have expired: 120 s by default, at least 5 s.
AuthInfo=socket={home}/munge,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
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
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""
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
    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: the path of a socket has 107 characters
        self.environment = {**os.environ, "SLURM_CONF": str(self.home / "slurm.conf")}
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        for folder in ("state", "spool"):
            (self.home / folder).mkdir()
        host = socket.gethostname().split(".")[0]
        ports = {"controller_port": free_port(), "node_port": free_port()}
        (self.home / "slurm.conf").write_text(SETTINGS.format(home=self.home, host=host, **ports))
        key = self.home / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        try:
            names = {"key-file": key, "socket": self.home / "munge", "pid-file": self.home / "munged.pid"}
            files = [f"--{name}={path}" for name, path in {**names, "seed-file": self.home / "seed"}.items()]
            self._start("munged", "--foreground", "--force", *files)
            until((self.home / "munge").exists, 20, self._logs)
            self._start("slurmctld", "-D", "-c")
            self._start("slurmd", "-D")
            until(lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%T"), 60, self._logs)
        except BaseException:
            self.__exit__()
            raise
        return self

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

    def _start(self, name: str, *options: str) -> None:
        command = shutil.which(name, path=ADMIN_PATH)
        assert command is not None
        with open(self.home / f"{name}.log", "wb") as log:
            self._started.append(subprocess.Popen([command, *options], env=self.environment, stdout=log, stderr=log))

    def _logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.home.glob("*.log")))

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)
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
