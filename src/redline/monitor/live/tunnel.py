"""The command that brings the page to one's own machine."""

from __future__ import annotations

import getpass
import ipaddress
import os
import shlex
import socket

from redline.monitor.live.server import is_loopback


def ssh_line(host: str, port: int) -> str:
    """`ssh -N -L …` for who came here by ssh; empty for everybody else, and where the page can be reached anyway."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if not connection or not is_loopback(host):
        return ""
    server, at = connection[2:4] if len(connection) == 4 else ("", "22")
    try:
        here = str(ipaddress.ip_address(server.partition("%")[0]))
    except ValueError:
        here = socket.gethostname()
    target = f"[{host}]" if ":" in host else host
    words = ["ssh", "-N", "-L", f"{port}:{target}:{port}", *([] if at == "22" else ["-p", at]), f"{_user()}@{here}"]
    return shlex.join(words)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in some containers
        return "USER"
