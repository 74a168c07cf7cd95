"""An audit hook that records actions which reading an untrusted file must never cause."""

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
    """Records network access, new processes, and writes outside of `home`."""

    def __init__(self, home: Path) -> None:
        self.home, self.seen = str(home.resolve()), list[str]()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN:
            self.seen.append(f"{event} {arguments[:2]!r}"[:300])
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING:
            self._record_write(event, arguments[0])
        elif event in WRITES:
            for path in arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]:
                self._record_write(event, path)

    def _record_write(self, event: str, path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            real = os.path.realpath(os.fsdecode(path))
            if not real.startswith((self.home, "/dev/null")):
                self.seen.append(f"{event} {real}")
