"""Where a run stands in steps, tokens and time, and where its schedule ends.

`TrainState` is what a run has done so far. `Horizon` turns a step into progress (0 at the start, 1 at the end), which
the learning-rate schedule follows. `StepTimer` is the clock: it measures what steps, evaluations and saves cost.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from redline.units import format_seconds
from redline.vocabulary import StopReason


@dataclass(frozen=True)
class TrainState:
    """What a run has done so far. `to_json` is part of a checkpoint's state.json."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of training, over all resumes
    best_loss: float | None = None
    best_step: int | None = None
    evals_without_improvement: int = 0  # evaluations since the lowest validation loss; see eval.patience

    def after_step(self, tokens: int, seconds: float) -> TrainState:
        return replace(self, step=self.step + 1, tokens=self.tokens + tokens, seconds=seconds)

    def after_evaluation(self, loss: float | None) -> TrainState:
        """Return the state after an evaluation; `loss` is None for a run without validation data."""
        if loss is None:
            return self
        if not math.isfinite(loss) or (self.best_loss is not None and loss >= self.best_loss):
            return replace(self, evals_without_improvement=self.evals_without_improvement + 1)
        return replace(self, best_loss=loss, best_step=self.step, evals_without_improvement=0)

    def out_of_patience(self, patience: int | None) -> bool:
        """Return whether `eval.patience` evaluations in a row have not improved the validation loss."""
        return patience is not None and self.evals_without_improvement >= patience

    def without_best(self) -> TrainState:
        """Forget the best step. Losses on another number of validation sequences cannot be compared with it."""
        return replace(self, best_loss=None, best_step=None, evals_without_improvement=0)

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


# ----------------------------------------------------------------------------------------------------
# The horizon of the schedule, which moves if it is set in hours.
#
# Progress is piecewise linear in steps. With `train.hours` each re-plan adds a segment that leads from the present
# progress to 1 at the step that the measured speed will reach in time. So the learning rate never jumps, and it has
# decayed when the time is up.


# Re-plan at these fractions of the time budget.
REPLAN_AT = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.97)

REPLAN_TOLERANCE = 0.02  # of the remaining steps: a smaller change keeps the schedule as it is
NEARLY_SPENT = 0.05  # of the time budget: a resumed run with less than this left gets a warning
MAX_LEAD = 0.01  # of the run: progress may be this far ahead of what was planned for the time, then it is re-planned
UNKNOWN_LENGTH = 1 << 62  # steps of a run that ends by the clock, before its speed is measured


@dataclass(frozen=True)
class Segment:
    """From `step` on, progress grows from `progress` to 1 within `length` steps."""

    step: int
    progress: float
    length: int


class Horizon:
    def __init__(self, steps: int | None, hours: float | None) -> None:
        self.steps, self.seconds = steps, hours * 3600 if hours else None
        self.segments = [Segment(0, 0.0, steps or UNKNOWN_LENGTH)]
        self._next_mark = 0  # in REPLAN_AT
        # At the last re-plan: seconds used, progress then, and the time at which progress should be 1.
        self._planned = (0.0, 0.0, self.seconds or 0.0)

    def _segment_at(self, step: int) -> Segment:
        return next((s for s in reversed(self.segments) if s.step <= step), self.segments[0])

    def per_step(self, step: int) -> float:
        """Return how much progress one step makes."""
        segment = self._segment_at(step)
        return (1.0 - segment.progress) / segment.length

    def progress(self, step: int) -> float:
        segment = self._segment_at(step)
        return min(1.0, segment.progress + (1.0 - segment.progress) * (step - segment.step) / segment.length)

    def fraction_done(self, step: int, seconds: float) -> float:
        """Return how much of the run is done, by steps or by the clock, whichever is further."""
        by_clock = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(self.progress(step), by_clock))

    def seconds_left(self, step: int, seconds: float, per_step: float) -> float | None:
        """Return the seconds until the run ends if a step takes `per_step`; None if that is not known yet."""
        by_steps = [(self.steps - step) * per_step] if self.steps is not None and per_step else []
        by_clock = [self.seconds - seconds] if self.seconds is not None else []
        return max(0.0, min([*by_steps, *by_clock])) if by_steps or by_clock else None

    @property
    def end(self) -> int:
        """The step at which progress is 1."""
        return self.segments[-1].step + self.segments[-1].length

    def replan_due(self, step: int, seconds: float) -> bool:
        """Return whether to re-plan: at fixed fractions of the time budget, and if steps are faster than planned.

        The first steps may have been slow for reasons of their own. Without the second rule the learning rate would
        have decayed long before the time is up.
        """
        if self.seconds is None:
            return False
        if self._mark_reached(seconds):
            return True
        if self.steps is not None and self.end >= self.steps:  # the run ends by its steps, not by the clock
            return False
        planned_at, progress, end = self._planned
        by_now = min(1.0, progress + (1.0 - progress) * (seconds - planned_at) / max(end - planned_at, 1e-9))
        return self.progress(step) > by_now + MAX_LEAD

    def _mark_reached(self, seconds: float) -> bool:
        return self._next_mark < len(REPLAN_AT) and seconds >= REPLAN_AT[self._next_mark] * self._planned[2]

    def replan(self, step: int, seconds: float, seconds_per_step: float, reserve: float) -> Segment | None:
        """Lay out the rest of the run by the measured speed and return the new segment, or None if nothing changes.

        `reserve` is the time that is kept for the last evaluation and the last save.
        """
        assert self.seconds is not None
        while self._mark_reached(seconds):
            self._next_mark += 1
        self._planned = (seconds, self.progress(step), self.seconds - reserve)
        left = math.floor((self.seconds - seconds - reserve) / seconds_per_step)
        if self.steps is not None:
            left = min(left, self.steps - step)
            if self.steps <= step:
                return None
        left = max(1, left)
        if abs(self.end - step - left) <= REPLAN_TOLERANCE * left:
            return None
        self.segments.append(Segment(step, self.progress(step), left))
        return self.segments[-1]

    def resume_warning(self, step: int, seconds: float) -> str:
        """Return a warning for a run that resumes behind its end, or with hardly any time left; "" for any other."""
        if self.steps is not None and step > self.steps:
            return f"the run is at step {step:,} already: its end, step {self.steps:,}, lies behind it"
        if self.seconds is None or seconds < (1 - NEARLY_SPENT) * self.seconds:
            return ""
        left = format_seconds(max(0.0, self.seconds - seconds))
        total = format_seconds(self.seconds)
        return f"train.hours leaves {left} of {total}. Raise train.hours, or set train.hours=null, to train longer"

    def stop_message(self, reason: StopReason, step: int) -> str | None:
        """Return what the stop event says if train.hours ended the run, which may be long before its last step."""
        if reason is not StopReason.HOURS or self.seconds is None:
            return None
        counted = f"{step:,} of {self.steps:,}" if self.steps is not None else f"{step:,}"
        budget = f"the time budget train.hours ({format_seconds(self.seconds)}) ended the run at step {counted}"
        return f"{budget}; resume with a larger train.hours, or train.hours=null, to train longer"

    def state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "pieces": [[s.step, s.progress, s.length] for s in self.segments],
            "next": self._next_mark,
            "planned": list(self._planned),
        }

    def load_state(self, state: dict[str, Any], step: int, seconds: float) -> None:
        """Restore the segments of a checkpoint.

        If the horizon was changed on resume, lay out the schedule anew, as if the run had had this horizon from the
        start. Going on from a progress of 1 would train at the lowest learning rate for ever.
        """
        if state["steps"] == self.steps and state["seconds"] == self.seconds:
            self.segments = [Segment(int(s), float(progress), int(length)) for s, progress, length in state["pieces"]]
            self._next_mark = int(state["next"])
            self._planned = tuple(state.get("planned", self._planned))
        elif self.seconds is not None:
            left = UNKNOWN_LENGTH if self.steps is None else max(1, self.steps - step)
            by_steps = step / self.steps if self.steps else 0.0
            self.segments = [Segment(step, min(1.0, max(seconds / self.seconds, by_steps)), left)]


