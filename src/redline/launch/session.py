"""A run whose data and plan are there, from its directory to its last words."""

from __future__ import annotations

import os
import shlex
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.cache import read_bytes, sync
from redline.errors import EXIT_PREEMPTED, UsageError, redact_all
from redline.recipe.horizon import STOPS, remaining_fields
from redline.recipe.lock import make_lock, read_lock, write_lock
from redline.recipe.resolve import Choice, Resolved, adapt_to_world
from redline.runs.events import SCHEMA, EventLog, NullEventLog, read_events
from redline.runs.monitor import Monitor, View, paid_until, price_of
from redline.runs.summary import RUNS
from redline.runs.trackers import sinks_for
from redline.training.supervisor import RECOVERY, SUPERVISED
from redline.vocabulary import EVENTS_FILE, PROCESS_LOCK_FILE, RECIPE_LOCK_FILE, SWEEP_FILE

if TYPE_CHECKING:
    from redline.evaluate.init_from import Initial
    from redline.training.distributed import Ranks
    from redline.training.run_directory import RunDirectory
    from redline.training.trainer import Trainer
from typing import TYPE_CHECKING

import typer

from redline.errors import UserError, redact
from redline.jobs.base import job
from redline.recipe.schema import Recipe

if TYPE_CHECKING:
    from redline.training.state import Outcome
import sys
import traceback
from collections.abc import Callable

from redline.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from redline.recipe.load import validate
from redline.recipe.resolve import DataFacts, resolve
from redline.runs.events import Event, number
from redline.training import recovery as trouble
from redline.training.heartbeat import HEARTBEAT
from redline.training.run_directory import RunDirectory
from redline.training.supervisor import REFUSED

if TYPE_CHECKING:
    from redline.hardware.machine import Machine
    from redline.training.distributed import Ranks


# ----------------------------------------------------------------------------------------------------
# What is said when training is over: where the report lies, and what to try next.


def closing(path: Path, outcome: Outcome, recipe: Recipe) -> None:
    """What was trained and saved stays so, whether or not anybody reads this."""
    with suppress(OSError):  # of a pipe or a terminal that is gone
        _say(path, outcome, recipe)


def _say(path: Path, outcome: Outcome, recipe: Recipe) -> None:
    if outcome.reason != "preempted":  # who is asked to make room does not draw pictures
        from redline.runs.report.page import write_report

        try:
            typer.echo(f"report  {write_report(path)}", err=True)
        except UserError as error:  # the run itself is safe
            typer.echo(f"report  not written: {error.what} Later: redline report {shlex.quote(str(path))}", err=True)
    if outcome.reason == "nonfinite":  # going on from here would end here again
        anew = (
            f"train anew with a lower train.lr; model.init_from={shlex.quote(_best(path))} begins with what was learnt"
        )
        typer.echo(f"next    {anew}", err=True)
        return
    again = f"redline train --resume {shlex.quote(str(path))}"
    unfinished = outcome.exit_code or outcome.reason == "moved"
    for command in [again] if unfinished else _next_commands(path, recipe, outcome.reason):
        typer.echo(f"next    {command}", err=True)


def _next_commands(path: Path, recipe: Recipe, reason: str) -> list[str]:
    from redline.models.families import inexact

    answers = f" --answers {answers_kind(recipe)}" if job(recipe.objective).can_answer(recipe) else ""
    python = recipe.data.source == "embedded"
    prompt = redact(recipe.eval.prompt or "") or ("a question" if answers else "import " if python else "")
    run, best, model = (shlex.quote(str(word)) for word in (path, _best(path), f"{path.resolve().name}-model"))
    begin = f" --prompt {shlex.quote(prompt)}" if prompt else ""
    if reason == "patience":  # the run went on after its best step to see that it was the best
        run = best
    commands = [f"redline sample {run}{begin}", f"redline eval {best}{answers}"]
    if job(recipe.objective).exports and (recipe.model.base is not None or not inexact(recipe.model)):
        commands.append(f"redline export {run} --out {model}")
    return commands


def _best(path: Path) -> str:
    """Its best weights, where they were kept: none are when nothing was learnt."""
    from redline.training.checkpoint import best_step, step_name

    folder = path / "checkpoints"
    step = best_step(folder)
    return f"{path}@best" if step is not None and (folder / step_name(step)).is_dir() else str(path)


def answers_kind(recipe: Recipe) -> str:
    """How its answers are best compared: as its job says, else numbers as numbers."""
    if own := job(recipe.objective).answer_metric:
        return own
    numbers = any(name in str(recipe.data.source).lower() for name in ("gsm8k", "problems:"))
    return "gsm8k" if numbers else "match"


