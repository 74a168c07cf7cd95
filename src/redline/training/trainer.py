"""The training loop: train steps, and between them log, evaluate, save, re-plan and stop. It knows no job by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from redline.data.tokens import BackgroundCheck, DamagedDataError
from redline.errors import UserError
from redline.hardware.device import is_out_of_memory, synchronize
from redline.jobs.objective import Objective, Sampling
from redline.kernels.context import join_context
from redline.planning.batch import BatchPlan
from redline.planning.communication import SHARDED
from redline.planning.schedule import cycled_momentum, lr_factor
from redline.recipe.forecast import warmup_warnings
from redline.recipe.lock import check_model_identity, model_identity
from redline.recipe.resolve import Resolved
from redline.recipe.schema import Eval
from redline.runs.callbacks import Measure
from redline.runs.monitor import Monitor
from redline.training import recovery
from redline.training.checkpoint import CheckpointManager, Tensors, committed_steps, copy_weights, read_state
from redline.training.control import HEARTBEAT, Deadline, RunDirectory, Signals, StopRequested
from redline.training.distributed import SINGLE_PROCESS, Ranks
from redline.training.mirror import Mirror
from redline.training.mirrored_commit import shared_commit
from redline.training.optim import Ema, Optimizer
from redline.training.parallel import ParallelStrategy, build_parallel
from redline.training.schedule import Horizon, StepTimer, TrainState
from redline.training.sharded_checkpoint import read_rows
from redline.training.step import (
    BatchLoader,
    LossScale,
    SmallestBatchTooLargeError,
    Step,
    StepLog,
    Throughput,
    data_step,
    graph_if_possible,
    resumed_batch_plan,
    step_batch,
    to_device,
    warm_up,
)
from redline.vocabulary import Status, StopReason


@dataclass(frozen=True)
class Outcome:
    """How `Trainer.run` ended."""

    reason: StopReason
    state: TrainState
    saved: bool = True  # the last state is in a checkpoint

    @property
    def exit_code(self) -> int:
        return self.reason.exit_code(saved=self.saved)


# Reasons by their order of precedence. Ranks agree on a reason by the maximum of its index.
_REASONS = (None, *StopReason)
_DAMAGE_KEY = "damaged-data"  # in the store of the ranks: what a rank has found
_NOISE_TOKENS = 32  # of the sample that untrained weights write


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
        measure: Measure | None = None,
        signals: Signals | None = None,
        mirror: Mirror | None = None,
        elsewhere: Collection[int] = (),
    ) -> None:
        """`supervised`: a supervisor restarts the run after a failure. `skipped`: steps whose data are left out.

        `measure` adds figures to every evaluation: it gets the objective, and the names that are taken. `mirror` copies
        the checkpoints. `elsewhere`: the ranks that do not see rank 0's disk.
        """
        self.resolved, self.recipe, self.train = resolved, resolved.recipe, resolved.recipe.train
        self.objective, self.run_directory, self.monitor = objective, run, monitor
        objective.log = monitor.status
        self.identity = {**identity, "model": model_identity(self.recipe)}  # must be equal on resume
        self.ranks, self.supervised = ranks, supervised
        self.skipped = list(skipped)
        objective.skipped_steps = len(self.skipped)
        self._warned_of_warmup = resolved.warmup_warned
        self.device = torch.device(self.train.device)
        self.batch = resolved.batch
        self.state = TrainState()
        self.timer = StepTimer(clock)
        self.horizon = Horizon(horizon_steps, self.train.hours)
        self.signals = signals or Signals()
        self.measure = measure
        self.deadline = Deadline()
        peak = resolved.machine.peak("bf16") if objective.whole_rows or not resolved.flops.assumed else None
        threads = torch.get_num_threads() if self.device.type == "cpu" else None
        self.throughput = Throughput(resolved.flops, peak and peak * ranks.size, clock, threads=threads)
        self.step_log = StepLog(
            monitor, self.throughput, self.device, self.train.max_nonfinite, self.recipe.data.seq_len, ranks
        )
        sharded = ranks.joined and self.recipe.parallel.mode in SHARDED
        self.checkpoints = CheckpointManager(
            run,
            monitor,
            self.timer,
            self.recipe.checkpoint,
            is_main=ranks.is_main,
            shared_commit=shared_commit(ranks, run, self.recipe.checkpoint.mirror, mirror, elsewhere)
            if sharded
            else None,
            mirror=mirror,
        )
        # The token files are checked once per node, because each node may have its own copy.
        self.data_check = BackgroundCheck(objective.token_files if ranks.local_rank == 0 else lambda: ())
        self._rank0_seconds = 0.0  # rank 0's clock, as of the last `stop_reason`

    # --- building

    def build(self, checkpoint: Path | None = None, initial: Tensors | None = None) -> None:
        """Build model and optimizer, and restore the checkpoint if there is one; else start from `initial` weights."""
        if checkpoint is not None:
            self.objective.load_state(read_state(checkpoint)["objective"])
        if self.train.deterministic:
            torch.use_deterministic_algorithms(True)
        if (context := self.batch.context) > 1:
            self.objective.context = join_context(
                *(self.ranks.rank, self.ranks.size, context, self.recipe.parallel.context_backend), HEARTBEAT.waiting
            )
        self.parallel = build_parallel(
            *(self.recipe.parallel, self.ranks, self.objective, self.device),
            restored=checkpoint is not None,
            initial=None if checkpoint is not None else initial,
        )
        self.parameters = self.parallel.parameters()
        self.optimizer = Optimizer(self.parallel.groups(), self.train, self.parallel.make_muon)
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
        self.evaluator = Evaluator(
            self.parallel, self.ema, self.monitor, self.throughput, self.timer, self.train.seed, self.measure
        )
        if self.train.compile:
            self.objective.compile()
        if checkpoint is not None:
            self._restore(checkpoint)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the live tensors that a checkpoint holds: file → name → tensor."""
        files: dict[str, dict[str, torch.Tensor]] = {
            "model": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": {**self.optimizer.tensors(), **self.scale.tensors()},
        }
        return files if self.ema is None else {**files, "ema": self.ema.average}

    def _restore(self, checkpoint: Path) -> None:
        state = read_state(checkpoint)
        self._check_identity(state["identity"])
        with torch.no_grad():
            for stem, tensors in self.tensors().items():
                saved = read_rows(checkpoint, stem, tensors, self.parallel.shard_specs(tensors))
                copy_weights(tensors, saved, str(checkpoint))
        self.state = TrainState.from_json(state)
        before, now = state.get("evaluated_on"), self.recipe.eval.sequences
        if self.state.best_step is not None and before not in (None, now):
            self.state = self.state.without_best()
            self.monitor.warn(f"eval.sequences was {before} and is {now} now: the best step is determined anew")
        self.horizon.load_state(state["decisions"]["horizon"], self.state.step, self.state.seconds)
        self.timer.final_seconds |= state["decisions"].get("closing", {})
        self.batch = resumed_batch_plan(BatchPlan(*state["decisions"]["batch"]), self.batch)
        self.step_log.skipped = int(state["skipped"])
        self.step_log.streak = [int(step) for step in state.get("bad_row", ())]
        self.evaluator.evaluated_at = state.get("evaluated", self.state.step)  # older checkpoints do not have it
        self.checkpoints.saved_at = self.state.step
        if warning := self.horizon.resume_warning(self.state.step, self.state.seconds):
            self.monitor.warn(warning)

    def _check_identity(self, recorded: dict[str, Any]) -> None:
        """Refuse to resume with another model, other data or another tokenizer than the checkpoint's."""
        run = self.run_directory.path
        check_model_identity(recorded, self.recipe, run)
        known = {key: value for key, value in self.identity.items() if key != "model"}
        changed = [key for key, value in known.items() if recorded.get(key, value) != value]
        if changed:
            what = f"the {' and '.join(changed)} changed since this run began."
            raise UserError(what, where=str(run), fix="Put the old data back, or start a new run.")

    # --- the run

    def run(self) -> Outcome:
        """Train until there is a reason to stop; then evaluate, save and return how it ended."""
        self.resumed_at = self.state.step
        self.timer.resume_from(self.state.seconds)
        with self.signals:
            try:
                return self.finish(self._train())
            except DamagedDataError as error:
                self._stop_for_damage(error)
                raise
            except Exception:
                # Another rank may have found damaged data and exited, which broke a collective on this one.
                if self.ranks.is_main and (damage := self.ranks.peek(_DAMAGE_KEY)):
                    self._stop_for_damage(DamagedDataError(**damage))
                raise

    def _train(self) -> StopReason:
        """Warm up and train; return the reason to stop."""
        try:
            # With several ranks a signal must not interrupt the warm-up: the others would wait for this one in vain.
            with self.signals.abandonable() if self.ranks.size == 1 else nullcontext():
                self.warm_up()
            if self.state.step > 0:
                # A run that was stopped while an evaluation was due has not done it yet.
                if self._evaluation_due() and not self.stop_signaled():
                    self.evaluate()
            elif not self.stop_signaled():
                self.evaluate_and_sample("before")
            return self._loop()
        except StopRequested:
            return self.signals.reason or StopReason.PREEMPTED
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.batch = error.plan if isinstance(error, SmallestBatchTooLargeError) else self.batch
            self.checkpoints.wait()
            raise recovery.record_out_of_memory(self.run_directory.path, self._facts()) from None

    def _loop(self) -> StopReason:
        with self.data_check, self._batch_loader() as loader:
            self.timer.start_steps()
            self.throughput.begin()
            reason = self.stop_reason()
            while not reason:
                step = self.state.step
                HEARTBEAT.at("step", step)
                batch = loader.next(step)
                result = self.train_step(step, batch, self._lr_factor(step), self._momentum(step))
                self.state = self.state.after_step(self.resolved.tokens_per_step, self.timer.seconds)
                self.timer.step_done()
                self.step_log.record(result, self.resolved.tokens_per_step, batch.wait_seconds)
                self.replan_if_due()
                self.log_if_due()
                if self._evaluation_due() and not self.stop_signaled():
                    self.evaluate()
                if self.objective.batches_changed():
                    loader.restart(self.state.step)
                reason = self.stop_reason()
                # At the last step `finish` saves instead, after the final evaluation: its result is in the checkpoint.
                if not reason and self.state.step % self.recipe.checkpoint.every == 0:
                    self.save()
                    reason = self.stop_reason()
        return reason

    def _batch_loader(self) -> BatchLoader:
        data = self.recipe.data
        return BatchLoader(
            self.objective,
            self.batch,
            self.device,
            data.workers,
            self.state.step,
            depth=data.prefetch,
            ranks=self.ranks,
            skipped=self.skipped,
        )

    # --- warm-up

    def warm_up(self) -> None:
        """Compile, and find a micro-batch that fits by dry runs of the largest batch."""
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
            single_process = not self.ranks.joined
            graph_if_possible(self.train_step, self.batch, self.device, self.monitor, single_process=single_process)
        self.checkpoints.estimate_save_time(self.tensors())

    def _dry_run(self, plan: BatchPlan) -> None:
        self.train_step.clear()
        context = self.objective.context
        with self.objective.dry_run(), context.local_only() if context else nullcontext():
            for micro, batch in self.objective.warmup_batches(plan.micro):
                # Weighted as one of the step's micro-batches, so that the gradients are as large as in a step.
                weighted = step_batch(self.objective, [batch]).scale_weights(plan.global_batch / micro)
                rows = [to_device(part, self.device) for part in weighted.micros]
                self.train_step.dry_run(replace(weighted, micros=rows))
        synchronize(self.device)

    # --- learning rate and horizon

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
        """Return what replaces AdamW's beta1 and Muon's momentum at this step, if train.cycle_momentum is set."""
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
        """Fit the schedule of a run with train.hours to the measured speed."""
        # All ranks must decide alike, so with several ranks rank 0's clock counts.
        seconds = self.state.seconds if self.ranks.size == 1 else self._rank0_seconds
        if not self.horizon.replan_due(self.state.step, seconds):
            return
        self.step_log.wait()  # steps that are only queued on the GPU have not taken their time yet
        per_step = self.timer.seconds_per_step()
        seconds, per_step, reserve = self.ranks.broadcast([self.state.seconds, per_step, self.timer.reserve])
        if self.horizon.replan(self.state.step, seconds, per_step, reserve) is None:
            return
        end = self.horizon.end
        message = f"{1000 * per_step:.0f} ms a step: the schedule ends at step {end}"
        self.monitor.emit("replan", step=self.state.step, end=end, seconds_per_step=per_step, message=message)
        if self.train.pct_start is None and not self._warned_of_warmup:
            for warning in warmup_warnings(self.train.warmup_steps, end):
                self._warned_of_warmup = True
                self.monitor.warn(warning)

    @property
    def progress(self) -> float:
        return self.horizon.fraction_done(self.state.step, self.state.seconds)

    # --- log, evaluate, save

    def log_if_due(self) -> None:
        step = self.state.step
        eta_s = self.horizon.seconds_left(step, self.state.seconds, self.timer.seconds_per_step())
        self.monitor.tick(step, self.progress, eta_s)
        if step % self.recipe.monitor.log_every == 0 or step == self.horizon.end:
            self._log(eta_s)
        elif step % self.train.max_nonfinite == 0:
            # Otherwise a run whose steps are all bad would train on until the next log line, which may be far away.
            self.step_log.read_skipped(step)

    def _log(self, eta_s: float | None) -> None:
        lr = self.train.lr * self._lr_factor(self.state.step - 1)
        self.step_log.log(self.state, lr=lr, progress=self.progress, eta_s=eta_s)

    def _evaluation_due(self) -> bool:
        return self.state.step % self.recipe.eval.every == 0 and self.evaluator.evaluated_at != self.state.step

    def evaluate(self) -> None:
        self.step_log.wait()  # or the time of queued steps would count as evaluation, and raise the tokens/s
        self.state = self.evaluator.evaluate(self.state, self.batch.micro)
        if self.recipe.checkpoint.best and self.state.best_step == self.state.step > 0:
            self.save()

    def evaluate_and_sample(self, label: str) -> None:
        """Evaluate and write samples; `label` is "before" or "after" the training."""
        if self.evaluator.evaluated_at != self.state.step:
            self.evaluate()
        options = self.recipe.eval
        if label == "before" and self.recipe.model.base is None and self.recipe.model.init_from is None:
            # Random weights write noise. A line of it shows where the run began, and the first step comes sooner.
            options = options.model_copy(update={"sample_tokens": min(options.sample_tokens, _NOISE_TOKENS)})
        self.evaluator.sample(self.state, label, options)

    def save(self) -> None:
        HEARTBEAT.at("saving", self.state.step)
        self.data_check.poll(self.monitor.warn)  # do not save weights that may have learned from damaged data
        self.step_log.wait()
        self.step_log.read_skipped(self.state.step)  # a run that resumes here cannot read these steps any more
        files = self.tensors()
        if not self.parallel.saves:
            files = {stem: {} for stem in files}
        shard_specs = {stem: self.parallel.shard_specs(tensors) for stem, tensors in files.items()}
        with self.throughput.paused():
            self.checkpoints.save(self.state.step, files, self._record(), self.state.best_step, shard_specs)
            # The others wait here while rank 0 saves, with the long timeout of a broadcast. In the next step's
            # collectives they would run into the short one.
            self.ranks.broadcast(None)

    def _record(self) -> dict[str, Any]:
        """Return the content of state.json."""
        plan = self.batch
        return {
            "schema": 1,
            **replace(self.state, seconds=self.timer.seconds).to_json(),
            "seed": self.train.seed,
            "skipped": self.step_log.skipped,
            "bad_row": self.step_log.streak,
            "evaluated": self.evaluator.evaluated_at,
            "evaluated_on": self.recipe.eval.sequences,
            "identity": self.identity,
            "objective": self.objective.state(),
            "decisions": {
                "batch": plan.to_json(),
                "horizon": self.horizon.state(),
                "closing": dict(self.timer.final_seconds),
                **({"skipped": self.skipped} if self.skipped else {}),
            },
        }

    # --- stopping

    def stop_reason(self) -> StopReason | None:
        """Return why the run should stop now, or None; with several ranks, agree on it.

        Any rank may have received a signal or found damaged data. Clocks, files and losses are rank 0's to check: they
        may differ a little between ranks.
        """
        if self.ranks.size == 1:
            self.data_check.poll(self.monitor.warn)
            return self._own_stop_reason()
        own = self._own_stop_reason() if self.ranks.is_main else self.signals.reason
        try:
            self.data_check.poll(self.monitor.warn)
        except DamagedDataError as error:
            self.ranks.post(_DAMAGE_KEY, {"what": error.what, "where": error.where, "fix": error.fix})
            own = StopReason.DAMAGED_DATA
        seconds = self.timer.seconds if self.ranks.is_main else 0.0
        index, self._rank0_seconds = self.ranks.max(_REASONS.index(own), seconds)
        if (reason := _REASONS[int(index)]) is StopReason.DAMAGED_DATA:
            # Rank 0 sends the details by a collective: it may host the store, and exits soon after.
            damage = self.ranks.wait_for(_DAMAGE_KEY) if self.ranks.is_main else None
            raise DamagedDataError(**self.ranks.broadcast(damage))
        return reason

    def _own_stop_reason(self) -> StopReason | None:
        if self.signals.reason:
            return self.signals.reason
        if reason := self.run_directory.stop_reason():
            return reason
        if self.step_log.fatal_streak:
            return StopReason.NONFINITE
        target, best = self.train.target_loss, self.state.best_loss
        if target is not None and best is not None and best <= target:
            return StopReason.TARGET_LOSS
        if self.state.out_of_patience(self.recipe.eval.patience):
            return StopReason.PATIENCE
        if self.horizon.steps is not None and self.state.step >= self.horizon.steps:
            return StopReason.STEPS
        next_step = self.timer.seconds_per_step() + self.timer.reserve
        if self.horizon.seconds is not None and self.timer.seconds + next_step >= self.horizon.seconds:
            return StopReason.HOURS
        return StopReason.PREEMPTED if self.deadline.within(next_step) else None

    def stop_signaled(self) -> bool:
        """Return whether any rank has received a signal to stop."""
        return bool(self.ranks.max(float(bool(self.signals.reason)))[0])

    def finish(self, reason: StopReason) -> Outcome:
        """Evaluate, save, and write the stop event.

        A run that has reached its end evaluates first, so that the last checkpoint includes the result. A run that a
        person stops saves first. A preempted run only saves, because the machine may be gone in seconds.
        """
        if reason is StopReason.MOVED:
            self._follow_directory()
        rolled_back = reason is StopReason.NONFINITE and self._record_rollback()
        if self.step_log.logged_step < self.state.step:  # only after the step was it clear that it is the last one
            self._log(None)
        if reason.status is Status.FINISHED:
            self._final_evaluation()
        if not rolled_back:
            self.save()
        saved = self.ranks.broadcast(rolled_back or self.checkpoints.finish(self.state.step))
        if reason in (StopReason.INTERRUPTED, StopReason.REQUESTED):
            self._final_evaluation()
        self._emit_stop(reason, saved)
        if rolled_back:
            self.checkpoints.wait()
            what = f"the batches of {len(self.step_log.fatal_streak)} steps in a row are not finite."
            raise recovery.NonFiniteError(what, fix="The run restarts from the checkpoint before them, without them.")
        return Outcome(reason, self.state, saved)

    def _record_rollback(self) -> bool:
        """Record the bad batches, for a restart from before them that leaves them out.

        Return False if no supervisor restarts the run, or if it has been rolled back too often already.
        """
        steps, path = self.step_log.fatal_streak, self.run_directory.path
        batches = [data_step(step, self.skipped) for step in steps]
        recorded = (
            self.supervised and self.ranks.is_main and recovery.record_nonfinite(path, self._facts(), steps[0], batches)
        )
        return bool(self.ranks.broadcast(recorded))

    def _final_evaluation(self) -> None:
        """Evaluate and sample. A failure must not lose the trained weights: save them first, then raise."""
        try:
            self.evaluate_and_sample("after")
        except Exception as error:
            if self.ranks.size > 1:
                raise  # the other ranks are still in the evaluation, so no collective save is possible
            if not is_out_of_memory(error):
                self.save()
                self.checkpoints.wait()
                raise
            # The final one writes more samples than those before, so it may be the first that does not fit.
            self.monitor.warn(
                "the final evaluation ran out of memory. Use a smaller eval.samples or eval.sample_tokens"
            )

    def _facts(self) -> recovery.RunFacts:
        micro, checkpointing = self.batch.micro, self.train.grad_checkpointing
        where = (self.ranks.rank, self.state.step, micro, self.ranks.size)
        return recovery.RunFacts(*where, checkpointing, context=self.batch.context)

    def _follow_directory(self) -> None:
        """Find the moved run directory, on every rank. If it was removed, warn that nothing more can be saved."""
        before = self.run_directory.path
        now = self.ranks.broadcast(str(self.run_directory.path) if self.run_directory.follow() else None)
        if now is None:
            self.monitor.warn(f"the run directory {before} was removed while the run was training: stopping unsaved")
            return
        self.run_directory.path = Path(now)
        self.monitor.warn(f"the run directory {before} was moved to {now} while the run was training: saving there")

    def _emit_stop(self, reason: StopReason, saved: bool) -> None:
        hours = self.timer.seconds / 3600
        message = self._stop_message(reason)
        self.monitor.emit(
            "stop",
            reason=reason,
            step=self.state.step,
            tokens=self.state.tokens,
            hours=hours,
            cost_usd=self.monitor.cost(hours),
            **self.step_log.stop_fields(reason, saved),
            **({} if message is None else {"message": message}),
            **self.data_check.progress(),
        )

    def _stop_message(self, reason: StopReason) -> str | None:
        """Return the message of the stop event, for reasons that need one."""
        best = self.state.best_loss
        if reason is StopReason.PATIENCE and best is not None:
            what = f"no lower validation loss in {self.recipe.eval.patience} evaluations (eval.patience)"
            return f"{what}; the best was {best:.4f} at step {self.state.best_step}"
        return self.horizon.stop_message(reason, self.state.step)

    def _stop_for_damage(self, error: DamagedDataError) -> None:
        """Write the stop event. Nothing more is saved, because the weights may have learned from the damaged file."""
        if not self.ranks.is_main:
            # The store is gone if rank 0 hosted it, already knows of the damage and has exited.
            with suppress(RuntimeError):
                self.ranks.post(_DAMAGE_KEY, {"what": error.what, "where": error.where, "fix": error.fix})
            return
        self.checkpoints.wait()
        since = [step for step in committed_steps(self.run_directory.checkpoints) if step > self.resumed_at]
        affected = f" Checkpoints from step {since[0]} on may have learned from it." if since else ""
        self.monitor.warn(f"{error.message()}{affected}")
        self._emit_stop(StopReason.DAMAGED_DATA, saved=False)


