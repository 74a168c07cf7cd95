"""How a training process is watched and controlled from outside: heartbeats, stop requests, and its run directory.

A heartbeat says what each rank is doing. A run is asked to stop by a signal, by the deadline of a scheduled job, or by
`redline stop`, which leaves a file in the run directory; it also stops if that directory is moved away.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import math
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from redline.cache import make_folder, open_regular
from redline.errors import EXIT_INTERRUPTED, UserError
from redline.hardware.host import process_exists
from redline.vocabulary import CHECKPOINTS_FOLDER, PROCESS_LOCK_FILE, STOP_REQUEST_FILE, StopReason

# ----------------------------------------------------------------------------------------------------
# Heartbeats: each rank writes twice a second what it is doing, for a supervisor that watches for hanging ranks.
#
# Each rank overwrites one small file in place, so a heartbeat needs no free disk space. With a new file per heartbeat,
# a full temporary folder would silence healthy ranks and the supervisor would kill them.
#
# The supervisor asks for a rank's stack by a signal. The handler is C code of faulthandler, so it also works while the
# process hangs inside a library and runs no Python code.


# Environment variables that the supervisor sets for the ranks.
FOLDER_VARIABLE = "REDLINE_PULSE"  # the folder of the heartbeat files
RECOVERY = "REDLINE_RECOVERY"  # why the process before it failed, for the log of the run
PARENT_VARIABLE = "REDLINE_PARENT"  # the supervisor's process id: ranks stop if it has ended
EVERY_S = 0.5
_FILE_BYTES = 1024  # every write has this size, so that no heartbeat needs a new disk block
_FINAL_TRIES = 20
STACK_SIGNAL = signal.SIGUSR2
STARTING, PREPARING = "starting", "preparing data"  # how long preparing takes depends on the data


class Heartbeat:
    """The heartbeat of this process (`HEARTBEAT`). It writes nothing unless FOLDER_VARIABLE is set."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: int | None = None
        self._facts: dict[str, Any] = {"doing": STARTING, "step": None, "waiting": False, "since": time.monotonic()}
        self._lock = threading.Lock()

    def start(self, rank: int) -> None:
        """Start the thread that writes, once the rank is known."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is None or self._path is not None:
            return
        faulthandler.register(STACK_SIGNAL, file=2, all_threads=True, chain=False)
        self._path = Path(folder) / f"rank-{rank}.json"
        self._facts |= {"pid": os.getpid(), "rank": rank, "doing": STARTING, "step": None, "since": time.monotonic()}
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def at(self, doing: str, step: int | None = None) -> None:
        """Set what the rank is doing now."""
        with self._lock:
            self._facts |= {"doing": doing, "step": step, "since": time.monotonic()}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this rank as waiting for other ranks: then it is not the one that hangs.

        Only the main thread counts. A background thread may wait while the main thread hangs.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._facts["waiting"] = True
        try:
            yield
        finally:
            self._facts["waiting"] = False

    def end(self, code: int, why: str) -> None:
        """Record the exit code and the reason, for the supervisor that decides what to do next."""
        with self._lock:
            self._facts |= {"code": code, "why": why}
        for _ in range(_FINAL_TRIES):  # no later heartbeat will repeat this one if it fails
            if self._write():
                return
            time.sleep(EVERY_S / 10)

    def _beat(self) -> None:
        parent = int(os.environ.get(PARENT_VARIABLE, 0))
        while "code" not in self._facts:
            self._write()
            if parent and not process_exists(parent):
                parent = 0
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(EVERY_S)

    def _write(self) -> bool:
        """Overwrite the file. Return False if it failed and the next heartbeat should try again."""
        with self._lock:
            if self._path is None:
                return True
            text = json.dumps({**self._facts, "time": time.monotonic()})
            try:
                if self._file is None:
                    self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                os.pwrite(self._file, text.encode().ljust(_FILE_BYTES), 0)
            except (FileNotFoundError, NotADirectoryError):
                self._path = None  # the supervisor has ended and removed its folder
            except OSError:
                return False  # a full disk or an unreachable network file system: both can pass
            return True


HEARTBEAT = Heartbeat()


def read_heartbeats(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the last heartbeat of each rank. A file that is being written at this moment may be missing."""
    heartbeats = {}
    for path in folder.glob("rank-*.json"):
        try:
            facts = json.loads(path.read_text())
            heartbeats[int(facts["rank"])] = facts
        except (OSError, ValueError, KeyError):
            continue
    return heartbeats


