"""Why a run ended, and with which exit code."""

from __future__ import annotations

from dataclasses import dataclass

from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE
from redline.train.state import TrainState

# in order: of two reasons the later one counts
REASONS = (None, "steps", "hours", "target_loss", "requested", "nonfinite", "preempted", "interrupted", "moved")
# its own, with the keys of which the first that is set brings it about
OWN_ENDS = {"steps": ("steps", "tokens", "epochs"), "hours": ("hours",), "target_loss": ("target_loss",)}
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
