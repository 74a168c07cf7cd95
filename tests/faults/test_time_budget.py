"""R11: a run with a time budget ends in time, and its learning rate has decayed without jumps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from redline.planning.schedule import lr_factor
from redline.runs.events import read_events
from redline.training.checkpoint import newest_valid, step_name
from redline.training.schedule import Horizon, StepTimer

WARMUP = 2


@dataclass
class Case:
    """A simulated run. No evaluation takes more than 8 % of the training time and no save more than 5 %."""

    chance: random.Random
    now: float = 1000.0
    factors: list[float] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of the budget, after each step
    reserved: float = 0.0

    def __post_init__(self) -> None:
        draw = self.chance
        steps, self.step_time = draw.randint(100, 1000), 10 ** draw.uniform(-2, 1)
        training = steps * self.step_time
        self.jitter = draw.uniform(0, 0.5)
        self.evaluation = draw.choice((0.0, draw.uniform(0, 0.08))) * training
        self.save = draw.choice((0.0, draw.uniform(0, 0.05))) * training
        self.eval_every, self.save_every = draw.randint(steps // 20, steps), draw.randint(2, steps)
        self.warm_up = draw.uniform(0, 0.1) * training
        # what some of the first steps pay for alone, and how much longer those of the second half take
        self.slow = {step: draw.uniform(0, 0.05) * training for step in draw.sample(range(12), draw.randint(0, 4))}
        self.slower = draw.choice((1.0, draw.uniform(1, 3)))
        self.budget = sum(self.slow.values()) + training + self.warm_up + self.evaluation + 2 * self.save
        self.saved = self.now

    def spend(self, seconds: float, jitter: float = 0.1) -> float:
        seconds *= self.chance.uniform(1 - jitter, 1 + jitter)
        self.now += seconds
        return seconds

    def begin_save(self, timer: StepTimer) -> None:
        """Save in the background; it only waits for a save in progress."""
        self.now = max(self.now, self.saved)
        seconds = self.save * self.chance.uniform(0.9, 1.1)
        self.saved = self.now + seconds
        timer.final_seconds["save"] = max(timer.final_seconds.get("save", 0.0), seconds)

    def run(self) -> float:
        """Run the trainer's loop without training; return the seconds left at the end."""
        timer, horizon = StepTimer(lambda: self.now), Horizon(None, self.budget / 3600)
        timer.resume_from(0.0)
        self.spend(self.warm_up)
        timer.timed("evaluation", lambda: self._evaluate())
        timer.start_steps()
        step = evaluated = 0
        while timer.seconds + timer.seconds_per_step() + timer.reserve < self.budget:
            self.progress.append(horizon.progress(step))
            self.factors.append(lr_factor("cosine", step=step, warmup=WARMUP, progress=self.progress[-1]))
            late = timer.seconds > self.budget / 2
            self.spend(self.step_time * (self.slower if late else 1.0), self.jitter)
            self.spend(self.slow.get(step, 0.0))
            step += 1
            seconds = timer.seconds
            timer.step_done()
            self.shares.append(seconds / self.budget)
            if horizon.replan_due(step, seconds):
                horizon.replan(step, seconds, timer.seconds_per_step(), timer.reserve)
            if step % self.eval_every == 0:
                timer.timed("evaluation", lambda: self._evaluate())
                evaluated = step
            if step % self.save_every == 0 or step == 1:
                self.begin_save(timer)
        if evaluated != step:
            self._evaluate()
        self.begin_save(timer)
        self.reserved = timer.reserve / self.budget
        return self.budget - (max(self.now, self.saved) - 1000.0)

    def _evaluate(self) -> None:
        self.spend(self.evaluation)