# ----------------------------------------------------------------------------------------------------
# The clock of a run, which counts over all resumes.


Clock = Callable[[], float]

RECENT_STEPS = 32  # whose mean time predicts the next step's
_MIN_OUTLIERS = 3  # slowest recent steps that are left out: a new shape was compiled, or the disk was busy


class StepTimer:
    """Measures training time, the usual time of a step, and how long the end of the run will take."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._zero = clock()
        # Seconds that the last step, evaluation, samples and save of the run will take, by name; `reserve` adds them.
        self.final_seconds: dict[str, float] = {}
        self.paused = 0.0  # seconds spent on evaluations, samples and saves
        self.start_steps()

    def resume_from(self, seconds: float) -> None:
        """Continue the count of an earlier part of the run."""
        self._zero = self.clock() - seconds

    @property
    def seconds(self) -> float:
        return self.clock() - self._zero

    def start_steps(self) -> None:
        """Begin to time steps. Compilation and warm-up are over."""
        self._steps = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._first: float | None = None
        self._paused_before = self.paused
        self._last = self._time_in_steps

    @property
    def _time_in_steps(self) -> float:
        return self.clock() - self.paused

    def step_done(self) -> None:
        """Record the time of a step. The first one is not counted, because it may have loaded kernels."""
        now = self._time_in_steps
        if self._steps:
            self._recent.append(now - self._last)
            self.final_seconds["step"] = self._usual()
        else:
            self._first = now - self._last
        self._steps, self._last = self._steps + 1, now

    def seconds_per_step(self) -> float:
        """Return the wall time per step: recent steps, plus each step's share of evaluations and saves. 0 before the
        first step."""
        if not self._recent:
            return self._first or 0.0
        return self._usual() + (self.paused - self._paused_before) / self._steps

    def _usual(self) -> float:
        """Return the mean time of recent steps without the slowest ones."""
        outliers = min((len(self._recent) - 1) // 2, max(_MIN_OUTLIERS, len(self._recent) // 20))
        return fmean(sorted(self._recent)[: len(self._recent) - outliers])

    @property
    def reserve(self) -> float:
        """Seconds of the time budget that must be left when the last step ends.

        The save counts twice, because the last save may have to wait for one that is still being written. A step is
        among them, because the last step may take twice its usual time.
        """
        return 1.25 * (sum(self.final_seconds.values()) + self.final_seconds.get("save", 0.0))

    def timed(self, name: str, action: Callable[[], None]) -> None:
        """Run `action` and count its time as a pause. The longest one of each name is what `reserve` expects."""
        begin = self.clock()
        action()
        spent = self.clock() - begin
        self.final_seconds[name] = max(self.final_seconds.get(name, 0.0), spent)
        self.paused += spent