class Evaluator:
    """Measures the validation loss and writes samples while the run trains, with the averaged weights if there are any.

    Every rank computes the same sequences: under FSDP every rank has to take part in a forward. Rank 0's numbers count,
    and rank 0 writes the events.
    """

    def __init__(
        self,
        parallel: ParallelStrategy,
        ema: Ema | None,
        monitor: Monitor,
        throughput: Throughput,
        timer: StepTimer,
        seed: int,
        measure: Measure | None,
    ) -> None:
        self.parallel, self.ema, self.monitor = parallel, ema, monitor
        self.throughput, self.timer, self.seed, self.measure = throughput, timer, seed, measure
        self.evaluated_at: int | None = None  # step of the last evaluation

    def evaluate(self, state: TrainState, micro: int) -> TrainState:
        HEARTBEAT.at("evaluating", state.step)
        metrics: dict[str, Any] = {}
        with self.throughput.paused(), self._averaged_weights():
            self.timer.timed("evaluation", lambda: metrics.update(self._metrics(micro)))
        self.evaluated_at = state.step
        self.monitor.emit("eval", step=state.step, tokens=state.tokens, **metrics)
        return state.after_evaluation(metrics.get("loss"))

    def _metrics(self, micro: int) -> dict[str, Any]:
        objective, ranks = self.parallel.objective, self.parallel.ranks
        # A job may decide something by its metrics, which differ a little between ranks. All use rank 0's decision.
        metrics, job_state = ranks.broadcast([objective.evaluate(micro), objective.state()])
        if not ranks.is_main:
            objective.load_state(job_state)
        return dict(metrics) if self.measure is None else {**metrics, **self._measured(self.measure, metrics)}

    def _measured(self, measure: Measure, known: Iterable[str]) -> dict[str, float]:
        """Compute the metrics of the Python program, without a change to random numbers or gradients."""
        model = self.parallel.objective.model
        was_training = model.training
        model.eval()
        try:
            with torch.random.fork_rng(), torch.no_grad():
                return measure(self.parallel.objective, known)
        finally:
            model.train(was_training)

    def sample(self, state: TrainState, label: str, options: Eval) -> None:
        if options.samples:
            HEARTBEAT.at("sampling", state.step)
            with self.throughput.paused(), self._averaged_weights():
                self.timer.timed("samples", lambda: self._write_samples(state, label, options))

    def _write_samples(self, state: TrainState, label: str, options: Eval) -> None:
        count = 1 if label == "before" else options.samples
        temperature, top_p = options.sample_temperature, options.sample_top_p
        sampling = Sampling(count, options.sample_tokens, self.seed, temperature, top_p=top_p)
        objective = self.parallel.objective
        prompt = objective.first_prompt() if options.prompt is None else options.prompt
        for sample in objective.sample(prompt, sampling):
            self.monitor.emit("sample", step=state.step, label=label, prompt=sample.prompt, text=sample.text)

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Use the moving average of the weights, if there is one."""
        if self.ema is not None:
            self.ema.swap()
        try:
            yield
        finally:
            self.parallel.reshard()
            if self.ema is not None:
                self.ema.swap()
