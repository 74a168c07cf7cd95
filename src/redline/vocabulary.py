"""Names that several layers share: how runs end, their status, and the files in a run directory.

The trainer writes a `StopReason` into the `stop` event; `redline runs`, the report and the live page read it back.
Everything that follows from a reason (the status of the run, the exit code of the process, the words people read) is
in the table `_ENDINGS`, so that no reader has to interpret a sentence. All values are strings in files and JSON output:
changing one breaks logs that exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE

RUNS = Path("runs")  # the folder of all runs, in the working directory

# Files and folders in a run directory.
EVENTS_FILE = "events.jsonl"
RECIPE_LOCK_FILE = "lock.json"  # the resolved recipe and its provenance
PROCESS_LOCK_FILE = ".lock"  # held with flock by the process that trains
STOP_REQUEST_FILE = "stop-requested"  # written by `redline stop`
TOKENIZER_FILE = "tokenizer.json"
CHECKPOINTS_FOLDER = "checkpoints"
REPORT_FILE = "report.html"

# Files beside run directories.
SWEEP_FILE = "sweep.json"  # in the directory of a sweep, whose subdirectories are its runs
COMPARISON_FILE = "comparison.html"
LATEST_LINK = "latest"  # in the folder of all runs, to the newest one


class Status(StrEnum):
    RUNNING = "running"  # a live process holds the lock of the run
    FINISHED = "finished"  # the run reached an end that its recipe sets
    PREEMPTED = "preempted"  # the scheduler asked for the machine; the run can be resumed
    STOPPED = "stopped"  # a person stopped it
    FAILED = "failed"  # it ended with an error, or could not save its last state
    CRASHED = "crashed"  # the log ends without a stop event


@dataclass(frozen=True)
class _Ending:
    status: Status
    exit_code: int  # of a run whose last state was saved
    description: str  # completes "finished: …"
    recipe_keys: tuple[str, ...] = ()  # that set this end; empty if no recipe asks for it
    unsaved_exit_code: int = EXIT_FAILED


class StopReason(StrEnum):
    """Why a run ended, in order of precedence: if two ranks report different reasons, the later one counts."""

    STEPS = "steps"
    HOURS = "hours"
    TARGET_LOSS = "target_loss"
    PATIENCE = "patience"
    REQUESTED = "requested"
    NONFINITE = "nonfinite"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    MOVED = "moved"
    DAMAGED_DATA = "damaged_data"

    @property
    def status(self) -> Status:
        return _ENDINGS[self].status

    @property
    def description(self) -> str:
        """Return the reason as a phrase that completes "finished: …"."""
        return _ENDINGS[self].description

    @property
    def recipe_keys(self) -> tuple[str, ...]:
        """Return the recipe keys that set this end, or () for an end that comes from outside of the recipe."""
        return _ENDINGS[self].recipe_keys

    def exit_code(self, *, saved: bool = True) -> int:
        """Return the exit code of the process; `saved` is whether the last state is in a checkpoint."""
        ending = _ENDINGS[self]
        return ending.exit_code if saved else ending.unsaved_exit_code


_ENDINGS = {
    StopReason.STEPS: _Ending(
        Status.FINISHED, EXIT_DONE, "reached the last step", ("train.steps", "train.tokens", "train.epochs")
    ),
    StopReason.HOURS: _Ending(Status.FINISHED, EXIT_DONE, "reached train.hours", ("train.hours",)),
    StopReason.TARGET_LOSS: _Ending(Status.FINISHED, EXIT_DONE, "reached train.target_loss", ("train.target_loss",)),
    StopReason.PATIENCE: _Ending(
        Status.FINISHED, EXIT_DONE, "the validation loss stopped improving (eval.patience)", ("eval.patience",)
    ),
    StopReason.REQUESTED: _Ending(Status.STOPPED, EXIT_DONE, "requested with `redline stop`"),
    StopReason.NONFINITE: _Ending(
        Status.FAILED, EXIT_FAILED, "too many steps in a row had a loss or gradient that was not finite"
    ),
    StopReason.PREEMPTED: _Ending(
        Status.PREEMPTED, EXIT_PREEMPTED, "a signal or the deadline of the job asked the run to stop"
    ),
    StopReason.INTERRUPTED: _Ending(Status.STOPPED, EXIT_INTERRUPTED, "interrupted with Ctrl-C"),
    # A run that was moved and saved exits with 0: any other code makes torchrun or Kubernetes start a second run at the
    # old place. If it could not be saved, a usage error keeps the SLURM script from trying again.
    StopReason.MOVED: _Ending(
        Status.STOPPED, EXIT_DONE, "the run directory was moved or removed", unsaved_exit_code=EXIT_USAGE
    ),
    StopReason.DAMAGED_DATA: _Ending(Status.FAILED, EXIT_FAILED, "a file of the training data is damaged"),
}

# Spellings of reasons in older or foreign logs, by how they begin. Any other unknown reason means a goal was reached.
_LEGACY_STATUS = {
    "fail": Status.FAILED,
    "error": Status.FAILED,
    "exception": Status.FAILED,
    "non-finite": Status.FAILED,
    "nonfinite": Status.FAILED,
    "nan": Status.FAILED,
    "diverged": Status.FAILED,
    "oom": Status.FAILED,
    "out of memory": Status.FAILED,
    "preempt": Status.PREEMPTED,
    "sigterm": Status.PREEMPTED,
    "sigusr1": Status.PREEMPTED,
    "interrupt": Status.STOPPED,
    "sigint": Status.STOPPED,
    "ctrl-c": Status.STOPPED,
    "stop": Status.STOPPED,
    "request": Status.STOPPED,
    "moved": Status.STOPPED,
}


def parse_stop_reason(text: object) -> StopReason | None:
    """Return the reason that a `stop` event states, or None for one that this version does not know."""
    try:
        return StopReason(text)  # type: ignore[arg-type]  # anything else than a string is not a member either
    except ValueError:
        return None


def status_of_stop(stop: Mapping[str, Any]) -> Status:
    """Return the status of a run whose last event is this `stop` event.

    A run whose last state is not on disk has failed, whatever the reason.
    """
    if stop.get("saved") is False:
        return Status.FAILED
    if (reason := parse_stop_reason(stop.get("reason"))) is not None:
        return reason.status
    text = str(stop.get("reason")).lower()
    return next((status for start, status in _LEGACY_STATUS.items() if text.startswith(start)), Status.FINISHED)
