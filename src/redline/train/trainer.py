"""How a run goes. Knows no job by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, UserError
from redline.monitor.monitor import Monitor
from redline.monitor.runs import stop_request_path
from redline.monitor.throughput import Throughput
from redline.objectives.base import Objective, Sampling
from redline.plan.batch import BatchPlan
from redline.plan.schedule import lr_factor
from redline.recipe.resolve import Resolved
from redline.train.checkpoint import Tensors, read_state, read_tensors
from redline.train.feed import Feed, step_batch, to_device
from redline.train.graph import use_graph
from redline.train.keeper import Keeper
from redline.train.log import StepLog
from redline.train.optim import Ema, Optimizer
from redline.train.pace import Pace
from redline.train.precision import LossScale
from redline.train.rundir import RunDirectory
from redline.train.schedule import Horizon
from redline.train.signals import Signals, StopRequested
from redline.train.state import TrainState
from redline.train.step import Step
from redline.train.warmup import warm_up
from redline.train.weights import copy_weights

EXIT_OF = {"preempted": EXIT_PREEMPTED, "interrupted": EXIT_INTERRUPTED, "nonfinite": EXIT_FAILED}


@dataclass(frozen=True)
class Outcome:
    reason: str
    state: TrainState
    saved: bool = True

    @property
    def exit_code(self) -> int:
        return EXIT_OF.get(self.reason, EXIT_DONE) if self.saved else EXIT_FAILED


class Trainer:
    def __init__(
        self,
        resolved: Resolved,
        objective: Objective,
        run: RunDirectory,
        monitor: Monitor,
        *,
        horizon_steps: int | None,
        identity: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resolved, self.recipe, self.train = resolved, resolved.recipe, resolved.recipe.train
        self.objective, self.run_directory, self.monitor = objective, run, monitor
        self.identity = identity  # what must be equal on resume: data and tokenizer fingerprints
        self.device = torch.device(self.train.device)
        self.batch = resolved.batch
        self.state = TrainState()
        self.pace = Pace(clock)
        self.horizon = Horizon(horizon_steps, self.train.hours)
        self.signals = Signals()
        self.throughput = Throughput(resolved.flops, resolved.machine.peak("bf16"), clock)
        self.log = StepLog(monitor, self.throughput, self.device)
        self.keeper = Keeper(run, monitor, self.pace, self.recipe.checkpoint)
        self._evaluated_at: int | None = None
        self._stop_checked = float("-inf")

    # --- assembling

    def build(self, checkpoint: Path | None = None, initial: Tensors | None = None) -> None:
        """Make everything that trains; from a checkpoint, make it as it was; else from `initial` weights if given."""
        if checkpoint is not None:
            self.objective.load_state(read_state(checkpoint)["objective"])
        if self.train.deterministic:
            torch.use_deterministic_algorithms(True)
        self.objective.build(self.device)
        self.parameters = {n: p for n, p in self.objective.model.named_parameters() if p.requires_grad}
        if initial is not None and checkpoint is None:
            copy_weights(self.parameters, initial, "model.init_from")
        self.optimizer = Optimizer(self.objective.param_groups(), self.train)
        self.scale = LossScale(self.train.precision, self.device)
        self.ema = Ema(self.parameters, self.train.ema) if self.train.ema is not None else None
        self.step = Step(
            self.objective,
            self.optimizer,
            scale=self.scale,
            ema=self.ema,
            clip=self.train.clip,
            seed=self.train.seed,
        )
        if self.train.compile:
            self.objective.compile()
        if checkpoint is not None:
            self._restore(checkpoint)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Everything that a checkpoint holds, as it lives: file → name → tensor."""
        files: dict[str, dict[str, torch.Tensor]] = {
            "model": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": {**self.optimizer.tensors(), **self.scale.tensors()},
        }
        return files if self.ema is None else {**files, "ema": self.ema.average}

    def _restore(self, checkpoint: Path) -> None:
        state = read_state(checkpoint)
        changed = [key for key, value in self.identity.items() if state["identity"].get(key) != value]
        if changed:
            what = f"the {' and '.join(changed)} changed since this run began."
            fix = "Put the old data back, or start a new run."
            raise UserError(what, where=str(self.run_directory.path), fix=fix)
        with torch.no_grad():
            for stem, tensors in self.tensors().items():
                saved = read_tensors(checkpoint, stem)
                for name, tensor in tensors.items():
                    tensor.copy_(saved[name])
        self.state = TrainState.from_json(state)
        self.horizon.load_state(state["decisions"]["horizon"], self.state.step, self.state.seconds)
        self.batch = BatchPlan(*state["decisions"]["batch"])
        self.log.skipped = int(state["skipped"])
        self.keeper.saved_at = self.state.step

    # --- the run

    def run(self) -> Outcome:
        """Train until something says stop."""
        self.pace.resume(self.state.seconds)
        with self.signals:
            try:
                with self.signals.abandonable():
                    self.warm_up()
                if self.state.step == 0 and not self.signals.reason:
                    self.look("before")
                reason = self._loop()
            except StopRequested:
                reason = self.signals.reason or "preempted"
            return self.finish(reason)

    def _loop(self) -> str:
        with Feed(self.objective, self.batch, self.device, self.recipe.data.workers, self.state.step) as feed:
            self.pace.begin(self.state.step)
            self.throughput.begin()
            while not (stop := self.should_stop()):
                batch = feed.next(self.state.step)
                result = self.step(self.state.step, batch, self._lr_factor(self.state.step))
                self.state = self.state.after(self.resolved.tokens_per_step, self.pace.seconds)
                self.log.note(result, self.resolved.tokens_per_step, batch.seconds)
                self.replan_if_due()
                self.log_if_due()
                self.evaluate_if_due()
                if self.objective.batches_changed():
                    feed.restart(self.state.step)
                self.checkpoint_if_due()
        return stop

    def warm_up(self) -> None:
        """Compile and run the worst-case batch: an OOM happens here, not in hour three."""
        self.batch = warm_up(
            self._rehearse,
            self.batch,
            self.monitor,
            compiled=self.train.compile,
            device=self.resolved.machine.name,
        )
        if self.train.graph:
            self._record_graph()
        self.keeper.expect(self.tensors())

    def _rehearse(self, plan: BatchPlan) -> None:
        self.step.clear()
        with self.objective.rehearsing():
            for micro in (*self.objective.first_looks(plan.micro), plan.micro):
                rows = to_device(self.objective.worst_batch(micro), self.device)
                # as one of the step's: gradients of the size they will have
                self.step.rehearse(step_batch(self.objective, [rows]).part_of(plan.global_batch / micro))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _record_graph(self) -> None:
        if self.device.type != "cuda" or not self.objective.replayable:
            self.monitor.warn("train.graph is off: it needs a GPU, and steps that are the same kernels each time")
            return
        rows = to_device(self.objective.worst_batch(self.batch.micro), self.device)
        with self.objective.rehearsing():
            use_graph(self.step, step_batch(self.objective, [rows] * self.batch.accumulation), self.monitor)
        self.step.clear()

    # --- what happens between steps

    def _lr_factor(self, step: int) -> float:
        return lr_factor(
            self.train.schedule,
            step=step,
            warmup=self.train.warmup_steps,
            progress=self.horizon.progress(step),
            floor=self.train.min_lr_ratio,
            decay_fraction=self.train.decay_fraction,
        )

    def replan_if_due(self) -> None:
        if self.horizon.due(self.state.seconds):
            self.log.wait()  # steps that are only queued have not been paid for
            per_step = self.pace.seconds_per_step(self.state.step)
            if self.horizon.replan(self.state.step, self.state.seconds, per_step, self.pace.reserve) is None:
                return
            end = self.horizon.end
            message = f"{1000 * per_step:.0f} ms a step: the schedule ends at step {end}"
            self.monitor.emit("replan", step=self.state.step, end=end, seconds_per_step=per_step, message=message)

    def log_if_due(self) -> None:
        step = self.state.step
        eta = self._eta()
        self.monitor.tick(step, self.progress, eta)
        if step % self.recipe.monitor.log_every == 0 or step == self.horizon.end:
            self.log.emit(self.state, lr=self.train.lr * self._lr_factor(step - 1), progress=self.progress, eta_s=eta)

    @property
    def progress(self) -> float:
        """Share of the run that is done: by steps or by the clock, whichever is further."""
        by_clock = self.state.seconds / self.horizon.seconds if self.horizon.seconds else 0.0
        return min(1.0, max(self.horizon.progress(self.state.step), by_clock))

    def _eta(self) -> float | None:
        per_step = self.pace.seconds_per_step(self.state.step)
        ends = []
        if self.horizon.steps is not None and per_step:
            ends.append((self.horizon.steps - self.state.step) * per_step)
        if self.horizon.seconds is not None:
            ends.append(self.horizon.seconds - self.state.seconds)
        return max(0.0, min(ends)) if ends else None

    def evaluate_if_due(self) -> None:
        if self.state.step % self.recipe.eval.every == 0 and not self.signals.reason:
            self.evaluate()

    def evaluate(self) -> None:
        with self.throughput.paused(), self._evaluation_weights():
            self.pace.timed("evaluation", self._evaluate)
        if self.recipe.checkpoint.best and self.state.best_step == self.state.step > 0:
            self.save()

    def _evaluate(self) -> None:
        metrics = self.objective.evaluate(self.batch.micro)
        self.state = self.state.evaluated(metrics.get("loss"))
        self._evaluated_at = self.state.step
        self.monitor.emit("eval", step=self.state.step, tokens=self.state.tokens, **metrics)

    @contextmanager
    def _evaluation_weights(self) -> Iterator[None]:
        """The average of the weights, if one is kept."""
        if self.ema is not None:
            self.ema.swap()
        try:
            yield
        finally:
            if self.ema is not None:
                self.ema.swap()

    def look(self, label: str) -> None:
        """Validation loss and samples, before and after."""
        if self._evaluated_at != self.state.step:
            self.evaluate()
        if self.recipe.eval.samples:
            with self.throughput.paused(), self._evaluation_weights():
                self.pace.timed("samples", lambda: self._sample(label))

    def _sample(self, label: str) -> None:
        options = self.recipe.eval
        count = 1 if label == "before" else options.samples  # noise is the same everywhere
        how = Sampling(count=count, tokens=options.sample_tokens, seed=self.train.seed)
        for sample in self.objective.sample(options.prompt, how):
            self.monitor.emit("sample", step=self.state.step, label=label, prompt=sample.prompt, text=sample.text)

    def checkpoint_if_due(self) -> None:
        if self.state.step % self.recipe.checkpoint.every == 0:
            self.save()

    def save(self) -> None:
        with self.throughput.paused():
            self.keeper.save(self.state.step, self.tensors(), self._record(), self.state.best_step)

    def _record(self) -> dict[str, Any]:
        plan = self.batch
        return {
            "schema": 1,
            **self.state.to_json(),
            "seed": self.train.seed,
            "skipped": self.log.skipped,
            "identity": self.identity,
            "objective": self.objective.state(),
            "decisions": {"batch": [plan.micro, plan.accumulation, plan.world], "horizon": self.horizon.state()},
        }

    # --- stopping

    def should_stop(self) -> str | None:
        if self.signals.reason:
            return self.signals.reason
        if self._stop_requested():
            return "requested"
        if self.log.bad_in_a_row >= self.train.max_nonfinite:
            return "nonfinite"
        target, best = self.train.target_loss, self.state.best_loss
        if target is not None and best is not None and best <= target:
            return "target_loss"
        if self.horizon.steps is not None and self.state.step >= self.horizon.steps:
            return "steps"
        return "hours" if self._out_of_time() else None

    def _out_of_time(self) -> bool:
        if self.horizon.seconds is None:
            return False
        one_more = self.pace.seconds_per_step(self.state.step)
        return self.pace.seconds + one_more + self.pace.reserve >= self.horizon.seconds

    def _stop_requested(self) -> bool:
        now = time.monotonic()
        if now - self._stop_checked < 1.0:  # a directory on a network should not be asked at every step
            return False
        self._stop_checked = now
        path = stop_request_path(self.run_directory.path)
        found = path.exists()
        path.unlink(missing_ok=True)
        return found

    def finish(self, reason: str) -> Outcome:
        """The last look and the last save. Who was asked to leave saves first and looks at nothing."""
        if reason in ("preempted", "nonfinite"):
            self.save()
        else:
            self.look("after")
            self.save()
        saved = self.keeper.finish(self.state.step)
        hours = self.pace.seconds / 3600
        self.monitor.emit(
            "stop",
            reason=reason,
            step=self.state.step,
            tokens=self.state.tokens,
            hours=hours,
            cost_usd=self.monitor.cost(hours),
            skipped=self.log.skipped,
            **({"bad_steps": self.log.bad_steps} if reason == "nonfinite" else {}),
        )
        return Outcome(reason, self.state, saved)