# ----------------------------------------------------------------------------------------------------
# Signals, which the training loop answers between steps.


_SHOW_CURSOR = "\x1b[?25h"  # the progress bar hides the cursor, and `os._exit` runs no cleanup that shows it again


def preemption_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that preempt a run: from a scheduler, or (except under `nohup`) from a closed terminal."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGUSR1, *hangup)


class StopRequested(Exception):  # noqa: N818 - a request, not an error
    """Raised by a signal during long work that can be abandoned (compiling, preparing data)."""


class Signals:
    """Handles signals while a run trains.

    SIGTERM, SIGUSR1 and SIGHUP mean "preempted". The first Ctrl-C means "interrupted"; the second exits at once, or
    raises KeyboardInterrupt if the process is a Python program that has more to do (`exits=False`).
    """

    def __init__(self, *, exits: bool = True) -> None:
        self.reason: StopReason | None = None
        self.exits = exits
        self._abandon = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (*preemption_signals(), signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.reason is StopReason.INTERRUPTED and not self.exits:
                raise KeyboardInterrupt
            if self.reason is StopReason.INTERRUPTED:
                _write_stderr(f"{_SHOW_CURSOR if os.isatty(2) else ''}exiting at once; saved checkpoints stay valid")
                os._exit(EXIT_INTERRUPTED)
            _write_stderr("finishing this step, saving and writing the report; press Ctrl-C again to exit at once")
        self.reason = StopReason.INTERRUPTED if number == signal.SIGINT else self.reason or StopReason.PREEMPTED
        if self._abandon:
            self._abandon = False  # raise only once: a second signal must not interrupt the cleanup after the first
            raise StopRequested

    def request_stop(self) -> None:
        """Stop the run after this step, as `redline stop` does."""
        self.reason = self.reason or StopReason.REQUESTED

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Return a context in which a signal raises StopRequested at once."""
        self._abandon = True
        try:
            if self.reason:
                raise StopRequested
            yield
        finally:
            self._abandon = False


def _write_stderr(text: str) -> None:
    """Write directly to the file descriptor.

    The signal may have arrived during a write to sys.stderr, and a second write in its handler would raise.
    """
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


# ----------------------------------------------------------------------------------------------------
# The deadline: when the scheduler ends the job, in unix seconds. The script of `redline launch` sets it.
#
# Unlike `train.hours` it does not end the schedule: the run continues in the next job.


DEADLINE = "REDLINE_DEADLINE"


class Deadline:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.end = _parse_deadline(os.environ.get(DEADLINE, ""))

    def within(self, seconds: float) -> bool:
        """Return whether the deadline is less than `seconds` away."""
        return self.clock() + seconds >= self.end


def _parse_deadline(text: str) -> float:
    if not text:
        return math.inf
    try:
        end = float(text)
    except ValueError:
        end = math.nan
    if math.isnan(end):
        fix = "Unset it, or set it to unix seconds, for example $(($(date +%s) + 3600))."
        raise UserError(f"{text!r} is not a time in unix seconds.", where=DEADLINE, fix=fix)
    return end


# ----------------------------------------------------------------------------------------------------
# The run directory: its lock, requests to stop, and where it is if it was moved.


NOT_WRITABLE_FIX = "Make it writable, or start a new run elsewhere with --run."
# `redline runs` and others hold the lock shared for an instant to see whether a run is alive. Retry as often, as long.
_LOCK_TRIES, _LOCK_PAUSE_S = 6, 0.05
_STOP_CHECK_EVERY_S = 1.0
_LONGEST_PATH = 1024  # bytes that macOS writes for F_GETPATH (MAXPATHLEN)


def open_no_follow(path: str, flags: int) -> int:
    """Open a regular file, but refuse a symbolic link: it could overwrite a file outside of the run."""
    return open_regular(path, flags | os.O_NOFOLLOW)


class RunDirectory:
    """Holds the lock of the directory while the run is alive. The kernel releases it however the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None
        self._folder: int | None = None  # open while the lock is held, to find the directory if it is moved
        self._checked = float("-inf")  # time of the last check of `stop_reason`

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS_FOLDER

    def stop_reason(self) -> StopReason | None:
        """Return MOVED if the directory was moved or removed, REQUESTED after `redline stop`, else None.

        Checks at most once a second, because the directory may be on a network file system.
        """
        now = time.monotonic()
        if now - self._checked < _STOP_CHECK_EVERY_S:
            return None
        self._checked = now
        if self.moved():
            return StopReason.MOVED
        return StopReason.REQUESTED if self.stop_requested() else None

    def moved(self) -> bool:
        """Return whether the directory that this process has locked is no longer at its path."""
        return self._folder is not None and not _is_at(self.path, self._folder)

    def follow(self) -> bool:
        """Set `path` to where the directory was moved. Return False if it was removed or cannot be found."""
        if self._folder is None:
            return False
        try:
            now = _path_of(self._folder)
        except OSError:
            return False
        if not _is_at(now, self._folder):
            return False
        self.path = now.relative_to(Path.cwd()) if now.is_relative_to(Path.cwd()) else now
        return True

    def stop_requested(self) -> bool:
        """Return whether `redline stop` was called, and delete its request."""
        path = self.path / STOP_REQUEST_FILE
        requested = path.exists()
        path.unlink(missing_ok=True)
        return requested

    def __enter__(self) -> RunDirectory:
        try:
            make_folder(self.path)
            self._file = open(self.path / PROCESS_LOCK_FILE, "a+", encoding="utf-8", opener=open_no_follow)
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            what = f"cannot be written ({error.strerror})."
            raise UserError(what, where=str(self.path), fix=NOT_WRITABLE_FIX) from None
        if not self._lock(self._file):
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._release()
            fix = f"Wait for it, or ask it to stop: redline stop {shlex.quote(str(self.path))}"
            raise UserError(f"a run is using this directory ({holder}).", where=str(self.path), fix=fix)
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        self._file.flush()
        # A request from before this start was for a process that has ended. After a restart by the supervisor it still
        # counts, because for the user it is the same run.
        if RECOVERY not in os.environ:
            (self.path / STOP_REQUEST_FILE).unlink(missing_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)  # the file names the process that holds the lock
                if kind is None:  # a request that came after the last check must not stop the next start
                    (self.path / STOP_REQUEST_FILE).unlink(missing_ok=True)
        self._release()

    def _lock(self, file: IO[str]) -> bool:
        """Take the lock; return False if another process keeps it."""
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE_S)
            except OSError as error:
                self._release()
                fix = "Start a new run on another file system with --run, or move this one."
                what = f"its file system does not support file locks ({error.strerror})."
                raise UserError(what, where=str(self.path), fix=fix) from None
        return False

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def _path_of(folder: int) -> Path:
    """Return where an open directory is now."""
    if (get_path := getattr(fcntl, "F_GETPATH", None)) is not None:  # macOS, which has no /proc
        return Path(os.fsdecode(fcntl.fcntl(folder, get_path, bytes(_LONGEST_PATH)).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{folder}").readlink()


def _is_at(path: Path, folder: int) -> bool:
    """Return whether `path` is the open directory.

    An error other than "not found" does not mean that it was moved: a network file system may be unreachable.
    """
    try:
        return os.path.samestat(path.stat(), os.fstat(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
