"""The library: plan, prepare, train, and open runs from Python. `import redline` offers what this module defines.

The command line does the same by the same functions. Nothing here imports torch before it is needed, prints to
standard output, or ends the process; all errors that a user can fix are `redline.UserError`.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from redline.errors import UsageError, UserError, did_you_mean, package_hint, require_torch
from redline.jobs.base import Job
from redline.jobs.base import register_job as _register
from redline.recipe.load import Loaded, flatten, load
from redline.runs.callbacks import Callbacks, Metric
from redline.runs.console import Console, plan_rows
from redline.runs.events import Event, History, clean, number, one_line, parse_event, read_events
from redline.runs.monitor import SilentView, View
from redline.runs.notebook import LiveChart, notebook_display
from redline.vocabulary import (
    EVENTS_FILE,
    RECIPE_LOCK_FILE,
    RUNS,
    STOP_REQUEST_FILE,
    Status,
    StopReason,
    parse_stop_reason,
)

if TYPE_CHECKING:
    from redline.evaluate.opened_run import OpenedModel
    from redline.jobs.objective import Objective, Sample
    from redline.recipe.schema import Recipe as Schema

Rows = Iterable[str] | Iterable[Mapping[str, Any]]
Source = str | Path | Sequence[Any] | Rows
_WORD = re.compile(r"[A-Za-z_][\w.]*")


# ----------------------------------------------------------------------------------------------------
# Recipes and plans.


@dataclass(frozen=True)
class Recipe:
    """A recipe by name or path, with what was changed in it. Its sections are attributes: `recipe.train.lr`."""

    source: str  # the shipped name or the path, as it was given
    overrides: tuple[str, ...]  # key=value words
    loaded: Loaded = field(repr=False)

    @classmethod
    def load(cls, name: str | Path = "quickstart", /, *words: str, **overrides: Any) -> Recipe:
        """Load a shipped recipe or a YAML file, and change keys.

        `words` are those of the command line, such as "train.steps=100". `overrides` are sections, such as
        train={"steps": 100}, or dotted keys, such as **{"train.steps": 100}.
        """
        changed = (*words, *_words(overrides))
        return cls(str(name), changed, load(str(name), changed))

    def changed(self, *words: str, **overrides: Any) -> Recipe:
        """Return this recipe with more keys changed."""
        return Recipe.load(self.source, *self.overrides, *words, **overrides)

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def notes(self) -> list[str]:
        """Return a line for each alias and each replaced stop condition."""
        return list(self.loaded.notes)

    def to_dict(self) -> dict[str, Any]:
        tree: dict[str, Any] = self.loaded.recipe.model_dump(mode="json")
        return tree

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key == "loaded":
            raise AttributeError(key)
        sections = type(self.loaded.recipe).model_fields
        if key not in sections:
            hint = did_you_mean(key, sections) or f"There are {', '.join(sections)}."
            raise AttributeError(f"a recipe has no section {key!r}. {hint}")
        return getattr(self.loaded.recipe, key)


def _words(overrides: Mapping[str, Any]) -> list[str]:
    """Return overrides as key=value words, which the command line and the log of a run use, too."""
    words = []
    for key, value in flatten({key: _plain(value) for key, value in overrides.items()}):
        if not _WORD.fullmatch(key):
            raise UsageError(f"{key!r} is not a recipe key.", where="overrides", fix="Use, for example, train.steps.")
        words.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
    return words


def _plain(value: Any) -> Any:
    """Return a value of an override as JSON types. Paths become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, str | int | float):
        return value
    what = f"{value!r} is a {type(value).__name__}, which no recipe key takes."
    raise UsageError(what, where="overrides", fix="Use texts, numbers, True, False, None, lists and dicts.")


class Fields(dict[str, Any]):
    """A dictionary whose entries are attributes as well."""

    def __getattr__(self, key: str) -> Any:
        try:
            value = self[key]
        except KeyError:
            raise AttributeError(f"{key!r}; there are {', '.join(self)}") from None
        return Fields(value) if isinstance(value, dict) else value