# ----------------------------------------------------------------------------------------------------
# One run by several processes: who speaks, who prepares first, and what all of them take from the first.


LEFT = (EXIT_DONE, EXIT_PREEMPTED, EXIT_INTERRUPTED)
CONSOLE = "REDLINE_CONSOLE"  # set where standard output is the screen, and standard error is the ranks' log


def join_ranks(recipe: Recipe) -> Ranks:
    """What the environment says; the screen is the first rank's."""
    from redline.hardware.probe import detect_machine
    from redline.training.distributed import SINGLE_PROCESS, join, launched_distributed

    if not launched_distributed():
        HEARTBEAT.start(0)
        return SINGLE_PROCESS
    if os.environ.get("RANK") == "0" and CONSOLE in os.environ:
        os.dup2(1, 2)
    HEARTBEAT.start(int(os.environ["RANK"]) if os.environ["RANK"].isdigit() else 0)
    return join(detect_machine(recipe.train.device).device, recipe.parallel.timeout)


class Quiet:
    """Of a rank that is not the first: what it warns of goes to the log of the ranks."""

    def event(self, event: Event) -> None:
        if event["type"] == "warning":
            sys.stderr.write(redact(f"rank {os.environ.get('RANK')}: {event['message']}\n"))

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        return

    def close(self) -> None:
        return


