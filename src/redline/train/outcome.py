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
    "damaged_data",
)
# The ends that a recipe asks for, and the keys that set each one.
OWN_ENDS = {
    "steps": ("train.steps", "train.tokens", "train.epochs"),
    "hours": ("train.hours",),
    "target_loss": ("train.target_loss",),
    "patience": ("eval.patience",),
}
EXIT_OF = {"preempted": EXIT_PREEMPTED, "interrupted": EXIT_INTERRUPTED, "nonfinite": EXIT_FAILED}


@dataclass(frozen=True)
class Outcome:
    reason: str
    state: TrainState
    saved: bool = True

    @property
    def exit_code(self) -> int:
        if self.reason == "moved":
            # A run that was moved and saved has stopped as if asked to: only 0 keeps torchrun and Kubernetes from
            # starting a second run at its old place. The SLURM script does not retry a usage error either.
            return EXIT_DONE if self.saved else EXIT_USAGE
        return EXIT_OF.get(self.reason, EXIT_DONE) if self.saved else EXIT_FAILED
