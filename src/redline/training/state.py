"""What a run has done so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USAGE, UserError
from redline.recipe.lock import check_model_identity
from redline.recipe.schema import Recipe


@dataclass(frozen=True)
class TrainState:
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, over all resumes
    best_loss: float | None = None
    best_step: int | None = None
    evals_without_improvement: int = 0  # evaluations since the lowest validation loss; see eval.patience

    def after(self, tokens: int, seconds: float) -> TrainState:
        return replace(self, step=self.step + 1, tokens=self.tokens + tokens, seconds=seconds)

    def evaluated(self, loss: float | None) -> TrainState:
        """Return the state after an evaluation; `loss` is None where nothing is held out."""
        if loss is None:
            return self
        if not math.isfinite(loss) or (self.best_loss is not None and loss >= self.best_loss):
            return replace(self, evals_without_improvement=self.evals_without_improvement + 1)
        return replace(self, best_loss=loss, best_step=self.step, evals_without_improvement=0)

    def out_of_patience(self, patience: int | None) -> bool:
        """Return whether `eval.patience` evaluations in a row have not improved the validation loss."""
        return patience is not None and self.evals_without_improvement >= patience

    def best_of_others(self, sequences: int | None, now: int) -> str | None:
        """What is to be said where the lowest loss is of other validation windows: it measures nothing that comes."""
        if self.best_step is None or sequences in (None, now):
            return None
        return f"eval.sequences was {sequences}, and is {now}: which step is best is looked for anew"

    def to_json(self) -> dict[str, Any]:
        best = {"step": self.best_step, "loss": self.best_loss} if self.best_step is not None else None
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "best": best,
            "evals_without_improvement": self.evals_without_improvement,
        }

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> TrainState:
        best = state["best"] or {"step": None, "loss": None}
        stale = int(state.get("evals_without_improvement", 0))  # checkpoints of older versions do not have it
        return cls(int(state["step"]), int(state["tokens"]), float(state["seconds"]), best["loss"], best["step"], stale)


def check_identity(recorded: dict[str, Any], identity: dict[str, Any], recipe: Recipe, run: Path) -> None:
    """Refuse to resume a checkpoint with another model, other data or another tokenizer than it was trained with."""
    check_model_identity(recorded, recipe, run)
    known = {key: value for key, value in identity.items() if key != "model"}
    changed = [key for key, value in known.items() if recorded.get(key, value) != value]
    if changed:
        what = f"the {' and '.join(changed)} changed since this run began."
        raise UserError(what, where=str(run), fix="Put the old data back, or start a new run.")


# ----------------------------------------------------------------------------------------------------
# Why a run ended, and with which exit code.


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
