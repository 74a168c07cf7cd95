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
from redline.cli.closing import closing
from redline.cli.paths import RUNS
from redline.cli.together import after_trouble, held, where_to_begin
from redline.errors import EXIT_PREEMPTED, UsageError, cleaned
from redline.monitor.events import SCHEMA, EventLog, NullEventLog, read_events
from redline.monitor.monitor import Monitor, View, paid_until, price_of
from redline.monitor.runs import EVENTS, LOCK_FILE, SWEEP
from redline.monitor.sinks import sinks_for
from redline.recipe.horizon import STOPS, remaining_fields
from redline.recipe.lock import LOCK, make_lock, read_lock, write_lock
from redline.recipe.resolve import Choice, Resolved
from redline.train.supervise import RECOVERY, SUPERVISED

if TYPE_CHECKING:
    from redline.cli.together import Beginning
    from redline.evaluate.initial import Initial
    from redline.train.ranks import Ranks
    from redline.train.rundir import RunDirectory
    from redline.train.trainer import Trainer


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
        from redline.objectives import objective_module

        smaller = None
        if self.resumed:
            self.resolved, smaller = after_trouble(self.resolved, self.data.facts, self.path, self.ranks)
        recipe = self.resolved.recipe
        objective = objective_module(recipe.objective).create(self.resolved, self.data)
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
        if self.ranks.first and self.path.is_dir():
            closing(self.path, outcome, recipe)
        self.ranks.wait()  # whoever leaves first may not have the others ended: the first still writes its report
        self.ranks.leave()
        return outcome.exit_code

    @contextmanager
    def _whole_or_not(self) -> Iterator[None]:
        """What cannot be built leaves no run behind."""
        theirs = {entry.name for entry in self.path.iterdir()} if self._founds else set()
        try:
            yield
        except BaseException:
            if self._founds and not (self.path / LOCK).exists():
                _leave_no_trace(self.path, theirs)
            raise

    @property
    def _founds(self) -> bool:
        """Whether it is this process that makes the run what it is."""
        return self.ranks.first and not self.resumed

    def _monitor(self, console: View) -> Monitor:
        def warn(text: str) -> None:
            console.event({"type": "warning", "message": text})

        recipe, first = self.resolved.recipe, self.ranks.first
        log = EventLog(self.path / EVENTS, on_error=warn) if first else NullEventLog()
        sinks = sinks_for(recipe.monitor, self.path, cleaned(recipe.model_dump(mode="json")), warn) if first else []
        monitor = Monitor(log, console, price_per_hour=recipe.monitor.price_per_hour, sinks=sinks)
        monitor.price = monitor.price and monitor.price * self.ranks.size
        return monitor

    def _trainer(self, objective: Any, run: RunDirectory, monitor: Monitor, begin: Beginning) -> Trainer:
        from redline.train.trainer import Trainer

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
            from redline.evaluate.initial import reopen_initial

            self.initial = reopen_initial(read_lock(self.path)["init_from"], RUNS, monitor.warn)
        monitor.say("building the model")
        trainer.build(begin.checkpoint, self.initial.tensors() if self.initial else None)
        trainer.state = replace(trainer.state, seconds=max(trainer.state.seconds, begin.seconds))
        if self.resumed and self.ranks.first:
            monitor.paid = paid_until(read_events(self.path / EVENTS), trainer.state.seconds / 3600)
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
            run_id=read_lock(self.path)["run_id"] if self.ranks.first else None,
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
    if (path / LOCK).exists():
        fix = f"Go on with it: redline train --resume {shlex.quote(str(path))}; or choose another --run."
        raise UsageError("this directory holds a run.", where=str(path), fix=fix)
    if (path / SWEEP).exists():
        raise UsageError("this directory holds a sweep.", where=str(path), fix="Choose another --run.")


def _leave_no_trace(path: Path, theirs: set[str]) -> None:
    """What could not be built never was a run; a directory that holds anything else stays."""
    with suppress(OSError):
        if not read_bytes(path / "events.jsonl"):
            (path / "events.jsonl").unlink()
        for made in (*path.glob("tokenizer.json"), *path.glob(f".{LOCK}.*")):
            if made.name not in theirs:
                made.unlink()
        (path / LOCK_FILE).unlink()
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
