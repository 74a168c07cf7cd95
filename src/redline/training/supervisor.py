"""Watching the processes of a run, and beginning again where they were stopped. Without torch: it outlives them.

A run that ends by itself, is asked to leave, or is refused with a sentence, has ended. One that lost a rank, hangs, ran
out of memory or met a storm of batches that are not finite is resumed from its last checkpoint, after a pause that
doubles, unless it gets no further.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE
from redline.training.heartbeat import EVERY_S, PREPARING, STACK, read_heartbeats
from redline.training.signals import preemption_signals

SUPERVISED = "REDLINE_SUPERVISED"  # set for a process that someone will begin again
RECOVERY = "REDLINE_RECOVERY"  # and why it was, for its log
MOST_WITHOUT_PROGRESS = 5
LONGEST_PAUSE_S = 60.0
SLOW = 6  # what is no step (compiling, evaluating, saving) may take so many times as long
GRACE_S = 5.0  # for ranks that have lost another one, to say so and leave
STACK_S = 2.0  # for a stack to be written
FINAL = (EXIT_DONE, EXIT_USAGE, EXIT_PREEMPTED, EXIT_INTERRUPTED)
REFUSED = "refused"
_LOOK_EVERY_S = 0.1


class Attempt(Protocol):
    """The processes of one attempt; their pulses are in `folder`."""

    folder: Path

    def poll(self) -> int | None:
        """The exit code of whatever started them; None while they run."""

    def end(self, pids: Sequence[int]) -> None:
        """All of them, at once."""


@dataclass(frozen=True)
class AttemptResult:
    code: int
    what: str = ""  # in words; empty where it has said so itself
    why: str = ""  # as the rank that failed put it

    @property
    def recoverable(self) -> bool:
        return self.code not in FINAL and self.why != REFUSED


class SignalForwarder:
    """Signals that came to this process; they are passed on to the ranks."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self.code: int | None = None

    def __enter__(self) -> SignalForwarder:
        numbers = (*preemption_signals(), signal.SIGINT)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(number)
        self.code = EXIT_INTERRUPTED if number == signal.SIGINT else self.code or EXIT_PREEMPTED


