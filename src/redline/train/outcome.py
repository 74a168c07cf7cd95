"""Why a run ended, and with which exit code."""

from __future__ import annotations

from dataclasses import dataclass

from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE
from redline.train.state import TrainState

# in order: of two reasons the later one counts
REASONS = (
    None,
    "steps",
    "hours",
    "target_loss",
    "patience",
    "requested",
    "nonfinite",
    "preempted",
    "interrupted",
    "moved",
)
# The ends that a recipe asks for, and the keys that set each one.
OWN_ENDS = {
    "steps": ("train.steps", "train.tokens", "train.epochs"),
    "hours": ("train.hours",),
    "target_loss": ("train.target_loss",),
    "patience": ("eval.patience",),
}
# A run whose directory was moved away must not be started again at its old place: launchers do not retry a usage error.
EXIT_OF = {
    "preempted": EXIT_PREEMPTED,
    "interrupted": EXIT_INTERRUPTED,
    "nonfinite": EXIT_FAILED,
    "moved": EXIT_USAGE,
}


@dataclass(frozen=True)
class Outcome:
    reason: str
    state: TrainState
    saved: bool = True

    @property
    def exit_code(self) -> int:
        return EXIT_OF.get(self.reason, EXIT_DONE) if self.saved or self.reason == "moved" else EXIT_FAILED