@pytest.mark.parametrize("cases", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_time_budgets_in_simulated_runs(cases: int, say: Callable[[str], None]) -> None:
    left, last = [], []
    for seed in range(cases):
        case = Case(random.Random(seed))
        left.append(case.run() / case.budget)
        last.append(case.factors[-1])
        assert left[-1] >= 0, f"case {seed} was late"
        assert all(a <= b for a, b in zip(case.progress, case.progress[1:], strict=False)), seed
        # the rate decays with the clock: the end's reserve is all that progress may be ahead of it
        ahead = max(p - share for p, share in zip(case.progress[1:], case.shares, strict=False))
        assert ahead <= 0.03 + case.reserved, f"progress was {ahead:.2f} ahead of the clock in case {seed}"
        falls = [a - b for a, b in zip(case.factors[WARMUP:], case.factors[WARMUP + 1 :], strict=False)]
        assert min(falls) >= 0, f"the learning rate rose in case {seed}"
        assert max(falls) < 0.1, f"the learning rate jumped in case {seed}"
        assert last[-1] <= (0.05 if case.slower < 2 else 0.15), f"case {seed} ended at {last[-1]:.3f} of the peak"
    say(f"R11: {cases} budgets, none exceeded; {min(left):.1%} to {max(left):.1%} unused, LR ends ≤ {max(last):.3f}")


@pytest.mark.parametrize(("step_time", "evaluation", "jitter"), [(1.0, 3.0, 0.3), (0.1, 0.0, 0.5), (10.0, 60.0, 0.0)])
def test_time_budgets_in_real_runs(
    attempt: Any, world: Any, tmp_path: Path, step_time: float, evaluation: float, jitter: float
) -> None:
    chance, now = random.Random(11), [50.0]

    def spend(seconds: float) -> None:
        now[0] += seconds * chance.uniform(1 - jitter, 1 + jitter)

    def slow_down(trainer: Any) -> None:
        world.around(trainer, after=lambda _: spend(step_time))
        plain = trainer.objective.evaluate
        trainer.objective.evaluate = lambda micro: (spend(evaluation), plain(micro))[1]

    budget = 100 * step_time + 2 * evaluation
    options = (f"train.hours={budget / 3600}", "train.steps=null", "train.schedule=cosine", "train.min_lr_ratio=0.0")
    often = ("eval.every=30", "checkpoint.every=30")
    trainer = attempt(tmp_path, *options, *often, prepare=slow_down, clock=lambda: now[0])
    assert trainer.outcome.reason == "hours"
    assert trainer.outcome.exit_code == 0
    assert now[0] - 50.0 <= budget
    assert trainer.state.step > 60, "the budget was used"
    assert newest_valid(tmp_path / "checkpoints") == tmp_path / "checkpoints" / step_name(trainer.state.step)
    rates = [e["lr"] / trainer.train.lr for e in read_events(tmp_path / "events.jsonl") if e["type"] == "step"]
    assert len(rates) == trainer.state.step
    assert rates[-1] <= 0.05
    assert all(0 <= a - b < 0.1 for a, b in zip(rates[WARMUP:], rates[WARMUP + 1 :], strict=False))


def test_a_budget_that_is_spent_stays_spent(attempt: Any, world: Any, tmp_path: Path) -> None:
    """A resumed run knows the time of the final save, and takes no step for which there is no time."""
    now = [50.0]

    def slow_down(trainer: Any) -> None:
        world.around(trainer, after=lambda _: now.__setitem__(0, now[0] + 1.0))
        plain = trainer.objective.evaluate
        trainer.objective.evaluate = lambda micro: (now.__setitem__(0, now[0] + 8.0), plain(micro))[1]

    options = ("train.hours=60s", "train.steps=null", "eval.every=1000", "checkpoint.every=1000")
    first = attempt(tmp_path, *options, prepare=slow_down, clock=lambda: now[0])
    assert first.outcome.reason == "hours"
    again = attempt(tmp_path, *options, prepare=slow_down, clock=lambda: now[0])
    assert again.state.step == first.state.step > 20


def test_a_long_lr_warmup_is_a_warning_and_the_rate_still_decays(attempt: Any, world: Any, tmp_path: Path) -> None:
    now = [50.0]

    def slow_down(trainer: Any) -> None:
        world.around(trainer, after=lambda _: now.__setitem__(0, now[0] + 1.0))

    options = ("train.hours=60s", "train.steps=null", "train.schedule=cosine", "train.min_lr_ratio=0.0")
    trainer = attempt(tmp_path, *options, "train.warmup_steps=200", prepare=slow_down, clock=lambda: now[0])
    events = list(read_events(tmp_path / "events.jsonl"))
    told = [e["message"] for e in events if e["type"] == "warning" and "train.warmup_steps=200" in e["message"]]
    assert len(told) == 1
    assert "more than half of an expected" in told[0]
    rates = [e["lr"] / trainer.train.lr for e in events if e["type"] == "step"]
    assert max(rates) > 0.1
    assert rates[-1] < 0.05
