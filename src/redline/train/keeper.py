"""Keeping a run: when to commit, what was committed, and what a commit costs."""

from __future__ import annotations

from typing import Any

from redline.monitor.monitor import Monitor
from redline.recipe.schema import Checkpoint
from redline.train.checkpoint import Committed, Snapshot, Tensors, committed_steps
from redline.train.pace import Pace
from redline.train.rundir import RunDirectory
from redline.train.saving import Commit, HostCopy, Saver

EXPECTED_DISK_SPEED = 0.5e9  # bytes/s, hashed and synced; 0.46 to 0.61 measured on a rented machine's disk
Places = dict[str, dict[str, Any]]


class Keeper:
    """The first rank keeps what all have alike; where each has its share, all keep it `together`."""

    def __init__(
        self,
        run: RunDirectory,
        monitor: Monitor,
        pace: Pace,
        options: Checkpoint,
        *,
        first: bool = True,
        together: Commit | None = None,
    ) -> None:
        self.run, self.monitor, self.pace, self.options = run, monitor, pace, options
        self.shared = together is not None
        self.writes = first or self.shared
        self.saved_at: int | None = None
        self._host = HostCopy()
        self._measured = False
        self._stall = 0.0
        self._saver = Saver(
            run.checkpoints,
            keep=options.keep,
            on_saved=self._saved,
            on_failed=self._failed,
            clock=pace.clock,
            together=together,
            retaining=first,
        )

    def expect(self, files: dict[str, Tensors]) -> None:
        """Until a save was measured, a time budget reserves what one of this size should take."""
        size = sum(t.numel() * t.element_size() for tensors in files.values() for t in tensors.values())
        self.pace.closing.setdefault("save", size / EXPECTED_DISK_SPEED)

    def save(
        self,
        step: int,
        files: dict[str, Tensors],
        record: dict[str, Any],
        best: int | None,
        places: Places | None = None,
    ) -> None:
        """Snapshot now, commit in the background; once per step."""
        self._saver.wait()  # a save that failed meanwhile has taken `saved_at` back
        if self.saved_at == step:
            return
        self.saved_at = step
        if not self.writes:
            return
        begin = self.pace.clock()
        self._saver.folder = self.run.checkpoints  # the directory may have been moved since the last save
        snapshot = Snapshot(step, self._host.take(files), record, places or {})
        self._stall = self.pace.clock() - begin
        self.pace.paused += self._stall
        self._saver.save(snapshot, protect=(best,) if self.options.best and best is not None else ())

    def settle(self) -> None:
        """What is in flight is committed before a failure ends the process; with others it may never be."""
        if not self.shared:
            self._saver.wait()

    def finish(self, step: int) -> bool:
        """Wait for what is in flight; whether this step is committed."""
        self._saver.wait()
        if self.saved_at != step:
            before = committed_steps(self.run.checkpoints)
            left = f"step {before[-1]} is" if before else "no checkpoint is left, so the run has to start over"
            self.monitor.warn(f"the last state of this run is not on disk; {left}")
        return self.saved_at == step

    def _saved(self, done: Committed, seconds: float) -> None:
        known = self.pace.closing.get("save", 0.0) if self._measured else 0.0
        self.pace.closing["save"], self._measured = max(known, seconds), True
        path = done.path.relative_to(done.path.parent.parent)  # of the run, wherever it has been moved since
        self.monitor.emit(
            "checkpoint", step=done.step, path=path, seconds=seconds, stall_s=self._stall, bytes=done.bytes
        )

    def _failed(self, error: OSError) -> None:
        self.saved_at = None
        if self.run.moved():
            self.monitor.warn(f"a checkpoint could not be written: the run directory is no longer at {self.run.path}")
            return
        self.monitor.warn(f"a checkpoint could not be written ({error}); earlier ones are untouched. Free some disk.")