@dataclass(frozen=True, repr=False)
class Plan:
    """What a recipe needs and how fast it should be: the fields of `redline plan --json` as attributes."""

    recipe: str
    machine: str
    fields: Fields

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key == "fields":
            raise AttributeError(key)
        return getattr(self.fields, key)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)

    def __repr__(self) -> str:
        """Return what `redline plan` prints."""
        text = io.StringIO()
        Console(text, interactive=False).event({"type": "plan", **self.fields})
        return f"{self.recipe} on {self.machine}\n{text.getvalue()}".rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the same as tables."""
        title = f"<b>{html.escape(self.recipe)}</b> on {html.escape(self.machine)}"
        rows = _html_table([(label, text) for label, text in plan_rows(self.fields)])
        choices = [(f"{one_line(c['key'])} = {one_line(c['value'])}", one_line(c["reason"])) for c in self.choices]
        warnings = "".join(f"<div>⚠ {html.escape(clean(text))}</div>" for text in self.warnings)
        chosen = f"<details><summary>{len(choices)} choices</summary>{_html_table(choices)}</details>"
        return f"<div>{title}{rows}{chosen}{warnings}</div>"


def _html_table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th style="text-align:left;vertical-align:top">{html.escape(label)}</th>'
        f'<td style="text-align:left;white-space:pre-wrap">{html.escape(text)}</td></tr>'
        for label, text in rows
    )
    return f"<table>{cells}</table>"


def plan(
    recipe: str | Path | Recipe = "quickstart",
    /,
    *words: str,
    gpu: str = "auto",
    gpus: int = 1,
    nodes: int = 1,
    price: float | None = None,
    target_tokens_per_s: float | None = None,
    probe: bool = False,
    **overrides: Any,
) -> Plan:
    """Compute memory, speed, time and cost of a run before it starts, for this machine or a named card.

    Raise UserError if `target_tokens_per_s` is impossible, with the arithmetic.
    """
    from redline.launch.plan import plan_recipe

    wanted = _recipe(recipe, words, overrides)
    from redline.bench.child import run_trial

    found = plan_recipe(
        wanted.loaded,
        gpu=gpu,
        gpus=gpus,
        nodes=nodes,
        price=price,
        target=target_tokens_per_s,
        probe=run_trial if probe else None,
    )
    if found.refusal is not None:
        raise found.refusal
    return Plan(wanted.name, found.machine, Fields(found.event))


def _recipe(recipe: str | Path | Recipe, words: Sequence[str], overrides: Mapping[str, Any]) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe.changed(*words, **overrides) if words or overrides else recipe
    return Recipe.load(recipe, *words, **overrides)


def register_job(job: Job) -> None:
    """Add a job to those that recipes may name, in this process.

    A run of several processes, and the command line, find the job in any process if an installed package names it in
    the entry point group `redline.jobs`.
    """
    if not isinstance(job, Job):
        fix = "Give an object of a class derived from redline.jobs.base.Job."
        raise UsageError(f"{job!r} is not a job.", where="register_job", fix=fix)
    _register(job)


# ----------------------------------------------------------------------------------------------------
# Data.


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str = "gpt2",
    val_fraction: float = 0.05,
    text_key: str = "text",
    workers: int | None = None,
    dedup: bool = False,
) -> dict[str, Any]:
    """Turn text into token files for training, at constant memory. Return what `redline prepare --json` prints."""
    from redline.data.prepare import prepare_source, prepared_summary, refuse_content, require_text, tokenizer_for
    from redline.data.sources import Reading

    require_text(str(source), fix=f"Train on it: data.source={source}.")
    refuse_content(Path(out))
    reading = Reading(val_fraction, text_key, dedup)
    prepare_source(str(source), tokenizer_for([str(source)], tokenizer, reading), Path(out), reading, workers=workers)
    return {"source": str(source), "out": str(out), **prepared_summary(Path(out))}


def _spool(rows: Rows, fingerprint: str | None) -> tuple[Path, str]:
    """Write rows from Python to a file in the cache, from which every job reads; return it and the fingerprint.

    With a stated fingerprint that the cache knows, the rows are not read again: that is what makes a resume exact.
    Without one it is a digest of the rows.
    """
    from redline.cache import cache_dir, make_folder

    folder = cache_dir() / "python"
    make_folder(folder)
    if fingerprint is not None and (known := folder / f"{_digest(fingerprint)}.jsonl").is_file():
        return known, fingerprint
    temporary, digest = folder / f".{os.getpid()}.jsonl", hashlib.sha256()
    try:
        with open(temporary, "wb") as file:
            for line in _lines(rows):
                file.write(line)
                digest.update(line)
            file.flush()
            os.fsync(file.fileno())
        name = fingerprint if fingerprint is not None else digest.hexdigest()[:16]
        path = folder / f"{_digest(name)}.jsonl"
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path, name


def _digest(fingerprint: str) -> str:
    return hashlib.sha256(fingerprint.encode()).hexdigest()[:16]


def _lines(rows: Rows) -> Iterator[bytes]:
    kind: type | None = None
    for place, row in enumerate(rows, start=1):
        fields = {"text": row} if isinstance(row, str) else dict(row) if isinstance(row, Mapping) else None
        if fields is None:
            what = f"row {place} is a {type(row).__name__}; rows are dicts or texts."
            raise UsageError(what, where="data", fix='Yield, for example, {"text": "…"} or "…".')
        this = str if isinstance(row, str) else dict
        if kind not in (None, this):
            what = f"row {place} is a {this.__name__}, and those before are not."
            raise UsageError(what, where="data", fix="Yield only dicts, or only texts.")
        kind = this
        try:
            line = json.dumps(fields, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            what = f"row {place} cannot be written as JSON ({error})."
            raise UsageError(what, where="data", fix="Use texts, numbers, lists and dicts in a row.") from None
        yield line.encode("utf-8", "replace") + b"\n"
    if kind is None:
        raise UsageError("there are no rows.", where="data", fix="Give an iterable that is not used up.")


# ----------------------------------------------------------------------------------------------------
# Training.


class TrainingError(UserError):
    """A run that ended with an error. `run` is what it left."""

    def __init__(self, what: str, run: Run, fix: str) -> None:
        self.run = run
        super().__init__(what, where=str(run.path), fix=fix)


def train(
    recipe: str | Path | Recipe | None = None,
    /,
    *words: str,
    run: str | Path | None = None,
    resume: str | Path | Run | None = None,
    gpus: int = 1,
    callbacks: Sequence[object] = (),
    metrics: Mapping[str, Metric] | None = None,
    data: Source | Mapping[str, Any] | None = None,
    fingerprint: str | None = None,
    show: bool = True,
    **overrides: Any,
) -> Run:
    """Train a recipe ("quickstart" by default), or resume a run; return the run.

    `callbacks` are objects with some of `on_step`, `on_eval`, `on_checkpoint` and `on_stop` (see `redline.Callback`).
    `metrics` are functions of the model by name, computed at every evaluation. `data` takes the place of `data.source`:
    a path, or any iterable of dicts or texts; `fingerprint` names such rows, for an exact resume without reading them
    again. A single dict is the recipe's section `data`, as in `Recipe.load`. Ctrl-C finishes the step, saves, and
    returns. With `show=False` nothing is shown.
    """
    if recipe is not None and resume is not None:
        what = "resume= takes no recipe: it is stored in the run."
        raise UsageError(what, where="train", fix="Leave out one of the two.")
    if run is not None and resume is not None:
        raise UsageError("run= names a new run, resume= one that exists.", where="train", fix="Leave out one.")
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise UsageError(f"{callbacks!r} is not a list of callbacks.", where="callbacks", fix="Use callbacks=[…].")
    watchers = Callbacks(list(callbacks), metrics, Model.of)
    if isinstance(data, Mapping):  # its keys would otherwise be trained on as texts
        overrides, data = {**overrides, "data": data}, None
    words, python = _with_data(words, data, fingerprint)
    if watchers.metrics:
        python["metrics"] = sorted(watchers.metrics)
    with _environment():
        if gpus > 1 and "RANK" not in os.environ:
            return _train_in_ranks(recipe, words, overrides, run, resume, gpus, watchers, python, show)
        return _train_here(recipe, words, overrides, run, resume, watchers, python, show)


def _with_data(
    words: Sequence[str], data: Source | None, fingerprint: str | None
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the words with a data.source for `data`, and what the lock records of rows from Python."""
    if data is None or isinstance(data, str | Path):
        if fingerprint is not None:
            what = "is for rows from Python; files are known by their content."
            raise UsageError(what, where="fingerprint", fix="Leave it out.")
        return (*words, *([] if data is None else _words({"data.source": data}))), {}
    if not isinstance(data, Iterable):
        what = f"{data!r} is no path and no iterable of rows."
        raise UsageError(what, where="data", fix='Give a path, or rows such as [{"text": "…"}].')
    path, name = _spool(data, fingerprint)
    return (*words, *_words({"data.source": str(path)})), {"data": name}