def resolved_alike(recipe: Recipe, machine: Machine, facts: DataFacts, ranks: Ranks, *, resumed: bool) -> Resolved:
    """The first rank decides, and the others have its recipe: their cards may be a little smaller, or busy."""
    several = {"gpus": ranks.size // ranks.nodes, "nodes": ranks.nodes}
    first = resolve(adapt_to_world(recipe, ranks.size) if resumed else recipe, machine, facts, **several)
    tree = ranks.broadcast(first.recipe.model_dump(mode="json"))
    return first if ranks.is_main else resolve(validate(tree, where="the first rank"), machine, facts, **several)


def after_trouble(resolved: Resolved, facts: DataFacts, run: Path, ranks: Ranks) -> tuple[Resolved, str | None]:
    """With less at once, where that did not fit; and what was changed."""
    before = (resolved.batch, resolved.recipe.train.grad_checkpointing)
    sharded = resolved.recipe.parallel.mode == "fsdp"
    found = trouble.reduce_memory(*before, trouble.read_failures(run), sharded=sharded) if ranks.is_main else None
    taken = ranks.broadcast(found and [found[0].micro, found[0].accumulation, found[1]])
    micro, accumulation, checkpointing = taken
    after = (replace(resolved.batch, micro=micro, accumulation=accumulation), checkpointing)
    if (text := trouble.describe_change(before, after)) is None:
        return resolved, None
    update: dict[str, Any] = {"micro_batch": micro, "accumulation": accumulation, "grad_checkpointing": checkpointing}
    recipe = resolved.recipe.model_copy(update={"train": resolved.recipe.train.model_copy(update=update)})
    if checkpointing != before[1]:  # which blocks there are depends on it
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"kernels": "auto"})})
    several = {"gpus": ranks.size // ranks.nodes, "nodes": ranks.nodes}
    return resolve(recipe, resolved.machine, facts, **several), text


@contextmanager
def held(path: Path, ranks: Ranks) -> Iterator[RunDirectory]:
    """The run's directory; the first rank has its lock."""
    directory = RunDirectory(path)
    if not ranks.is_main:
        yield directory
        return
    with directory:
        yield directory


@dataclass(frozen=True)
class Beginning:
    checkpoint: Path | None
    skipped: list[int]  # steps whose data are left out
    changed: str | None  # in words
    seconds: float = 0.0  # that the run had taken when it ended, where that was after this checkpoint's last step


def where_to_begin(run: RunDirectory, ranks: Ranks, monitor: Monitor, *, resumed: bool) -> Beginning:
    """The newest checkpoint that is valid, and of before the batches that were not finite; newer ones are left behind,
    for the run takes another way from here."""
    found: dict[str, Any] = {}
    if ranks.is_main:
        from redline.training.checkpoint import remove_temporaries

        remove_temporaries(run.checkpoints)
        found = _look_back(run, monitor) if resumed else {"name": None, "skipped": [], "changed": None}
    found = ranks.broadcast(found)
    checkpoint = None if found["name"] is None else run.checkpoints / found["name"]
    return Beginning(checkpoint, found["skipped"], found["changed"], found.get("seconds", 0.0))


def _look_back(run: RunDirectory, monitor: Monitor) -> dict[str, Any]:
    from redline.training.checkpoint import committed_steps, discard, newest_valid, read_state
    from redline.training.step import data_step

    storms = trouble.nonfinite_failures(trouble.read_failures(run.path))
    newest = newest_valid(run.checkpoints, monitor.warn)
    if newest is None:
        saved = bool(read_events(run.path / EVENTS_FILE).of_type("checkpoint"))
        if committed_steps(run.checkpoints) or saved:
            none = "is valid" if committed_steps(run.checkpoints) else "is left"
            monitor.warn(f"no checkpoint of this run {none}: it begins again at step 0")
    checkpoint, left = newest, []
    while checkpoint is not None and not trouble.predates_failures(read_state(checkpoint), storms):
        left.append(checkpoint)
        checkpoint = newest_valid(run.checkpoints, monitor.warn, below=read_state(checkpoint)["step"])
    if checkpoint is None and newest is not None:  # all that is kept is of after them: they are past
        checkpoint, left = newest, []
    for path in left:
        discard(path)
    state = None if checkpoint is None else read_state(checkpoint)
    known = [] if state is None else state["decisions"].get("skipped", [])
    skipped = trouble.steps_to_skip(state, storms, data_step(0 if state is None else state["step"], known))
    new = [step for step in skipped if step not in known]
    changed = f"the data of steps {new[0]} to {new[-1]} were not finite, and are left out" if new else None
    seconds = 0.0 if state is None else _ended_after(run.path, state["step"])
    return {"name": checkpoint and checkpoint.name, "skipped": skipped, "changed": changed, "seconds": seconds}


def _ended_after(run: Path, step: int) -> float:
    """Seconds. Texts are written after the last save, and were paid for, too: a clock that knows the save alone goes
    back."""
    stops = [event for event in read_events(run / EVENTS_FILE).of_type("stop") if event.get("step") == step]
    return 3600 * (number(stops[-1], "hours") or 0.0) if stops else 0.0


def _lost_another(error: Exception) -> str:
    """What a gradient says that was on its way to a rank which is gone; empty for any other error."""
    text = str(error)
    if "RANK" not in os.environ or not any(word in text for word in ("gloo", "NCCL", "ncclRemoteError", "TCPStore")):
        return ""
    return f"rank {os.environ['RANK']} lost another one ({text.strip().splitlines()[0][:200]})."


def ended(work: Callable[[], int]) -> int:
    """Its exit code. Last words for a watch, if there is one; and one of several leaves at once when it fails,
    whatever threads still wait for the others."""
    if "RANK" not in os.environ and "REDLINE_PULSE" not in os.environ:
        return work()
    why = ""
    try:
        code = work()
        why = "" if code in LEFT else REFUSED  # it ended by itself
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else EXIT_FAILED
    except UserError as error:
        code, why = error.exit_code, getattr(error, "why", REFUSED)
        sys.stderr.write(redact(f"redline: {error.message()}\n"))
    except Exception as error:
        lost = _lost_another(error)
        code, why = EXIT_FAILED, "lost" if lost else type(error).__name__
        sys.stderr.write(redact(f"redline: {lost}\n" if lost else traceback.format_exc()))
    HEARTBEAT.end(code, why)
    if code not in LEFT and "RANK" in os.environ:
        sys.stderr.flush()
        os._exit(code)
    return code


@dataclass
class Leaving:
    """What a signal that comes now ends with."""

    code: int = EXIT_PREEMPTED


@dataclass
class OneRun:
    name: str  # of its recipe
    path: Path
    resolved: Resolved
    data: Any
    ranks: Ranks
    overrides: list[str]
    resumed: bool
    initial: Initial | None  # weights to begin with
    continued_with: list[str] | None = None  # all overrides of a command with --continue

    def train(self, console: View, leaving: Leaving) -> int:
        from redline.jobs.objective import job_runtime

        smaller = None
        if self.resumed:
            self.resolved, smaller = after_trouble(self.resolved, self.data.facts, self.path, self.ranks)
        recipe = self.resolved.recipe
        objective = job_runtime(recipe.objective).create(self.resolved, self.data)
        with held(self.path, self.ranks) as run:
            if self._founds:
                refuse_run(self.path)  # another process may have begun one, and ended it, while data were prepared
            with self._monitor(console) as monitor:
                with self._whole_or_not():
                    begin = where_to_begin(run, self.ranks, monitor, resumed=self.resumed)
                    trainer = self._trainer(objective, run, monitor, begin)
                    self._build(trainer, begin, monitor)
                self._introduce(trainer, monitor)
                for what in (os.environ.get(RECOVERY), begin.changed, smaller):
                    if what:
                        monitor.emit("recovery", message=what)
                outcome = trainer.run()
                leaving.code = outcome.exit_code  # what is done stays done, whoever wants this process gone now
        self.path = run.path  # someone may have moved it meanwhile
        if self.ranks.is_main and self.path.is_dir():
            closing(self.path, outcome, recipe)
        self.ranks.barrier()  # whoever leaves first may not have the others ended: the first still writes its report
        self.ranks.leave()
        return outcome.exit_code

    @contextmanager
    def _whole_or_not(self) -> Iterator[None]:
        """What cannot be built leaves no run behind."""
        theirs = {entry.name for entry in self.path.iterdir()} if self._founds else set()
        try:
            yield
        except BaseException:
            if self._founds and not (self.path / RECIPE_LOCK_FILE).exists():
                _leave_no_trace(self.path, theirs)
            raise

    @property
    def _founds(self) -> bool:
        """Whether it is this process that makes the run what it is."""
        return self.ranks.is_main and not self.resumed

    def _monitor(self, console: View) -> Monitor:
        def warn(text: str) -> None:
            console.event({"type": "warning", "message": text})

        recipe, first = self.resolved.recipe, self.ranks.is_main
        log = EventLog(self.path / EVENTS_FILE, on_error=warn) if first else NullEventLog()
        sinks = sinks_for(recipe.monitor, self.path, redact_all(recipe.model_dump(mode="json")), warn) if first else []
        monitor = Monitor(log, console, price_per_hour=recipe.monitor.price_per_hour, sinks=sinks)
        monitor.price = monitor.price and monitor.price * self.ranks.size
        return monitor

    def _trainer(self, objective: Any, run: RunDirectory, monitor: Monitor, begin: Beginning) -> Trainer:
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
            skipped=begin.skipped,
        )

    def _build(self, trainer: Trainer, begin: Beginning, monitor: Monitor) -> None:
        """The model, and then the run."""
        if self.resumed and begin.checkpoint is None and self.resolved.recipe.model.init_from is not None:
            from redline.evaluate.init_from import reopen_initial

            self.initial = reopen_initial(read_lock(self.path)["init_from"], RUNS, monitor.warn)
        monitor.status("building the model")
        trainer.build(begin.checkpoint, self.initial.tensors() if self.initial else None)
        trainer.state = replace(trainer.state, seconds=max(trainer.state.seconds, begin.seconds))
        if self.resumed and self.ranks.is_main:
            monitor.paid = paid_until(read_events(self.path / EVENTS_FILE), trainer.state.seconds / 3600)
        if not self._founds:
            return
        trainer.objective.save_tokenizer(self.path)
        if (tokenizer := self.path / "tokenizer.json").exists():
            sync(tokenizer)  # before there is a checkpoint that cannot be read without it
        origin = self.initial.record() if self.initial else None
        run_id = uuid.uuid4().hex[:12]
        write_lock(self.path, make_lock(self.name, run_id, self._decided(trainer), self.data.facts, origin))
        _point_latest(self.path)

    def _introduce(self, trainer: Trainer, monitor: Monitor) -> None:
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
        plan = self._decided(trainer).plan_event(price=price_of(self.resolved.recipe.monitor.price_per_hour))
        if self.resumed:
            plan["horizon"]["remaining"] = remaining_fields(plan, trainer.state.step, trainer.state.seconds)
        monitor.emit("plan", **plan)

    def _decided(self, trainer: Trainer) -> Resolved:
        """With what was measured while the model was built."""
        measured = [Choice(*choice) for choice in trainer.objective.choices()]
        warnings = [*self.resolved.warnings, *trainer.objective.warnings()]
        return replace(self.resolved, choices=[*self.resolved.choices, *measured], warnings=warnings)


