"""Machines that can be lost: network namespaces with their own hostname and /etc/hosts, joined by a virtual cable."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# Waits until its place has a cable. `exec` keeps the process that owns the namespaces.
HOLD = """
set -e
mount --make-rprivate /
mount --bind "$1" /etc/hosts
hostname "$2"
ip link set lo up
touch "$3"
exec sleep infinity
"""


def why_no_hosts() -> str | None:
    """Return why this machine cannot have namespaces, or None if it can."""
    if not shutil.which("ip", path=PATHS):
        return "there is no `ip` here: apt-get install iproute2"
    tried = subprocess.run(["unshare", "--mount", "--uts", "--net", "true"], capture_output=True, text=True)
    return f"no network namespaces here ({tried.stderr.strip()}); they need root" if tried.returncode else None


PATHS = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class Host:
    """One machine. Its address is 10.78.0.(number + 1), its name hostN."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.started = number, list[subprocess.Popen[bytes]]()
        names = folder / f"hosts-{number}"
        # As on Debian, the own name means loopback. The other's is known to every machine.
        own = [f"127.0.0.1 localhost host{number}", *(f"10.78.0.{n + 1} host{n}" for n in range(2) if n != number)]
        names.write_text("\n".join(own) + "\n")
        ready = folder / f"ready-{number}"
        command = ["unshare", "--mount", "--uts", "--net", "bash", "-c", HOLD, "hold", str(names)]
        self.holder = subprocess.Popen([*command, f"host{number}", str(ready)], env=environment())
        while not ready.exists():
            assert self.holder.poll() is None, "the namespaces could not be made"

    def command(self, *words: str, folder: Path | None = None) -> list[str]:
        place = [f"--target={self.holder.pid}", "--mount", "--uts", "--net", f"--wd={folder or Path.cwd()}"]
        return ["nsenter", *place, *words]

    def ip(self, *words: str) -> None:
        subprocess.run(self.command("ip", *words), env=environment(), check=True, capture_output=True)

    def start(self, words: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        with open(log, "ab") as file:
            process = subprocess.Popen(self.command(*words), env=environment(variables), stdout=file, stderr=file)
        self.started.append(process)
        return process

    def pids(self) -> list[int]:
        """Return every process on this machine, but the one that holds it."""
        own, found = (Path(f"/proc/{self.holder.pid}/ns/net")).stat().st_ino, []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (folder / "ns/net").stat().st_ino == own and int(folder.name) != self.holder.pid:
                    found.append(int(folder.name))
        return found

    def lose(self) -> None:
        """Cut the cable and then end everything: the other machine gets no sign of it."""
        self.ip("link", "set", f"cable{self.number}", "down")
        self.kill()

    def kill(self) -> None:
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self.started:
                process.poll()

    def repair(self) -> None:
        self.ip("link", "set", f"cable{self.number}", "up")

    def end(self) -> None:
        self.kill()
        self.holder.kill()
        self.holder.wait()
        for process in self.started:
            process.wait()


class TwoHosts:
    def __init__(self, folder: Path) -> None:
        self.hosts = [Host(number, folder) for number in range(2)]
        first, second = (str(host.holder.pid) for host in self.hosts)
        cable = ["ip", "link", "add", "cable0", "netns", first, "type", "veth", "peer", "name", "cable1"]
        subprocess.run([*cable, "netns", second], env=environment(), check=True, capture_output=True)
        for host in self.hosts:
            host.ip("addr", "add", f"10.78.0.{host.number + 1}/24", "dev", f"cable{host.number}")
            host.repair()

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.end()


def environment(more: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {**os.environ, "PATH": PATHS, **(more or {})}