@contextmanager
def _environment() -> Iterator[None]:
    """Set what the command line sets before torch is imported, and put torch's global settings back afterwards."""
    # OpenMP threads should spin for a moment, not for ever: see docs/decisions/0003-cpu-threads.md.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    require_torch()
    import gc

    import torch

    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        gc.collect()  # the trainer holds reference cycles, and with them the memory of the GPU
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _train_here(
    recipe: str | Path | Recipe | None,
    words: Sequence[str],
    overrides: Mapping[str, Any],
    run: str | Path | None,
    resume: str | Path | Run | None,
    watchers: Callbacks,
    python: dict[str, Any],
    show: bool,
) -> Run:
    from redline.launch.session import Host
    from redline.launch.start import new_run, resume_run

    host = Host(is_command=False, view=_view(show), callbacks=watchers, python=python or None)
    if resume is not None:
        changes = [*words, *_words(overrides)]
        if python.get("data"):
            changes = [word for word in changes if not word.startswith("data.source=")]
        resume_run(_resumed_name(resume), changes, dry_run=False, host=host)
    else:
        wanted = _recipe(recipe or "quickstart", words, overrides)
        new_run(wanted.loaded, None if run is None else Path(run), list(wanted.overrides), dry_run=False, host=host)
    assert host.path is not None
    return _finished(Run(host.path), watchers)