def refuse_run(path: Path) -> None:
    if (path / RECIPE_LOCK_FILE).exists():
        fix = f"Go on with it: redline train --resume {shlex.quote(str(path))}; or choose another --run."
        raise UsageError("this directory holds a run.", where=str(path), fix=fix)
    if (path / SWEEP_FILE).exists():
        raise UsageError("this directory holds a sweep.", where=str(path), fix="Choose another --run.")


def _leave_no_trace(path: Path, theirs: set[str]) -> None:
    """What could not be built never was a run; a directory that holds anything else stays."""
    with suppress(OSError):
        if not read_bytes(path / "events.jsonl"):
            (path / "events.jsonl").unlink()
        for made in (*path.glob("tokenizer.json"), *path.glob(f".{RECIPE_LOCK_FILE}.*")):
            if made.name not in theirs:
                made.unlink()
        (path / PROCESS_LOCK_FILE).unlink()
        path.rmdir()


def _point_latest(path: Path) -> None:
    """runs/latest → the newest run, when it lies there."""
    root = RUNS
    if path.resolve().parent != root.resolve():
        return
    temporary = root / f".latest-{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.name)
        temporary.replace(root / "latest")
    except OSError:  # a file system without links: `latest` then means the newest run
        temporary.unlink(missing_ok=True)
