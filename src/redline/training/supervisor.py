"""The supervisor: it watches the processes of a run and restarts them after a failure.

A run that finishes, is asked to stop, or refuses to start with an error message is not restarted. A run that lost a
rank, hangs, ran out of memory or had too many batches that are not finite is resumed from its last checkpoint. The
pause before a restart doubles each time, and the supervisor gives up if the run makes no progress.

The supervisor does not import torch, so that it keeps little memory and starts fast.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE
from redline.hardware.host import process_runs
from redline.training.control import EVERY_S, PREPARING, STACK_SIGNAL, preemption_signals, read_heartbeats

# Environment variables that the supervisor sets for the ranks.
SUPERVISED = "REDLINE_SUPERVISED"  # the process is restarted after a failure
MAX_FAILURES = 5  # in a row from the same checkpoint
MAX_PAUSE_S = 60.0
SLOW_FACTOR = 6  # compiling, evaluating and saving may take this many times as long as a step
GRACE_S = 5.0  # for the remaining ranks to notice that one is lost, and to exit with a message
STACK_S = 2.0  # for a rank to write its stack
FINAL_CODES = (EXIT_DONE, EXIT_USAGE, EXIT_PREEMPTED, EXIT_INTERRUPTED)  # after these the run is not restarted
# Why a rank failed, as in its last heartbeat. An exception's type name stands for any other failure.
REFUSED = "refused"  # an error that a restart would meet again, such as a wrong recipe
LOST = "lost"  # another rank has ended or does not answer
_POLL_S = 0.1
_PAUSE_S = 2.0  # between two polls: this process was stopped


class Attempt(Protocol):
    """The processes of one attempt to train. Their heartbeats are in `folder`."""

    folder: Path

    def poll(self) -> int | None:
        """Return the exit code of the process that started the ranks, or None while it runs."""

    def end(self, pids: Sequence[int]) -> None:
        """Kill all processes of the attempt, `pids` among them."""


@dataclass(frozen=True)
class AttemptResult:
    code: int
    message: str = ""  # empty if the process has printed one itself
    why: str = ""  # of the rank that failed, see REFUSED

    @property
    def recoverable(self) -> bool:
        return self.code not in FINAL_CODES and self.why != REFUSED


class SignalForwarder:
    """Collects the signals that this process receives, to be forwarded to the ranks."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self.code: int | None = None  # the exit code of a run that is asked to stop; None if it is not

    def __enter__(self) -> SignalForwarder:
        numbers = (*preemption_signals(), signal.SIGINT)
        on_main_thread = threading.current_thread() is threading.main_thread()
        self._previous = {number: signal.signal(number, self._handle) for number in numbers} if on_main_thread else {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(number)
        self.code = EXIT_INTERRUPTED if number == signal.SIGINT else self.code or EXIT_PREEMPTED


@dataclass
class Watcher:
    """Watches one attempt until it ends, or ends it if it hangs."""

    attempt: Attempt
    signals: SignalForwarder
    timeout: float  # seconds within which a rank must make progress
    several_nodes: bool = False  # other nodes have supervisors of their own
    lost_at: float | None = None  # when a rank was first found to be gone
    heartbeats: dict[int, dict[str, Any]] = field(default_factory=dict)  # the last one of each rank
    polled_at: float = field(default_factory=time.monotonic)
    awake_since: float = -math.inf

    def run(self) -> AttemptResult:
        try:
            while (code := self.attempt.poll()) is None:
                self.heartbeats |= read_heartbeats(self.attempt.folder)
                self._forward_signals()
                self._note_pause()
                if hung := self._hung_ranks():
                    return self._dump_stacks(hung)
                if self._grace_is_over():
                    break
                time.sleep(_POLL_S)
            self.heartbeats |= read_heartbeats(self.attempt.folder)
            return self._result(code)
        finally:
            self.attempt.end(self._pids())

    def _pids(self) -> list[int]:
        return [int(facts["pid"]) for facts in self.heartbeats.values()]

    def _forward_signals(self) -> None:
        while self.signals.pending:
            number = self.signals.pending.pop(0)
            for pid in self._pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if not self.heartbeats:  # no rank has installed its signal handlers yet
                self.attempt.end([])

    def _note_pause(self) -> None:
        """Note when this process runs again after it was stopped, as by a laptop's sleep or a paused machine.

        The ranks were stopped as well, so their old heartbeats do not mean that they hang.
        """
        now = time.monotonic()
        if now - self.polled_at > _PAUSE_S:
            self.awake_since = now
        self.polled_at = now

    def _hung_ranks(self) -> list[int]:
        """Return the ranks that make no progress and are not waiting for another rank."""
        now, hung = time.monotonic(), []
        for rank, facts in self.heartbeats.items():
            if "code" in facts or not process_runs(facts["pid"]):
                continue
            limit = {"step": self.timeout, PREPARING: math.inf}.get(facts["doing"], SLOW_FACTOR * self.timeout)
            silent = now - max(facts["time"], self.awake_since) > max(self.timeout, 4 * EVERY_S)
            if silent or (now - max(facts["since"], self.awake_since) > limit and not facts["waiting"]):
                hung.append(rank)
        return sorted(hung)

    def _dump_stacks(self, hung: list[int]) -> AttemptResult:
        """Make the hung ranks print their stacks to the log.

        The other ranks are stopped first: otherwise a rank that hung in a collective could continue meanwhile, and
        the run would go on after it was given up. A hung rank may be stopped itself, so it is continued.
        """
        for rank in (*(set(self.heartbeats) - set(hung)), *hung):
            pid = int(self.heartbeats[rank]["pid"])
            with suppress(ProcessLookupError):
                if rank in hung:
                    _signal_main_thread(pid, STACK_SIGNAL)
                    os.kill(pid, signal.SIGCONT)
                else:
                    os.kill(pid, signal.SIGSTOP)
        time.sleep(STACK_S)
        places = [f"rank {rank} in {_activity(self.heartbeats[rank])}" for rank in hung]
        message = f"no progress for {self.timeout:g} s: {', '.join(places)}; the stack is in the log"
        return AttemptResult(EXIT_FAILED, message, "hung")

    def _grace_is_over(self) -> bool:
        """Return whether a rank has been gone for GRACE_S while others are still running."""
        gone = any("code" not in facts and not process_runs(facts["pid"]) for facts in self.heartbeats.values())
        failed = any(facts.get("code", 0) not in FINAL_CODES for facts in self.heartbeats.values())
        if not gone and not failed:
            return False
        self.lost_at = self.lost_at or time.monotonic()
        return time.monotonic() - self.lost_at > GRACE_S

    def _result(self, code: int | None) -> AttemptResult:
        """Return how the attempt ended, by the last heartbeats of its ranks and the exit code of their launcher."""
        ended = {rank: facts for rank, facts in self.heartbeats.items() if "code" in facts}
        leader = min(self.heartbeats, default=0)  # not always rank 0: in a SLURM job each rank has its own supervisor
        if leader in ended and ended[leader]["code"] in FINAL_CODES:
            return AttemptResult(ended[leader]["code"])
        gone = sorted(set(self.heartbeats) - set(ended))
        if gone:
            places = ", ".join(f"rank {rank} in {_activity(self.heartbeats[rank])}" for rank in gone)
            return self._unless_stopped(AttemptResult(EXIT_FAILED, f"lost {places}", LOST))
        # The failure began at another rank than those that report a lost one.
        failed = [facts for facts in ended.values() if facts["code"] not in FINAL_CODES]
        first = next((facts for facts in failed if facts["why"] != LOST), failed[0] if failed else None)
        if first is None and code is not None and code < 0:  # for example by the kernel, for lack of memory
            return self._unless_stopped(AttemptResult(EXIT_FAILED, f"killed by signal {-code} before it began", LOST))
        if first is None and code == EXIT_DONE:  # the run had finished before, so no rank sent a heartbeat
            return AttemptResult(EXIT_DONE)
        if first is None:
            if self.several_nodes:  # torchrun has waited for a node that is not there (yet), or lost its store
                message = f"the nodes did not meet (exit code {code})"
                return self._unless_stopped(AttemptResult(EXIT_FAILED, message, LOST))
            message = f"the processes ended before training started (exit code {code})"
            return self._unless_stopped(AttemptResult(EXIT_FAILED, message, REFUSED))
        if first["rank"] == leader and first["why"] == REFUSED:
            return AttemptResult(EXIT_FAILED, why=REFUSED)  # the rank has printed its error message
        message = f"rank {first['rank']} failed in {_activity(first)} ({first['why']})"
        return self._unless_stopped(AttemptResult(EXIT_FAILED, message, first["why"]))

    def _unless_stopped(self, result: AttemptResult) -> AttemptResult:
        """Return the result, with the exit code of a stop if one was requested while the ranks could not react."""
        return result if self.signals.code is None else AttemptResult(self.signals.code, result.message)


def supervise(
    start: Callable[[str | None], Attempt],
    *,
    timeout: float,
    restart: bool,
    progress: Callable[[], int | None] = lambda: None,
    log: Callable[[str], None] = lambda _: None,
    pause: float = 1.0,
    several_nodes: bool = False,
) -> AttemptResult:
    """Watch a run to its end and, with `restart`, start it again after each failure.

    `start` receives the message of the last failure. `progress` returns the last committed step.
    """
    recovery, failures, reached = None, 0, progress()
    with SignalForwarder() as signals:
        while True:
            result = Watcher(start(recovery), signals, timeout, several_nodes).run()
            if not result.recoverable or not restart:
                if result.message and result.code not in (EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED):
                    log(result.message)
                return result
            step = progress()
            failures, reached = 1 if step != reached else failures + 1, step
            if failures > MAX_FAILURES:
                log(f"{result.message}; giving up after {failures} attempts from the same checkpoint")
                return result
            seconds = min(MAX_PAUSE_S, pause * 2.0 ** (failures - 1))
            origin = "from the beginning" if step is None else f"at step {step}"
            log(f"{result.message}; restarting {origin} in {seconds:g} s")
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and signals.code is None:
                time.sleep(_POLL_S)
            if signals.code is not None:
                return AttemptResult(signals.code)
            recovery = result.message


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process.

    If the process is stopped, a signal to the process as a whole may wake another thread. That thread would print the
    main thread's stack while the main thread is already running again, which cuts the stack off.
    """
    try:
        tgkill = ctypes.CDLL(None).tgkill
    except (AttributeError, OSError):  # not glibc 2.30 or newer
        os.kill(pid, number)
        return
    if tgkill(pid, pid, number):
        raise ProcessLookupError(pid)


def _activity(facts: dict[str, Any]) -> str:
    return str(facts["doing"]) if facts["step"] is None else f"{facts['doing']} ({facts['step']})"