def _resumed_name(run: str | Path | Run) -> str:
    """Return the run as the command line names it, with its checkpoint: resuming from an older one is refused."""
    return run._spec() if isinstance(run, Run) else str(run)


def _finished(run: Run, watchers: Callbacks) -> Run:
    """Return the run, or raise what ended it."""
    watchers.raise_failure(str(run.path))
    if run.stop_reason is StopReason.NONFINITE:
        what = f"training diverged: {StopReason.NONFINITE.description}."
        raise TrainingError(what, run, "Train again with a lower train.lr.")
    if run.status is Status.FAILED:
        raise TrainingError("the run could not save its last state.", run, "Free some disk space, and resume it.")
    return run


def _train_in_ranks(
    recipe: str | Path | Recipe | None,
    words: Sequence[str],
    overrides: Mapping[str, Any],
    run: str | Path | None,
    resume: str | Path | Run | None,
    gpus: int,
    watchers: Callbacks,
    python: dict[str, Any],
    show: bool,
) -> Run:
    """Train in processes that torchrun starts. Callbacks are called here, from the log that rank 0 writes."""
    from redline.launch.processes import train_supervised
    from redline.launch.session import PYTHON_VARIABLE, Host
    from redline.launch.start import new_run_path, open_resumable

    if watchers.metrics:
        what = "the ranks are processes of their own, which do not have these functions."
        raise UsageError(what, where="metrics", fix="Leave out metrics=, or train with gpus=1.")
    if resume is not None:
        changes = [*words, *_words(overrides)]
        host = Host(is_command=False, python=python or None)
        path, loaded = open_resumable(_resumed_name(resume), changes, host)
        command = ["train", "--resume", str(path), *changes]
    else:
        wanted = _recipe(recipe or "quickstart", words, overrides)
        loaded, path = wanted.loaded, new_run_path(wanted.loaded, None if run is None else Path(run))
        command = ["train", wanted.source, *wanted.overrides, "--run", str(path), "--continue"]
    environment = {PYTHON_VARIABLE: json.dumps(python)} if python else {}
    # On a terminal the ranks show their progress themselves; a notebook does not see what they print.
    in_notebook = show and notebook_display() is not None
    quiet = in_notebook or not show
    with Follower(path, _view(show) if in_notebook else None, watchers):
        code = train_supervised(
            loaded.recipe, path, command, gpus=gpus, restart=False, environment=environment, quiet=quiet
        )
    done = Run(path)
    if code and done.status not in (Status.STOPPED, Status.PREEMPTED):
        watchers.raise_failure(str(path))
        raise TrainingError(f"the ranks ended with exit code {code}.", done, f"Read {path / 'ranks.log'}.")
    return _finished(done, watchers)


