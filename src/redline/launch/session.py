"""A training session: one process's part of one run, from the locked directory to the exit code.

`start` decides what to train and where. `Session` builds the trainer, finds the checkpoint to continue from, writes the
lock and the first events, trains, and prints what to do next.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from redline.cache import read_bytes, sync
from redline.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    UsageError,
    UserError,
    redact,
    redact_all,
)
from redline.jobs.base import job
from redline.planning.communication import SHARDED
from redline.recipe.forecast import remaining_fields
from redline.recipe.load import STOPS, validate
from redline.recipe.lock import make_lock, read_lock, write_lock
from redline.recipe.resolve import Choice, DataFacts, Resolved, adapt_to_world, resolve, resolve_tried
from redline.recipe.schema import Recipe
from redline.runs.events import SCHEMA, Event, EventLog, NullEventLog, number, read_events, section
from redline.runs.monitor import Monitor, View, paid_until, price_of, sinks_for
from redline.training import recovery
from redline.training.control import FOLDER_VARIABLE, HEARTBEAT, RECOVERY, RunDirectory, Signals
from redline.training.supervisor import LOST, REFUSED, SUPERVISED
from redline.vocabulary import (
    CHECKPOINTS_FOLDER,
    EVENTS_FILE,
    LATEST_LINK,
    PROCESS_LOCK_FILE,
    RECIPE_LOCK_FILE,
    RUNS,
    SWEEP_FILE,
    TOKENIZER_FILE,
    StopReason,
)

if TYPE_CHECKING:
    from redline.evaluate.init_from import Initial
    from redline.hardware.machine import Machine
    from redline.runs.callbacks import Callbacks
    from redline.training.distributed import Ranks
    from redline.training.mirror import Mirror
    from redline.training.trainer import Outcome, Trainer


@dataclass
class SignalExit:
    """The exit code of the process if a signal arrives now."""

    code: int = EXIT_PREEMPTED


PYTHON_VARIABLE = "REDLINE_PYTHON"  # for ranks that `redline.train` starts: the `python` section of the lock, as JSON


@dataclass
class Host:
    """The program in which a run is trained: the command line, or a Python program that calls `redline.train`.

    A command ends with the run, so it may exit on a signal and prints what to do next. A program goes on: nothing may
    end its process, and afterwards `path` and `outcome` say what happened.
    """

    is_command: bool = True
    view: View | None = None  # shows the events; None: the console
    callbacks: Callbacks | None = None
    python: dict[str, Any] | None = None  # what only a Python program can give the run, for its lock
    path: Path | None = None
    outcome: Outcome | None = None

    @classmethod
    def command(cls) -> Host:
        return cls(python=json.loads(os.environ[PYTHON_VARIABLE]) if PYTHON_VARIABLE in os.environ else None)

    def refuse_foreign(self, run: Path, lock: Mapping[str, Any]) -> None:
        """Refuse to resume a run that needs what this program does not give: data or metrics from Python."""
        recorded = section(lock, PYTHON)
        given = self.python or {}
        missing = [name for name in recorded.get("metrics", ()) if name not in given.get("metrics", ())]
        needs_data = bool(recorded.get("data")) and recorded.get("data") != given.get("data")
        if not missing and not needs_data:
            return
        call = python_resume(str(run), recorded)
        if given.get("data") and needs_data:
            what = f"was trained on data with the fingerprint {recorded['data']!r}, and these have {given['data']!r}."
            raise UsageError(what, where=str(run), fix="Give the data that the run was started with.")
        what = "was started from Python, with " + " and ".join(
            [*(["data="] if needs_data else []), *([f"metrics= ({', '.join(missing)})"] if missing else [])]
        )
        raise UsageError(f"{what}, which this command does not have.", where=str(run), fix=f"Resume it there: {call}")


PYTHON = "python"  # the section of the lock


def python_resume(run: str, recorded: Mapping[str, Any]) -> str:
    """Return the line of Python that resumes a run."""
    words = [f"resume={run!r}"]
    if recorded.get("data"):
        words.append(f"data=…, fingerprint={recorded['data']!r}")
    if recorded.get("metrics"):
        words.append("metrics={" + ", ".join(f"{name!r}: …" for name in recorded["metrics"]) + "}")
    return f"redline.train({', '.join(words)})"


@dataclass
class Session:
    name: str  # of its recipe
    path: Path
    resolved: Resolved
    data: Any
    ranks: Ranks
    overrides: list[str]
    resumed: bool
    initial: Initial | None  # weights to start from
    continued_with: list[str] | None = None  # all overrides of a command with --continue
    host: Host = field(default_factory=Host)

    def train(self, console: View, signal_exit: SignalExit) -> int:
        from redline.jobs.objective import job_runtime
        from redline.training.mirrored_commit import ranks_on_other_disks

        memory_change = None
        if self.resumed:
            self.resolved, memory_change = reduce_after_out_of_memory(
                self.resolved, self.data.facts, self.path, self.ranks
            )
        recipe = self.resolved.recipe
        objective = job_runtime(recipe.objective).create(self.resolved, self.data)
        with locked_directory(self.path, self.ranks) as run:
            if self._creates_run:
                refuse_run(self.path)  # again: another process may have trained a run here while data were prepared
            with self._monitor(console) as monitor:
                with self._clean_up_on_failure():
                    url = recipe.checkpoint.mirror
                    restart = find_restart_point(run, self.ranks, monitor, resumed=self.resumed, mirror=url)
                    mirror = self._mirror(run, monitor, restart)
                    elsewhere = ranks_on_other_disks(run.path, self.ranks)
                    trainer = self._trainer(objective, run, monitor, restart, mirror, elsewhere)
                    self._build(trainer, restart, monitor)
                self._emit_start(trainer, monitor)
                if mirror is not None:
                    mirror.start()
                for message in (os.environ.get(RECOVERY), restart.message, memory_change):
                    if message:
                        monitor.emit("recovery", message=message)
                if self.host.callbacks is not None:
                    self.host.callbacks.request_stop = trainer.signals.request_stop
                try:
                    outcome = trainer.run()
                    # the run has ended: a signal must not turn that into "preempted"
                    signal_exit.code = outcome.exit_code
                finally:
                    if mirror is not None:
                        mirror.finish(_mirror_wait(trainer, ended=signal_exit.code == EXIT_DONE))
        self.path = run.path  # the directory may have been moved
        if self.ranks.is_main and self.path.is_dir():
            with suppress(OSError):  # a closed terminal or pipe; the run itself is complete
                if self.host.is_command:
                    print_next_steps(self.path, outcome, recipe)
                else:
                    write_final_report(self.path, outcome)
        self.host.path, self.host.outcome = self.path, outcome
        # Rank 0 still writes its report here. torchrun would kill it as soon as another rank has exited with an error.
        self.ranks.barrier()
        self.ranks.leave()
        return outcome.exit_code

    @contextmanager
    def _clean_up_on_failure(self) -> Iterator[None]:
        """If the model cannot be built, remove the files of the new run, so that the same command can be repeated."""
        before = {entry.name for entry in self.path.iterdir()} if self._creates_run else set()
        try:
            yield
        except BaseException:
            if self._creates_run and not (self.path / RECIPE_LOCK_FILE).exists():
                _remove_new_files(self.path, before)
            raise

    @property
    def _creates_run(self) -> bool:
        """Whether this process creates the files of the run."""
        return self.ranks.is_main and not self.resumed

    def _monitor(self, console: View) -> Monitor:
        def warn(text: str) -> None:
            console.event({"type": "warning", "message": text})

        recipe, is_main = self.resolved.recipe, self.ranks.is_main
        log = EventLog(self.path / EVENTS_FILE, on_error=warn) if is_main else NullEventLog()
        logged_recipe = redact_all(recipe.model_dump(mode="json"))
        sinks = sinks_for(recipe.monitor, self.path, logged_recipe, warn) if is_main else []
        sinks += [self.host.callbacks] if self.host.callbacks is not None and is_main else []
        monitor = Monitor(log, console, price_per_hour=recipe.monitor.price_per_hour, sinks=sinks)
        monitor.price = monitor.price and monitor.price * self.ranks.size
        return monitor

    def _mirror(self, run: RunDirectory, monitor: Monitor, restart: RestartPoint) -> Mirror | None:
        """Return what copies the checkpoints to `checkpoint.mirror`; None on all ranks but 0, and without the key."""
        options = self.resolved.recipe.checkpoint
        if options.mirror is None or not self.ranks.is_main:
            return None
        from redline.training.mirror import Mirror, mirrored_run

        return Mirror(mirrored_run(self.path, options.mirror), run, monitor, keep=options.keep, forget=restart.given_up)

    def _trainer(
        self,
        objective: Any,
        run: RunDirectory,
        monitor: Monitor,
        restart: RestartPoint,
        mirror: Mirror | None,
        elsewhere: Collection[int],
    ) -> Trainer:
        from redline.training.trainer import Trainer

        facts = self.data.facts
        identity = {"data": facts.fingerprint, "tokenizer": facts.tokenizer_fingerprint, **objective.identity()}
        return Trainer(
            self.resolved,
            objective,
            run,
            monitor,
            horizon_steps=self.resolved.horizon_steps,
            identity=identity,
            ranks=self.ranks,
            supervised=SUPERVISED in os.environ,
            skipped=restart.skipped,
            measure=self.host.callbacks.measure if self.host.callbacks and self.host.callbacks.metrics else None,
            signals=Signals(exits=self.host.is_command),
            mirror=mirror,
            elsewhere=elsewhere,
        )

    def _build(self, trainer: Trainer, restart: RestartPoint, monitor: Monitor) -> None:
        """Build the model; in a new run also write the tokenizer and the lock."""
        if self.resumed and restart.checkpoint is None and self.resolved.recipe.model.init_from is not None:
            from redline.evaluate.init_from import reopen_initial

            self.initial = reopen_initial(read_lock(self.path)["init_from"], RUNS, monitor.warn)
        monitor.status("building the model")
        trainer.build(restart.checkpoint, self.initial.tensors() if self.initial else None)
        trainer.state = replace(trainer.state, seconds=max(trainer.state.seconds, restart.seconds))
        if self.resumed and self.ranks.is_main:
            monitor.paid = paid_until(read_events(self.path / EVENTS_FILE), trainer.state.seconds / 3600)
        if not self._creates_run:
            return
        trainer.objective.save_tokenizer(self.path)
        if (tokenizer := self.path / TOKENIZER_FILE).exists():
            sync(tokenizer)  # before any checkpoint, which could not be used without it
        origin = self.initial.record() if self.initial else None
        run_id = uuid.uuid4().hex[:12]
        resolved = self._with_measured_choices(trainer)
        write_lock(self.path, make_lock(self.name, run_id, resolved, self.data.facts, origin, self.host.python))
        _update_latest_link(self.path)

    def _emit_start(self, trainer: Trainer, monitor: Monitor) -> None:
        train = self.resolved.recipe.train
        monitor.emit(
            "start",
            schema=SCHEMA,
            run_id=read_lock(self.path)["run_id"] if self.ranks.is_main else None,
            resumed_from=trainer.state.step if self.resumed else None,
            run_dir=self.path,
            recipe=self.name,
            device=self.resolved.machine.name,
            overrides=self.overrides,
            stops={key.removeprefix("train."): getattr(train, key.removeprefix("train.")) for key in STOPS},
            **({} if self.continued_with is None else {"continued_with": self.continued_with}),
        )
        price = price_of(self.resolved.recipe.monitor.price_per_hour)
        plan = self._with_measured_choices(trainer).plan_event(price=price)
        if self.resumed:
            plan["horizon"]["remaining"] = remaining_fields(plan, trainer.state.step, trainer.state.seconds)
        monitor.emit("plan", **plan)

    def _with_measured_choices(self, trainer: Trainer) -> Resolved:
        """Return the plan with the choices that the job made by measuring while the model was built."""
        measured = [Choice(*choice) for choice in trainer.objective.choices()]
        warnings = [*self.resolved.warnings, *trainer.objective.warnings()]
        return replace(self.resolved, choices=[*self.resolved.choices, *measured], warnings=warnings)


# ----------------------------------------------------------------------------------------------------
# The run directory.


@contextmanager
def locked_directory(path: Path, ranks: Ranks) -> Iterator[RunDirectory]:
    """Return the run directory; rank 0 holds its lock."""
    directory = RunDirectory(path)
    if not ranks.is_main:
        yield directory
        return
    with directory:
        yield directory


def refuse_run(path: Path) -> None:
    """Raise UsageError if the directory holds a run or a sweep already."""
    if (path / RECIPE_LOCK_FILE).exists():
        fix = f"Continue it with `redline train --resume {shlex.quote(str(path))}`, or choose another --run."
        raise UsageError("this directory holds a run.", where=str(path), fix=fix)
    if (path / SWEEP_FILE).exists():
        raise UsageError("this directory holds a sweep.", where=str(path), fix="Choose another --run.")


def _remove_new_files(path: Path, before: set[str]) -> None:
    """Remove the files of a run that could not be built, and the directory if nothing else is in it."""
    with suppress(OSError):
        if not read_bytes(path / EVENTS_FILE):
            (path / EVENTS_FILE).unlink()
        for file in (*path.glob(TOKENIZER_FILE), *path.glob(f".{RECIPE_LOCK_FILE}.*")):
            if file.name not in before:
                file.unlink()
        (path / PROCESS_LOCK_FILE).unlink()
        path.rmdir()


def _update_latest_link(path: Path) -> None:
    """Point runs/latest to this run, if it is in the folder of all runs."""
    if path.resolve().parent != RUNS.resolve():
        return
    temporary = RUNS / f".{LATEST_LINK}-{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.name)
        temporary.replace(RUNS / LATEST_LINK)
    except OSError:  # the file system has no links; `latest` then means the run with the newest date
        temporary.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------
# Resuming: from which checkpoint, without which data, and with how much memory.


@dataclass(frozen=True)
class RestartPoint:
    checkpoint: Path | None
    skipped: list[int]  # steps whose data are left out
    message: str | None  # what changes, if anything
    seconds: float = 0.0  # training time of the run, if it ended with the checkpoint's step
    given_up: tuple[int, ...] = ()  # steps of later checkpoints, which were deleted


def find_restart_point(
    run: RunDirectory, ranks: Ranks, monitor: Monitor, *, resumed: bool, mirror: str | None = None
) -> RestartPoint:
    """Find the checkpoint to continue from: the newest valid one from before batches that were not finite.

    It is on the disk or in the mirror. Newer checkpoints are deleted, because the run continues differently from here.
    """
    found: dict[str, Any] = {}
    if ranks.is_main:
        from redline.training.checkpoint import remove_temporaries

        remove_temporaries(run.checkpoints)
        found = {"name": None, "skipped": [], "message": None}
        found = _find_checkpoint(run, monitor, mirror) if resumed else found
    found = ranks.broadcast(found)
    if found["name"] is not None:
        _fetch_on_every_node(run.path, found["name"], mirror, ranks, monitor)
    checkpoint = None if found["name"] is None else run.checkpoints / found["name"]
    given_up = tuple(found.get("given_up", ()))
    return RestartPoint(checkpoint, found["skipped"], found["message"], found.get("seconds", 0.0), given_up)


def _find_checkpoint(run: RunDirectory, monitor: Monitor, mirror: str | None) -> dict[str, Any]:
    from redline.training.checkpoint import committed_steps, read_state, remove_checkpoint
    from redline.training.mirror import CheckpointFinder
    from redline.training.step import data_step

    failures = recovery.nonfinite_failures(recovery.read_failures(run.path))
    finder = CheckpointFinder(run.path, mirror, monitor.warn)
    newest = finder.newest()
    if newest is None:
        has_saved = bool(read_events(run.path / EVENTS_FILE).of_type("checkpoint"))
        if committed_steps(run.checkpoints):
            monitor.warn("this run has no valid checkpoint: it starts again at step 0")
        elif has_saved:
            monitor.warn("the checkpoints of this run are gone: it starts again at step 0")
    checkpoint, newer = newest, []
    while checkpoint is not None and not recovery.predates_failures(read_state(checkpoint), failures):
        newer.append(checkpoint)
        checkpoint = finder.newest(below=read_state(checkpoint)["step"])
    if checkpoint is None and newest is not None:
        # Every checkpoint is from after those batches, so they are in the past and cannot be left out any more.
        checkpoint, newer = newest, []
    given_up = [int(path.name.removeprefix("step-")) for path in newer]
    for path in newer:
        remove_checkpoint(path)
    state = None if checkpoint is None else read_state(checkpoint)
    known = [] if state is None else state["decisions"].get("skipped", [])
    skipped = recovery.steps_to_skip(state, failures, data_step(0 if state is None else state["step"], known))
    new = [step for step in skipped if step not in known]
    message = f"the data of steps {new[0]} to {new[-1]} were not finite, and are left out" if new else None
    seconds = 0.0 if state is None else _seconds_at_stop(run.path, state["step"])
    name = checkpoint and checkpoint.name
    return {"name": name, "skipped": skipped, "message": message, "seconds": seconds, "given_up": given_up}


def _fetch_on_every_node(run: Path, name: str, mirror: str | None, ranks: Ranks, monitor: Monitor) -> None:
    """Fetch rank 0's checkpoint on the nodes that do not share its disk. Raise UserError on all ranks if one cannot.

    One rank of each node fetches. The ranks tell each other through the store, because a download may take longer than
    the timeout of a collective.
    """
    if ranks.size == 1:
        return
    from redline.training.mirror import CheckpointFinder

    problem = None
    if ranks.local_rank == 0 and not ranks.is_main:
        try:
            CheckpointFinder(run, mirror, monitor.warn).ensure(name)
        except UserError as error:
            problem = f"rank {ranks.rank}: {error.message()}"
        except OSError as error:
            problem = f"rank {ranks.rank}: {name} cannot be fetched from the mirror: {error}."
    if not ranks.is_main:
        ranks.post(f"fetched-{ranks.rank}", problem)
    problems = [ranks.wait_for(f"fetched-{rank}") for rank in range(1, ranks.size)] if ranks.is_main else []
    if first := ranks.broadcast(next(filter(None, problems), None)):
        raise UserError(first)


def _mirror_wait(trainer: Trainer, *, ended: bool) -> float:
    """Return how many seconds the run waits for its last copies to the mirror: few if its machine may be taken away."""
    from redline.training.mirror import FINAL_WAIT_S, PREEMPTED_WAIT_S

    if ended:
        return FINAL_WAIT_S
    left = trainer.deadline.end - trainer.deadline.clock()
    return min(PREEMPTED_WAIT_S, max(0.0, left - 1.0))


def _seconds_at_stop(run: Path, step: int) -> float:
    """Return the training time in the last stop event of this step, or 0.

    The final samples are written after the last save and count as training time. With the time in the checkpoint alone
    the clock and the cost of the run would go back.
    """
    stops = [event for event in read_events(run / EVENTS_FILE).of_type("stop") if event.get("step") == step]
    return 3600 * (number(stops[-1], "hours") or 0.0) if stops else 0.0


def reduce_after_out_of_memory(
    resolved: Resolved, facts: DataFacts, run: Path, ranks: Ranks
) -> tuple[Resolved, str | None]:
    """Plan again with less memory if the run has run out of it; return the plan and a message about the change."""
    before = (resolved.batch, resolved.recipe.train.grad_checkpointing)
    sharded = resolved.recipe.parallel.mode in SHARDED
    reduced = None
    if ranks.is_main:
        plan, checkpointing = recovery.reduce_memory(*before, recovery.read_failures(run), sharded=sharded)
        reduced = [plan.micro, plan.accumulation, checkpointing]
    micro, accumulation, checkpointing = ranks.broadcast(reduced)
    after = (replace(resolved.batch, micro=micro, accumulation=accumulation), checkpointing)
    if (message := recovery.describe_change(before, after)) is None:
        return resolved, None
    update: dict[str, Any] = {"micro_batch": micro, "accumulation": accumulation, "grad_checkpointing": checkpointing}
    recipe = resolved.recipe.model_copy(update={"train": resolved.recipe.train.model_copy(update=update)})
    if checkpointing != before[1]:  # which kernels can be used depends on it
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"kernels": "auto"})})
    several = {"gpus": ranks.size // ranks.nodes, "nodes": ranks.nodes}
    return resolve(recipe, resolved.machine, facts, **several), message


# ----------------------------------------------------------------------------------------------------
# Several ranks: one console, one plan, and exit codes that a supervisor understands.


STOPPED_CODES = (EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED)
# Set by `redline train --gpus`: there standard output is the screen, and standard error goes to the log of the ranks.
CONSOLE = "REDLINE_CONSOLE"


def join_ranks(recipe: Recipe) -> Ranks:
    """Join the process group that the environment names, if it names one. Only rank 0 writes to the screen."""
    from redline.hardware.probe import detect_machine
    from redline.training.distributed import SINGLE_PROCESS, join, launched_distributed

    if not launched_distributed():
        HEARTBEAT.start(0)
        return SINGLE_PROCESS
    if os.environ.get("RANK") == "0" and CONSOLE in os.environ:
        os.dup2(1, 2)
    HEARTBEAT.start(int(os.environ["RANK"]) if os.environ["RANK"].isdigit() else 0)
    return join(detect_machine(recipe.train.device).device, recipe.parallel.timeout)


class RankLog:
    """The view of the ranks other than 0: it writes warnings to standard error, the log of the ranks."""

    def event(self, event: Event) -> None:
        if event["type"] == "warning":
            sys.stderr.write(redact(f"rank {os.environ.get('RANK')}: {event['message']}\n"))

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        return

    def close(self) -> None:
        return


def resolve_on_all_ranks(
    recipe: Recipe, machine: Machine, facts: DataFacts, ranks: Ranks, *, resumed: bool
) -> Resolved:
    """Resolve the recipe on rank 0 and use the result on every rank.

    The other ranks might choose differently, because their GPUs may have a little less memory or be in use.
    """
    several = {"gpus": ranks.size // ranks.nodes, "nodes": ranks.nodes}
    wanted = adapt_to_world(recipe, ranks.size) if resumed else recipe
    if not ranks.is_main:
        resolve(wanted, machine, facts, **several)  # raises what rank 0 raises, instead of waiting for it in vain
        return resolve(validate(ranks.broadcast(None), where="rank 0"), machine, facts, **several)
    from redline.models.fused_trial import fused_failure

    own = resolve_tried(wanted, machine, facts, fused_failure, falls_back=resumed, **several)
    ranks.broadcast(own.recipe.model_dump(mode="json"))
    return own


def exit_code_of(work: Callable[[], int]) -> int:
    """Run `work` and return its exit code, which a supervisor finds in the last heartbeat.

    A rank that fails exits at once, because background threads may still wait for the other ranks.
    """
    if "RANK" not in os.environ and FOLDER_VARIABLE not in os.environ:
        return work()
    why = ""
    try:
        code = work()
        why = "" if code in STOPPED_CODES else REFUSED  # a restart would end the same way
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except UserError as error:
        code, why = error.exit_code, getattr(error, "why", REFUSED)
        sys.stderr.write(redact(f"redline: {error.message()}\n"))
    except Exception as error:
        lost = _lost_rank_message(error)
        code, why = EXIT_FAILED, LOST if lost else type(error).__name__
        sys.stderr.write(redact(f"redline: {lost}\n" if lost else traceback.format_exc()))
    HEARTBEAT.end(code, why)
    if code not in STOPPED_CODES and "RANK" in os.environ:
        sys.stderr.flush()
        os._exit(code)
    return code


def _lost_rank_message(error: Exception) -> str:
    """Return a message if the error means that another rank is gone, or "" for any other error.

    A backward that fails in an all-reduce raises a plain RuntimeError; only torch's text names the library.
    """
    text = str(error)
    if "RANK" not in os.environ or not any(word in text for word in ("gloo", "NCCL", "ncclRemoteError", "TCPStore")):
        return ""
    return f"rank {os.environ['RANK']} lost another rank ({text.strip().splitlines()[0][:200]})."


# ----------------------------------------------------------------------------------------------------
# What is printed after training: where the report is, and which commands to try next.


def write_final_report(path: Path, outcome: Outcome) -> str | None:
    """Write the report and return a line about it; None for a preempted process, which has no time for a report."""
    if outcome.reason is StopReason.PREEMPTED:
        return None
    from redline.runs.report.page import write_report

    try:
        return f"report  {write_report(path)}"
    except UserError as error:  # the run itself is complete
        return f"report  not written: {error.what} Later: redline report {shlex.quote(str(path))}"


def print_next_steps(path: Path, outcome: Outcome, recipe: Recipe) -> None:
    if line := write_final_report(path, outcome):
        typer.echo(line, err=True)
    if outcome.reason is StopReason.NONFINITE:  # resuming would end in the same way
        weights = shlex.quote(_best_checkpoint(path))
        typer.echo(
            f"next    train again with a lower train.lr; model.init_from={weights} keeps these weights", err=True
        )
        return
    resume = f"redline train --resume {shlex.quote(str(path))}"
    unfinished = outcome.exit_code or outcome.reason is StopReason.MOVED
    for command in [resume] if unfinished else _next_commands(path, recipe, outcome.reason):
        typer.echo(f"next    {command}", err=True)


def _next_commands(path: Path, recipe: Recipe, reason: StopReason) -> list[str]:
    from redline.jobs.base import export_problems

    answers = f" --answers {answers_kind(recipe)}" if job(recipe.objective).can_answer(recipe) else ""
    python = recipe.data.source == "embedded"
    prompt = redact(recipe.eval.prompt or "") or ("a question" if answers else "import " if python else "")
    best_checkpoint = _best_checkpoint(path)
    run, best, model = (shlex.quote(str(word)) for word in (path, best_checkpoint, f"{path.resolve().name}-model"))
    prompt_option = f" --prompt {shlex.quote(prompt)}" if prompt else ""
    if reason is StopReason.PATIENCE:  # the last steps only showed that the best one was earlier
        run = best
    commands = [f"redline sample {run}{prompt_option}", f"redline eval {best}{answers}"]
    kind = job(recipe.objective)
    has_class = kind.exports and (recipe.model.base is not None or not export_problems(recipe.model))
    if has_class or kind.exports_code:
        commands.append(f"redline export {run} --out {model}")
    return commands


def _best_checkpoint(path: Path) -> str:
    """Return RUN@best if that checkpoint exists (there is none without an improvement), else RUN."""
    from redline.training.checkpoint import best_step, step_name

    folder = path / CHECKPOINTS_FOLDER
    step = best_step(folder)
    return f"{path}@best" if step is not None and (folder / step_name(step)).is_dir() else str(path)


def answers_kind(recipe: Recipe) -> str:
    """Return how to compare answers: as the job says, else as numbers for data of arithmetic problems."""
    if own := job(recipe.objective).answer_metric:
        return own
    numbers = any(name in str(recipe.data.source).lower() for name in ("gsm8k", "problems:"))
    return "gsm8k" if numbers else "match"
