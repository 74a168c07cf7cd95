"""Freeing disk: the checkpoints that nobody needs any more, of runs that are over."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.errors import UserError
from redline.monitor.events import read_events
from redline.monitor.runs import EVENTS, disk_bytes, is_locked, run_status
from redline.train.checkpoint import best_step, clean, committed_steps, expendable, leftovers, retain, step_name
from redline.train.rundir import RunDirectory

Keep = str | int  # "best": the best and the newest; "last": the newest; N: the newest N and the best


@dataclass(frozen=True)
class Pruned:
    """What goes and what stays of one run; with a `reason`, all of it stays."""

    run: Path
    removed: dict[int, int] = field(default_factory=dict)  # step → bytes
    kept: list[int] = field(default_factory=list)
    leftover_bytes: int = 0  # of saves that were interrupted
    reason: str | None = None

    @property
    def bytes(self) -> int:
        return sum(self.removed.values()) + self.leftover_bytes

    def as_dict(self) -> dict[str, Any]:
        removed = [{"step": step, "bytes": size} for step, size in sorted(self.removed.items())]
        return {**vars(self), "run": str(self.run), "removed": removed, "bytes": self.bytes}


def plan_prune(run: Path, keep: Keep = "best") -> Pruned:
    """Decides; touches nothing. The newest valid checkpoint always stays, and damaged ones that are newer with it:
    a disk that cannot be read today may be readable tomorrow."""
    if is_locked(run):
        return Pruned(run, reason="is running")
    if run_status(run, read_events(run / EVENTS)) == "failed":
        return Pruned(run, reason="failed, and an earlier checkpoint may be what saves it")
    return _decide(run, keep)


def prune(run: Path, keep: Keep = "best") -> Pruned:
    """Removes what `plan_prune` decides, while nobody can go on with the run; returns what was done."""
    plan = plan_prune(run, keep)
    if not plan.bytes:
        return plan
    try:
        with RunDirectory(run) as held:
            plan = _decide(run, keep)  # it may have gone on between the look and the lock
            retain(held.checkpoints, *_rule(run, keep))
            clean(held.checkpoints)
    except UserError as error:
        return Pruned(run, reason=error.what.rstrip("."))
    except OSError as error:
        left = committed_steps(run / "checkpoints")
        removed = {step: size for step, size in plan.removed.items() if step not in left}
        return Pruned(run, removed, left, reason=f"cannot be changed ({error.strerror})")
    return plan


def _decide(run: Path, keep: Keep) -> Pruned:
    folder = run / "checkpoints"
    going = expendable(folder, *_rule(run, keep))
    removed = {step: disk_bytes(folder / step_name(step)) for step in going}
    kept = [step for step in committed_steps(folder) if step not in removed]
    return Pruned(run, removed, kept, sum(disk_bytes(path) for path in leftovers(folder)))


def _rule(run: Path, keep: Keep) -> tuple[int, tuple[int, ...]]:
    """How many of the newest valid ones stay, and which besides."""
    best = None if keep == "last" else best_step(run / "checkpoints")
    return keep if isinstance(keep, int) else 1, () if best is None else (best,)
