"""How a run goes. Knows no job by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from redline.data.shards import BackgroundCheck, DamagedDataError
from redline.jobs.objective import Objective, Sampling
from redline.planning.batch import BatchPlan
from redline.planning.schedule import cycled_momentum, lr_factor
from redline.recipe.horizon import warmup_warnings
from redline.recipe.lock import model_identity
from redline.recipe.resolve import Resolved
from redline.recipe.schema import Eval
from redline.runs.monitor import Monitor
from redline.runs.throughput import Throughput
from redline.training import recovery as trouble
from redline.training.checkpoint import CheckpointManager, Tensors, committed_steps, copy_weights, read_state
from redline.training.cuda_graph import graph_if_possible
from redline.training.distributed import SINGLE_PROCESS, Ranks
from redline.training.heartbeat import HEARTBEAT
from redline.training.optim import Ema, Optimizer
from redline.training.parallel import ParallelStrategy, build_on_all_ranks, parallelize
from redline.training.run_directory import RunDirectory
from redline.training.schedule import Horizon, StepTimer
from redline.training.sharded_checkpoint import SharedCommit, read_rows
from redline.training.signals import Deadline, Signals, StopRequested
from redline.training.state import OWN_ENDS, REASONS, Outcome, TrainState, check_identity
from redline.training.step import BatchLoader, LossScale, Step, data_step, step_batch, to_device
from redline.training.step_log import StepLog
from redline.training.warmup import SmallestBatchTooLargeError, resumed_batch_plan, warm_up

# ----------------------------------------------------------------------------------------------------
# What a run shows of itself while it trains: metrics on what is held out, and texts it writes.
#
# Every rank computes the same sequences: what a job decides by them, all decide, and a model that is shared by rows
# takes all of them for a forward. The first rank's numbers count, and it alone writes them down.


class Evaluator:
    def __init__(
        self,
        parallel: ParallelStrategy,
        ema: Ema | None,
        monitor: Monitor,
        throughput: Throughput,
        pace: StepTimer,
        seed: int,
    ) -> None:
        self.parallel, self.ema, self.monitor = parallel, ema, monitor
        self.throughput, self.timer, self.seed = throughput, pace, seed
        self.evaluated_at: int | None = None

    def evaluate(self, state: TrainState, micro: int) -> TrainState:
        HEARTBEAT.at("evaluating", state.step)
        metrics: dict[str, Any] = {}
        with self.throughput.paused(), self._weights():
            self.timer.timed("evaluation", lambda: metrics.update(self._metrics(micro)))
        self.evaluated_at = state.step
        self.monitor.emit("eval", step=state.step, tokens=state.tokens, **metrics)
        return state.evaluated(metrics.get("loss"))

    def _metrics(self, micro: int) -> dict[str, Any]:
        objective, ranks = self.parallel.objective, self.parallel.ranks
        metrics, decided = ranks.broadcast([objective.evaluate(micro), objective.state()])
        if not ranks.is_main:
            objective.load_state(decided)
        return dict(metrics)

    def sample(self, state: TrainState, label: str, options: Eval) -> None:
        if options.samples:
            HEARTBEAT.at("sampling", state.step)
            with self.throughput.paused(), self._weights():
                self.timer.timed("samples", lambda: self._write(state, label, options))

    def _write(self, state: TrainState, label: str, options: Eval) -> None:
        count = 1 if label == "before" else options.samples  # noise is the same everywhere
        how = Sampling(count=count, tokens=options.sample_tokens, seed=self.seed)
        objective = self.parallel.objective
        prompt = objective.first_prompt() if options.prompt is None else options.prompt
        for sample in objective.sample(prompt, how):
            self.monitor.emit("sample", step=state.step, label=label, prompt=sample.prompt, text=sample.text)

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """The average of the weights, if one is kept."""
        if self.ema is not None:
            self.ema.swap()
        try:
            yield
        finally:
            self.parallel.rest()
            if self.ema is not None:
                self.ema.swap()


_DAMAGE = "damaged-data"  # in the ranks' store: what a rank has found


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
        ranks: Ranks = SINGLE_PROCESS,
        supervised: bool = False,
        skipped: Sequence[int] = (),
    ) -> None:
        self.resolved, self.recipe, self.train = resolved, resolved.recipe, resolved.recipe.train
        self.objective, self.run_directory, self.monitor = objective, run, monitor
        objective.log = monitor.status
        self.identity = {**identity, "model": model_identity(self.recipe)}  # what must be equal on resume
        self.ranks, self.supervised = ranks, supervised  # supervised: someone will go on after a failure
        self.skipped = list(skipped)  # steps whose data are left out
        self._warmup_told = any("train.warmup_steps=" in text for text in resolved.warnings)  # by what was expected
        objective.skipped_steps = len(self.skipped)
        self.device = torch.device(self.train.device)
        self.batch = resolved.batch
        self.state = TrainState()
        self.timer = StepTimer(clock)
        self.horizon = Horizon(horizon_steps, self.train.hours)
        self.signals = Signals()
        self.deadline = Deadline()
        peak = resolved.machine.peak("bf16") if objective.whole_rows or not resolved.flops.assumed else None
        self.throughput = Throughput(resolved.flops, peak and peak * ranks.size, clock)
        self.step_log = StepLog(
            monitor, self.throughput, self.device, self.train.max_nonfinite, self.recipe.data.seq_len
        )
        shared = ranks.joined and self.recipe.parallel.mode == "fsdp"
        together = SharedCommit(ranks) if shared else None
        self.checkpoints = CheckpointManager(
            run, monitor, self.timer, self.recipe.checkpoint, first=ranks.is_main, together=together
        )
        # one process of each machine checks the files there
        self.data_check = BackgroundCheck(objective.token_files if ranks.local_rank == 0 else lambda: ())
        self._agreed_s = 0.0  # the first rank's clock, as all know it

    # --- assembling

    def build(self, checkpoint: Path | None = None, initial: Tensors | None = None) -> None:
        """Make everything that trains; from a checkpoint, make it as it was; else from `initial` weights if given."""
        if checkpoint is not None:
            self.objective.load_state(read_state(checkpoint)["objective"])
        if self.train.deterministic:
            torch.use_deterministic_algorithms(True)
        build_on_all_ranks(self.objective, self.device, self.ranks, decided=checkpoint is not None)
        if initial is not None and checkpoint is None:
            learnt = {n: p for n, p in self.objective.model.named_parameters() if p.requires_grad}
            copy_weights(learnt, initial, "model.init_from")
        self.parallel = parallelize(self.recipe.parallel.mode, self.ranks, self.objective)
        self.parameters = self.parallel.parameters()
        self.optimizer = Optimizer(self.parallel.groups(), self.train, self.parallel.muon)
        self.scale = LossScale(self.train.precision, self.device)
        decay = self.train.ema
        self.ema = None if decay is None else Ema(self.parameters, decay, self.parallel.sharded)
        self.train_step = Step(
            self.objective,
            self.optimizer,
            parallel=self.parallel,
            scale=self.scale,
            ema=self.ema,
            clip=self.train.clip,
            seed=self.train.seed,
        )
        self.evaluator = Evaluator(self.parallel, self.ema, self.monitor, self.throughput, self.timer, self.train.seed)
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
        check_identity(state["identity"], self.identity, self.recipe, self.run_directory.path)
        with torch.no_grad():
            for stem, tensors in self.tensors().items():
                saved = read_rows(checkpoint, stem, tensors, self.parallel.places(tensors))
                copy_weights(tensors, saved, str(checkpoint))
        self.state = TrainState.from_json(state)
        if then := self.state.best_of_others(state.get("evaluated_on"), self.recipe.eval.sequences):
            self.state = replace(self.state, best_loss=None, best_step=None, evals_without_improvement=0)
            self.monitor.warn(then)
        self.horizon.load_state(state["decisions"]["horizon"], self.state.step, self.state.seconds)
        self.timer.closing |= state["decisions"].get("closing", {})
        self.batch = resumed_batch_plan(BatchPlan(*state["decisions"]["batch"]), self.batch)
        self.step_log.skipped, self.step_log.row = (
            int(state["skipped"]),
            [int(step) for step in state.get("bad_row", ())],
        )
        self.evaluator.evaluated_at = state.get("evaluated", self.state.step)  # older ones do not tell
        self.checkpoints.saved_at = self.state.step
        if warning := self.horizon.spent(self.state.step, self.state.seconds):
            self.monitor.warn(warning)

    # --- the run

    def run(self) -> Outcome:
        """Train until something says stop."""
        self.began_at = self.state.step
        self.timer.resume(self.state.seconds)
        with self.signals:
            try:
                return self.finish(self._train())
            except DamagedDataError as error:
                self._stop_for_damage(error)
                raise
            except Exception:
                # another rank may have found damaged data and left, which broke a collective here
                if self.ranks.is_main and (damage := self.ranks.peek(_DAMAGE)):
                    self._stop_for_damage(DamagedDataError(**damage))
                raise

    def _train(self) -> str:
        """Warm up and train; return why it stopped."""
        try:
            # one of several must not leave the others alone in a warm-up
            with self.signals.abandonable() if self.ranks.size == 1 else nullcontext():
                self.warm_up()
            if self.state.step > 0:
                self.evaluate_if_due()  # a run that was stopped while an evaluation was due has not done it yet
            elif not self.leaving():
                self.evaluate_and_sample("before")
            return self._loop()
        except StopRequested:
            return self.signals.reason or "preempted"
        except torch.OutOfMemoryError as error:
            self.batch = error.plan if isinstance(error, SmallestBatchTooLargeError) else self.batch
            self.checkpoints.settle()
            raise trouble.record_out_of_memory(self.run_directory.path, self._facts()) from None

    def _loop(self) -> str:
        data, ranks = self.recipe.data, self.ranks
        where = (self.objective, self.batch, self.device, data.workers, self.state.step)
        with self.data_check, BatchLoader(*where, depth=data.prefetch, ranks=ranks, skipped=self.skipped) as feed:
            self.timer.begin()
            self.throughput.begin()
            stop = self.should_stop()
            while not stop:
                HEARTBEAT.at("step", self.state.step)
                batch = feed.next(self.state.step)
                number = self.state.step
                result = self.train_step(number, batch, self._lr_factor(number), self._momentum(number))
                self.state = self.state.after(self.resolved.tokens_per_step, self.timer.seconds)
                self.timer.after()
                self.step_log.note(result, self.resolved.tokens_per_step, batch.seconds)
                self.replan_if_due()
                self.log_if_due()
                self.evaluate_if_due()
                if self.objective.batches_changed():
                    feed.restart(self.state.step)
                stop = self.should_stop()
                # not at the last step: the save that follows then knows what the last evaluation found
                if not stop and self.checkpoint_if_due():
                    stop = self.should_stop()
        return stop

    def warm_up(self) -> None:
        """Compile and run the worst-case batch: an OOM happens here, not in hour three."""
        HEARTBEAT.at("warming up", self.state.step)
        self.batch = warm_up(
            self._dry_run,
            self.batch,
            self.monitor,
            self.ranks,
            compiled=self.train.compile,
            recomputed=self.train.grad_checkpointing == "full",
            device=self.resolved.machine.name,
        )
        if self.train.graph:
            graph_if_possible(self.train_step, self.batch, self.device, self.monitor, alone=not self.ranks.joined)
        self.checkpoints.expect(self.tensors())

    def _dry_run(self, plan: BatchPlan) -> None:
        self.train_step.clear()
        with self.objective.dry_run():
            for micro, batch in self.objective.warmup_batches(plan.micro):
                rows = to_device(batch, self.device)
                # as one of the step's: gradients of the size they will have
                self.train_step.dry_run(step_batch(self.objective, [rows]).part_of(plan.global_batch / micro))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # --- what happens between steps

    def _lr_factor(self, step: int) -> float:
        return lr_factor(
            self.train.schedule,
            step=step,
            warmup=self.train.warmup_steps,
            progress=self.horizon.progress(step),
            floor=self.train.min_lr_ratio,
            decay_fraction=self.train.decay_fraction,
            pct_start=self.train.pct_start,
            per_step=self.horizon.per_step(step),
        )

    def _momentum(self, step: int) -> float | None:
        """Return what replaces AdamW's beta1 and Muon's momentum at this step, if train.cycle_momentum is given."""
        if self.train.cycle_momentum is None:
            return None
        return cycled_momentum(
            *self.train.cycle_momentum,
            step=step,
            warmup=self.train.warmup_steps,
            progress=self.horizon.progress(step),
            pct_start=self.train.pct_start,
            per_step=self.horizon.per_step(step),
        )

    def replan_if_due(self) -> None:
        if self.horizon.due(self.state.step, self.state.seconds if self.ranks.size == 1 else self._agreed_s):
            self.step_log.wait()  # steps that are only queued have not been paid for
            per_step = self.timer.seconds_per_step()
            seconds, per_step, reserve = self.ranks.broadcast([self.state.seconds, per_step, self.timer.reserve])
            if self.horizon.replan(self.state.step, seconds, per_step, reserve) is None:
                return
            end = self.horizon.end
            message = f"{1000 * per_step:.0f} ms a step: the schedule ends at step {end}"
            self.monitor.emit("replan", step=self.state.step, end=end, seconds_per_step=per_step, message=message)
            rises_by_steps = self.train.pct_start is None
            if rises_by_steps and not self._warmup_told and (told := warmup_warnings(self.train.warmup_steps, end)):
                self._warmup_told = True
                self.monitor.warn(told[0])

    def log_if_due(self) -> None:
        step = self.state.step
        eta = self.horizon.left_s(self.state.step, self.state.seconds, self.timer.seconds_per_step())
        self.monitor.tick(step, self.progress, eta)
        if step % self.recipe.monitor.log_every == 0 or step == self.horizon.end:
            self._log(eta)
        elif step % self.train.max_nonfinite == 0:
            self.step_log.look(step)

    def _log(self, eta_s: float | None) -> None:
        rate = self.train.lr * self._lr_factor(self.state.step - 1)
        self.step_log.emit(self.state, lr=rate, progress=self.progress, eta_s=eta_s)

    @property
    def progress(self) -> float:
        return self.horizon.done(self.state.step, self.state.seconds)

    def evaluate_if_due(self) -> None:
        due = self.state.step % self.recipe.eval.every == 0 and self.evaluator.evaluated_at != self.state.step
        if due and not self.leaving():
            self.evaluate()

    def evaluate(self) -> None:
        self.step_log.wait()  # for what is queued: in the pause, its time would be lost and its tokens counted
        self.state = self.evaluator.evaluate(self.state, self.batch.micro)
        if self.recipe.checkpoint.best and self.state.best_step == self.state.step > 0:
            self.save()

    def evaluate_and_sample(self, label: str) -> None:
        """Validation loss and samples, before and after."""
        if self.evaluator.evaluated_at != self.state.step:
            self.evaluate()
        self.evaluator.sample(self.state, label, self.recipe.eval)

    def checkpoint_if_due(self) -> bool:
        if due := self.state.step % self.recipe.checkpoint.every == 0:
            self.save()
        return due

    def save(self) -> None:
        HEARTBEAT.at("saving", self.state.step)
        self.data_check.poll(self.monitor.warn)  # nothing is saved that learned from damaged data knowingly
        self.step_log.wait()
        self.step_log.look(self.state.step)  # whoever goes on from here cannot look at these steps any more
        files = self.tensors()
        places = {stem: self.parallel.places(tensors) for stem, tensors in files.items()}
        with self.throughput.paused():
            self.checkpoints.save(self.state.step, files, self._record(), self.state.best_step, places)
            self.ranks.broadcast(None)  # who has no part in it waits here, where that may take its time

    def _record(self) -> dict[str, Any]:
        plan = self.batch
        return {
            "schema": 1,
            **replace(self.state, seconds=self.timer.seconds).to_json(),
            "seed": self.train.seed,
            "skipped": self.step_log.skipped,
            "bad_row": self.step_log.row,
            "evaluated": self.evaluator.evaluated_at,
            "evaluated_on": self.recipe.eval.sequences,
            "identity": self.identity,
            "objective": self.objective.state(),
            "decisions": {
                "batch": [plan.micro, plan.accumulation, plan.world],
                "horizon": self.horizon.state(),
                "closing": dict(self.timer.closing),
                **({"skipped": self.skipped} if self.skipped else {}),
            },
        }

    # --- stopping

    def should_stop(self) -> str | None:
        """What one rank was told, all do; clocks, files and losses are the first one's to look at."""
        if self.ranks.size == 1:
            self.data_check.poll(self.monitor.warn)
            return self._wish()
        wish = self._wish() if self.ranks.is_main else self.signals.reason
        try:
            self.data_check.poll(self.monitor.warn)
        except DamagedDataError as error:
            self.ranks.post(_DAMAGE, {"what": error.what, "where": error.where, "fix": error.fix})
            wish = "damaged_data"
        seconds = self.timer.seconds if self.ranks.is_main else 0.0
        code, self._agreed_s = self.ranks.max(REASONS.index(wish), seconds)
        if (reason := REASONS[int(code)]) == "damaged_data":
            # by a collective: rank 0 may host the store and leaves as soon as it has written the event
            raise DamagedDataError(**self.ranks.broadcast(self.ranks.wait_for(_DAMAGE) if self.ranks.is_main else None))
        return reason

    def leaving(self) -> bool:
        """Whether a signal has asked any of the ranks to stop."""
        return bool(self.ranks.max(float(bool(self.signals.reason)))[0])

    def _wish(self) -> str | None:
        if self.signals.reason:
            return self.signals.reason
        if reason := self.run_directory.stop_reason():
            return reason
        if self.step_log.storm:
            return "nonfinite"
        target, best = self.train.target_loss, self.state.best_loss
        if target is not None and best is not None and best <= target:
            return "target_loss"
        if self.state.out_of_patience(self.recipe.eval.patience):
            return "patience"
        if self.horizon.steps is not None and self.state.step >= self.horizon.steps:
            return "steps"
        one_more = self.timer.seconds_per_step() + self.timer.reserve
        if self.horizon.seconds is not None and self.timer.seconds + one_more >= self.horizon.seconds:
            return "hours"
        return "preempted" if self.deadline.within(one_more) else None

    def _rolls_back(self) -> bool:
        """Whether to go on from before the bad batches, without them: that is for a supervisor, and not for ever."""
        steps, path = self.step_log.storm, self.run_directory.path
        batches = [data_step(step, self.skipped) for step in steps]
        noted = (
            self.supervised and self.ranks.is_main and trouble.record_nonfinite(path, self._facts(), steps[0], batches)
        )
        return bool(self.ranks.broadcast(noted))

    def _last_look(self) -> None:
        """It may need more memory than any before it, for more texts; what was learnt is not lost by that."""
        try:
            self.evaluate_and_sample("after")
        except Exception as error:
            if self.ranks.size > 1:
                raise  # the others are still within it: they cannot save
            if not isinstance(error, torch.OutOfMemoryError):
                self.save()
                self.checkpoints.settle()
                raise
            self.monitor.warn("the last look does not fit into memory; smaller eval.samples or eval.sample_tokens may")

    def _facts(self) -> trouble.RunFacts:
        micro, checkpointing = self.batch.micro, self.train.grad_checkpointing
        return trouble.RunFacts(self.ranks.rank, self.state.step, micro, self.ranks.size, checkpointing)

    def _follow_directory(self) -> None:
        """Save where the directory is now, on every rank; without one, say that nothing more can be saved."""
        before = self.run_directory.path
        found = self.ranks.broadcast(str(self.run_directory.path) if self.run_directory.follow() else None)
        if found is None:
            self.monitor.warn(f"the run directory {before} was removed while the run was training: stopping unsaved")
            return
        self.run_directory.path = Path(found)
        self.monitor.warn(f"the run directory {before} was moved to {found} while the run was training: saving there")

    def finish(self, reason: str) -> Outcome:
        """The last look, which the last save knows of. Who was asked to leave saves first; to make room, none looks."""
        if reason == "moved":
            self._follow_directory()
        abandoned = reason == "nonfinite" and self._rolls_back()
        if self.step_log.said < self.state.step:  # where it ended was not known in advance
            self._log(None)
        if reason in OWN_ENDS:
            self._last_look()
        if not abandoned:
            self.save()
        saved = self.ranks.broadcast(abandoned or self.checkpoints.finish(self.state.step))
        if reason in ("interrupted", "requested"):
            self._last_look()
        self._emit_stop(reason, saved)
        if abandoned:
            self.checkpoints.settle()
            what = f"the batches of {len(self.step_log.storm)} steps in a row are not finite."
            raise trouble.NonFiniteError(what, fix="Going on from the last checkpoint before them, without them.")
        return Outcome(reason, self.state, saved)

    def _emit_stop(self, reason: str, saved: bool) -> None:
        hours = self.timer.seconds / 3600
        self.monitor.emit(
            "stop",
            reason=reason,
            step=self.state.step,
            tokens=self.state.tokens,
            hours=hours,
            cost_usd=self.monitor.cost(hours),
            **self.step_log.ending(reason, saved),
            **self._explanation(reason),
            **self.data_check.progress(),
        )

    def _explanation(self, reason: str) -> dict[str, Any]:
        """Return the message of a stop event whose reason needs one."""
        best = self.state.best_loss
        if reason == "patience" and best is not None:
            what = f"no lower validation loss in {self.recipe.eval.patience} evaluations (eval.patience)"
            return {"message": f"{what}; the best was {best:.4f} at step {self.state.best_step}"}
        return self.horizon.ending(reason, self.state.step)

    def _stop_for_damage(self, error: DamagedDataError) -> None:
        """Write down why the run ends. Nothing more is saved: the weights may have learned from the damaged file."""
        if not self.ranks.is_main:
            with suppress(RuntimeError):  # rank 0, which has the log and may host the store, knows it and has left
                self.ranks.post(_DAMAGE, {"what": error.what, "where": error.where, "fix": error.fix})
            return
        self.checkpoints.settle()
        since = [step for step in committed_steps(self.run_directory.checkpoints) if step > self.began_at]
        seen = f" Checkpoints from step {since[0]} on may have learned from it." if since else ""
        self.monitor.warn(f"{error.message()}{seen}")
        self._emit_stop("damaged_data", saved=False)