@dataclass
class Watcher:
    """Over one attempt."""

    job: Attempt
    asked: SignalForwarder
    timeout: float  # seconds in which a rank must move
    lost_at: float | None = None
    seen: dict[int, dict[str, Any]] = field(default_factory=dict)

    def run(self) -> AttemptResult:
        try:
            while (code := self.job.poll()) is None:
                self.seen |= read_heartbeats(self.job.folder)
                self._pass_on()
                if hung := self._hung():
                    return self._show(hung)
                if self._abandoned():
                    break
                time.sleep(_LOOK_EVERY_S)
            self.seen |= read_heartbeats(self.job.folder)
            return self._ending(code)
        finally:
            self.job.end(self._pids())

    def _pids(self) -> list[int]:
        return [int(facts["pid"]) for facts in self.seen.values()]

    def _pass_on(self) -> None:
        while self.asked.pending:
            number = self.asked.pending.pop(0)
            for pid in self._pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if not self.seen:  # nobody listens yet
                self.job.end([])

    def _hung(self) -> list[int]:
        """Ranks that do not move, and do not wait for another one either."""
        now, found = time.monotonic(), []
        for rank, facts in self.seen.items():
            if "code" in facts or not _alive(facts["pid"]):
                continue
            limit = {"step": self.timeout, PREPARING: math.inf}.get(facts["doing"], SLOW * self.timeout)
            silent = now - facts["time"] > max(self.timeout, 4 * EVERY_S)
            if silent or (now - facts["since"] > limit and not facts["waiting"]):
                found.append(rank)
        return sorted(found)

    def _show(self, hung: list[int]) -> AttemptResult:
        """Each is made to print its stack, if it has to be woken for that; then all are ended. The others are held
        meanwhile: nothing goes on that was given up."""
        for rank in (*(set(self.seen) - set(hung)), *hung):
            pid = int(self.seen[rank]["pid"])
            with suppress(ProcessLookupError):
                if rank in hung:
                    _signal_main_thread(pid, STACK)
                    os.kill(pid, signal.SIGCONT)
                else:
                    os.kill(pid, signal.SIGSTOP)
        time.sleep(STACK_S)
        places = [f"rank {rank} in {_place(self.seen[rank])}" for rank in hung]
        what = f"nothing moved for {self.timeout:g} s: {', '.join(places)}; the stack is in the log"
        return AttemptResult(EXIT_FAILED, what, "hung")

    def _abandoned(self) -> bool:
        """Whether a rank is gone, and those that are left do not leave by themselves."""
        gone = any("code" not in facts and not _alive(facts["pid"]) for facts in self.seen.values())
        failed = any(facts.get("code", 0) not in FINAL for facts in self.seen.values())
        if not gone and not failed:
            return False
        self.lost_at = self.lost_at or time.monotonic()
        return time.monotonic() - self.lost_at > GRACE_S

    def _ending(self, code: int | None) -> AttemptResult:
        said = {rank: facts for rank, facts in self.seen.items() if "code" in facts}
        leader = min(self.seen, default=0)  # whoever watches one rank of a SLURM job sees no other
        if leader in said and said[leader]["code"] in FINAL:
            return AttemptResult(said[leader]["code"])
        gone = sorted(set(self.seen) - set(said))
        if gone:
            last = ", ".join(f"rank {rank} in {_place(self.seen[rank])}" for rank in gone)
            return self._or_asked(AttemptResult(EXIT_FAILED, f"lost {last}", "lost"))
        # who lost another one is not where it began
        failed = [facts for facts in said.values() if facts["code"] not in FINAL]
        first = next((facts for facts in failed if facts["why"] != "lost"), failed[0] if failed else None)
        if first is None and code is not None and code < 0:  # by the kernel, say, for want of memory
            return self._or_asked(AttemptResult(EXIT_FAILED, f"killed by signal {-code} before it began", "lost"))
        if first is None and code == EXIT_DONE:  # a run that had finished before: no rank had anything to do
            return AttemptResult(EXIT_DONE)
        if first is None:
            what = f"the processes ended before training started (exit code {code})"
            return self._or_asked(AttemptResult(EXIT_FAILED, what, REFUSED))
        if first["rank"] == leader and first["why"] == REFUSED:
            return AttemptResult(EXIT_FAILED, why=REFUSED)  # in a sentence that is on the screen
        what = f"rank {first['rank']} failed in {_place(first)} ({first['why']})"
        return self._or_asked(AttemptResult(EXIT_FAILED, what, first["why"]))

    def _or_asked(self, ending: AttemptResult) -> AttemptResult:
        """Who was asked to leave while it could not answer has left."""
        return ending if self.asked.code is None else AttemptResult(self.asked.code, ending.what)


def supervise(
    start: Callable[[str | None], Attempt],
    *,
    timeout: float,
    again: bool,
    progress: Callable[[], int | None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
    pause: float = 1.0,
) -> AttemptResult:
    """Run it to its end; `again` and again if it fails. `start` is told what went wrong before, and `progress` is the
    last step that is committed."""
    recovery, failures, reached = None, 0, progress()
    with SignalForwarder() as asked:
        while True:
            ending = Watcher(start(recovery), asked, timeout).run()
            if not ending.recoverable or not again:
                if ending.what and ending.code not in (EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED):
                    say(ending.what)
                return ending
            now = progress()
            failures, reached = 1 if now != reached else failures + 1, now
            if failures > MOST_WITHOUT_PROGRESS:
                say(f"{ending.what}; given up after {failures} attempts from the same checkpoint")
                return ending
            seconds = min(LONGEST_PAUSE_S, pause * 2.0 ** (failures - 1))
            say(f"{ending.what}; going on from {'the beginning' if now is None else f'step {now}'} in {seconds:g} s")
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and asked.code is None:
                time.sleep(_LOOK_EVERY_S)
            if asked.code is not None:
                return AttemptResult(asked.code)
            recovery = ending.what


def _signal_main_thread(pid: int, number: int) -> None:
    """Signal the main thread of a process, where it hangs.

    A signal to the process as a whole may wake another thread of a stopped process. That thread would print the main
    thread's stack while the main thread already moves on, which cuts the stack off.
    """
    try:
        tgkill = ctypes.CDLL(None).tgkill
    except (AttributeError, OSError):  # not glibc 2.30 or newer
        os.kill(pid, number)
        return
    if tgkill(pid, pid, number):
        raise ProcessLookupError(pid)


def _place(facts: dict[str, Any]) -> str:
    return str(facts["doing"]) if facts["step"] is None else f"{facts['doing']} ({facts['step']})"


def _alive(pid: int) -> bool:
    """A zombie is dead: whoever started it has only not looked yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