class Follower:
    """Reads the event log that other processes write, and passes each event to the view and the callbacks."""

    def __init__(self, run: Path, view: View | None, watchers: Callbacks) -> None:
        self.log, self.view, self.watchers = run / EVENTS_FILE, view, watchers
        self._read = self.log.stat().st_size if self.log.is_file() else 0
        self._ended = threading.Event()
        watchers.request_stop = lambda: (run / STOP_REQUEST_FILE).touch()

    def __enter__(self) -> Follower:
        self._thread = threading.Thread(target=self._follow, name="redline-follow", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._pass_on()
        if self.view is not None:
            self.view.close()

    def _follow(self) -> None:
        while not self._ended.wait(0.2):
            self._pass_on()

    def _pass_on(self) -> None:
        if not self.log.is_file():
            return
        with open(self.log, "rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        for line in whole.splitlines():
            if (event := parse_event(line)) is not None:
                if self.view is not None:
                    self.view.event(event)
                self.watchers.event(event)


def _view(show: bool) -> View:
    """Return what shows the run: a chart in a notebook, lines elsewhere, or nothing."""
    if not show:
        return SilentView()
    display = notebook_display()
    return Console() if display is None else LiveChart(display)


# ----------------------------------------------------------------------------------------------------
# Runs.


class Events(list[Event]):
    """The events of a run that still hold, in order: what a resume repeated is there once."""

    def of_type(self, *types: str) -> Events:
        return Events(event for event in self if event["type"] in types)

    def to_pandas(self) -> Any:
        """Return a table with a row for each event."""
        try:
            import pandas
        except ImportError:
            fix = f"Install it: {package_hint('pandas')}."
            raise UserError("pandas is not installed.", where="to_pandas", fix=fix) from None
        return pandas.DataFrame(list(self))


@dataclass(frozen=True)
class Model:
    """A trained model: the torch module in eval mode, and the tokenizer that belongs to it."""

    module: Any  # torch.nn.Module
    tokenizer: Any  # has `encode` and `decode`; None if the job reads no text, or several models do
    objective: Objective = field(repr=False)

    @classmethod
    def of(cls, objective: Objective) -> Model:
        return cls(objective.model, objective.tokenizer, objective)

    def sample(self, prompt: str = "", **how: Any) -> list[str]:
        """Return texts that the model writes after the prompt; see `Run.sample`."""
        from redline.jobs.objective import Sampling

        return [sample.text for sample in self.objective.sample(prompt, Sampling(**how))]


class Run:
    """A run directory: what happened, and the model that it left. Everything is read when it is asked for."""

    def __init__(self, path: str | Path, checkpoint: int | str | None = None) -> None:
        self.path, self.checkpoint = Path(path), checkpoint

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def status(self) -> Status:
        """Return whether it is running, finished, preempted, stopped, failed or crashed."""
        from redline.runs.summary import run_status

        return run_status(self.path)

    @property
    def stop_reason(self) -> StopReason | None:
        return parse_stop_reason((self._history().stop or {}).get("reason"))

    @property
    def lock(self) -> dict[str, Any]:
        """Return lock.json: the resolved recipe, the reasons of the plan, versions and fingerprints."""
        from redline.recipe.lock import read_lock

        return read_lock(self.path)

    @property
    def recipe(self) -> Schema:
        """Return the resolved recipe."""
        from redline.recipe.lock import locked_recipe

        return locked_recipe(self.path, self.lock, None, self._history().resume_overrides()).recipe

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the newest figures: the last step and evaluation, and the totals of the run."""
        from redline.runs.summary import summarise

        history = self._history()
        summary = summarise(self.path, history)
        last = history.of_type("eval")[-1:]
        found = {"step": summary.step, "tokens": summary.tokens, "hours": summary.hours, "cost_usd": summary.cost_usd}
        figures = {key: value for key, value in (last[0] if last else {}).items() if key not in _EVAL_PLACE}
        best = min((loss for e in history.of_type("eval") if (loss := number(e, "loss")) is not None), default=None)
        return {**found, "train_loss": summary.loss, **figures, "best_loss": best}

    def _history(self) -> History:
        return read_events(self.path / EVENTS_FILE)

    def events(self, *types: str) -> Events:
        """Return the events, or those of some types: "step", "eval", "checkpoint", "sample", …"""
        events = Events(self._history())
        return events.of_type(*types) if types else events

    def evaluate(self, data: str | Path | Rows | None = None, **options: Any) -> dict[str, Any]:
        """Measure the loss, or answers with answers="gsm8k", "match" or "f1": what `redline eval --json` prints.

        `data` is a path or rows, instead of what the run holds out. `options` are those of the command: text_key,
        sequences, answers, questions, tokens, under, texts, settings, base, weights, device.
        """
        require_torch()
        from redline.evaluate.measure import evaluate_model

        _check_keywords(evaluate_model, options, "evaluate")
        source = None if data is None else str(data if isinstance(data, str | Path) else _spool(data, None)[0])
        return evaluate_model(self._spec(), log=_ignore, data=source, **options).as_dict()

    def sample(
        self,
        prompt: str = "",
        *,
        count: int = 1,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = 0.95,
        seed: int = 0,
        plain: bool = False,
        weights: str | None = None,
        device: str = "auto",
    ) -> list[Sample]:
        """Return texts that the model writes after the prompt, or answers to it."""
        require_torch()
        from redline.evaluate.measure import sample_model

        opened = self._open(weights, device)
        from redline.jobs.objective import Sampling

        return sample_model(opened, prompt, Sampling(count, tokens, seed, temperature, top_k, top_p), plain=plain)

    def model(self, *, weights: str | None = None, device: str = "auto") -> Model:
        """Return the torch module in eval mode with its tokenizer."""
        return Model.of(self._open(weights, device, trainable=True).objective)

    def export(
        self,
        out: str | Path,
        *,
        merged: bool = False,
        dtype: str = "fp32",
        weights: str | None = None,
        onto: str | None = None,
        base: str | None = None,
        quant: str | None = None,
    ) -> Path:
        """Write a folder that transformers (or, for an adapter, peft) loads; return it.

        With `quant`, such as "f16" or "q8_0", it holds a GGUF file for llama.cpp and Ollama.
        """
        require_torch()
        from redline.export.folder import export_run

        export_run(
            self._found(),
            self.checkpoint,
            Path(out),
            weights=weights,
            dtype=dtype,
            merged=merged,
            onto=onto,
            base=base,
            quant=quant,
        )
        return Path(out)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the report, one self-contained HTML page; return its path."""
        from redline.runs.report.page import write_report

        return write_report(self._found(), None if out is None else Path(out))

    def resume(self, *words: str, **options: Any) -> Run:
        """Go on with this run: `redline.train(resume=self, …)`."""
        return train(None, *words, resume=self, **options)

    def stop(self) -> None:
        """Ask the run, which another process or thread trains, to finish its step, save and stop."""
        from redline.runs.summary import request_stop

        request_stop(self._found())

    def at(self, checkpoint: int | str) -> Run:
        """Return this run at a checkpoint: a step, or "best"."""
        return Run(self.path, checkpoint)

    def _found(self) -> Path:
        if not (self.path / RECIPE_LOCK_FILE).exists():
            fix = "Open another run: redline.open_run(…)."
            raise UsageError("is no run any more: it was moved or removed.", where=str(self.path), fix=fix)
        return self.path

    def _spec(self) -> str:
        path = str(self._found())
        path = path if os.sep in path else f"./{path}"  # a path, not a name in ./runs
        return path if self.checkpoint is None else f"{path}@{self.checkpoint}"

    def _open(self, weights: str | None, device: str, *, trainable: bool = False) -> OpenedModel:
        require_torch()
        from redline.evaluate.named_model import open_model

        return open_model(
            self._spec(), log=_ignore, weights=weights, device=device, writes_only=True, trainable=trainable
        )

    def __repr__(self) -> str:
        figures = self.metrics
        loss = figures.get("loss")
        at = "" if self.checkpoint is None else f"@{self.checkpoint}"
        shown = "" if loss is None else f", validation loss {loss:.4f}"
        return f"<Run {self.path}{at}: {self.status}, step {figures['step']}{shown}>"

    def _repr_html_(self) -> str:
        chart = LiveChart.drawn(self._history())
        return f"<div><code>{html.escape(repr(self)[1:-1])}</code>{chart}</div>"


_EVAL_PLACE = frozenset({"type", "time", "step", "tokens"})


def _ignore(text: str) -> None:
    """Drop a message."""


def _check_keywords(function: Any, options: Mapping[str, Any], name: str) -> None:
    import inspect

    known = [key for key in inspect.signature(function).parameters if key not in ("name", "log", "bar", "data")]
    for key in options:
        if key not in known:
            fix = did_you_mean(key, known) or f"There are {', '.join(known)}."
            raise UsageError(f"{key!r} is no option.", where=name, fix=fix)


def open_run(name: str | Path) -> Run:
    """Open a run by its path, its name in ./runs, or "latest", optionally with @STEP or @best."""
    from redline.runs.summary import resolve_run

    path, selector = resolve_run(str(name), RUNS)
    return Run(path, selector)
