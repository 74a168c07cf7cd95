"""Records actions of a process that no foreign file may cause, with an audit hook of the interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

FORBIDDEN = {
    *("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "socket.sendto"),
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class"),
}
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """An audit hook that records actions which no foreign file may cause."""

    def __init__(self, home: Path) -> None:
        self.home, self.seen = str(home.resolve()), list[str]()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN:
            self.seen.append(f"{event} {arguments[:2]!r}"[:300])
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
            self._written(event, arguments[0])
        elif event in WRITES:
            for place in arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]:
                self._written(event, place)

    def _written(self, event: str, place: Any) -> None:
        if isinstance(place, str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(place))
            if not path.startswith((self.home, "/dev/null")):
                self.seen.append(f"{event} {path}")
