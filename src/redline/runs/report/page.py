"""The report of one run: its facts as plain data, and a self-contained HTML page that can be mailed."""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.cache import check_regular, open_regular, read_text
from redline.errors import UserError, redact_all
from redline.fields import AUTO
from redline.recipe.load import current_name, flatten, load, shipped
from redline.recipe.lock import locked_recipe
from redline.runs.events import (
    Event,
    History,
    clean,
    number,
    numbers,
    one_line,
    overridden_keys,
    override_words,
    read_events,
    section,
)
from redline.runs.report.figures import MAX_POINTS, draw_figures, draw_roofline, draw_timeline, timeline
from redline.runs.roofline import Roofline, analyse
from redline.runs.speed import RATES, RunSpeed
from redline.runs.summary import (
    RunSummary,
    describe_event,
    dollars,
    ending_reason,
    limit_sentences,
    resume_command,
    summarise,
    summary_paragraph,
)
from redline.units import format_bytes, format_count, format_gib, format_seconds
from redline.vocabulary import EVENTS_FILE, RECIPE_LOCK_FILE, REPORT_FILE, Status, StopReason, parse_stop_reason

# ----------------------------------------------------------------------------------------------------
# The plan beside what was measured.


@dataclass(frozen=True)
class PlanRow:
    """A figure of the plan beside the measured one. Either may be missing."""

    what: str
    planned: float | None
    measured: float | None
    show: Callable[[float], str]

    @property
    def share(self) -> float | None:
        """The measured figure over the planned one; None if either is missing or the plan's is 0."""
        return self.measured / self.planned if self.measured is not None and self.planned else None

    def data(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "show"} | {"share": self.share}

    def cells(self) -> tuple[str, str, str, str]:
        planned, measured = ("–" if v is None else self.show(v) for v in (self.planned, self.measured))
        return self.what, planned, measured, "–" if self.share is None else f"{100 * self.share:.0f} %"


def plan_rows_of(plan: Event, headline: Mapping[str, Any], roofline: Roofline) -> list[PlanRow]:
    """Return a row for each figure of the plan."""
    speed, horizon = section(plan, "throughput"), section(plan, "horizon")
    # If train.hours ends the run, its steps are a limit that it never reaches: the expected tokens are the plan.
    ends_by_hours = number(horizon, "expected_tokens") is not None
    steps = None if ends_by_hours else number(horizon, "steps")
    tokens = number(horizon, "expected_tokens" if ends_by_hours else "tokens")
    rows = [
        PlanRow("tokens/s", number(speed, "tokens_per_s"), headline["tokens_per_s_median"], format_count),
        PlanRow("ms per step", roofline.planned_ms, roofline.step_ms, _ms),
        PlanRow("MFU", number(speed, "mfu"), headline["mfu_median"], _percent),
        PlanRow("mask-exact MFU", number(speed, "mfu_causal"), headline["mfu_causal_median"], _percent),
        PlanRow("peak memory", number(section(plan, "memory_gib"), "peak"), headline["peak_memory_gib"], format_gib),
        PlanRow("steps", steps, headline["step"], "{:,.0f}".format),
        PlanRow("tokens", tokens, headline["tokens"], format_count),
        PlanRow("training time", number(plan, "hours"), headline["hours"], _hours),
        PlanRow("cost", number(plan, "cost_usd"), headline["cost_usd"], dollars),
    ]
    return [row for row in rows if row.planned is not None]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _hours(value: float) -> str:
    return format_seconds(3600 * value)


# ----------------------------------------------------------------------------------------------------
# How to repeat a run.


@dataclass(frozen=True)
class Repeat:
    """Command lines to copy, and remarks about what they do not say."""

    commands: list[str]
    remarks: list[str]

    def data(self) -> dict[str, Any]:
        return asdict(self)


def how_to_repeat(lock: Mapping[str, Any], starts: Sequence[Event], plans: Sequence[Event], run: str) -> Repeat:
    """Return the commands that train the run again, one per attempt that changed something.

    Empty if the recipe's name is unknown. Each start event has its plan.
    """
    first: Event = starts[0] if starts else {}
    name = one_line(lock.get("recipe_name") or first.get("recipe"))
    if not name:
        return Repeat([], [])
    overrides = _overrides(first)
    own_recipe = not _is_shipped(name, overrides, section(lock, "recipe"))
    code, remarks = _code(lock)
    if own_recipe:
        remarks.append(f"{name}.yaml is the resolved recipe below; it includes the overrides.")
        overrides = []
    words = ["redline", "train", f"{name}.yaml" if own_recipe else name, *overrides]
    gpus = [_gpus_option(plan) for plan in plans] or [[]]
    words += gpus[0]
    gpus += [gpus[-1]] * (len(starts) - len(gpus))
    again = f"{run}-again"  # its resumes must not continue the original run
    later = [
        ["redline", "train", "--resume", again, *_overrides(start), *now]
        for start, before, now in zip(starts[1:], gpus, gpus[1:], strict=False)
        if _overrides(start) or now != before
    ]
    words += ["--run", again] if later else []
    if not own_recipe and "data.source" in overridden_keys(first):
        remarks.append("data.source is a path on the machine of the run.")
    return Repeat([*code, *(shlex.join(command) for command in (words, *later))], remarks)


def _gpus_option(plan: Event) -> list[str]:
    count = number(plan, "gpus")
    return ["--gpus", f"{count:.0f}"] if count and count > 1 else []


def _is_shipped(name: str, overrides: list[str], resolved: Mapping[str, Any]) -> bool:
    """Return whether the shipped recipe of this name still gives this run: a user's own file may have the same name."""
    if current_name(name) not in shipped():
        return False
    try:
        shipped_values = dict(flatten(load(name, overrides).recipe.model_dump(mode="json")))
    except UserError:  # an override that this version does not know
        return False
    used = dict(flatten(dict(resolved)))
    return all(value in (None, AUTO) or _same(used.get(key, value), value) for key, value in shipped_values.items())


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; floats up to the rounding in the files of a base model."""
    both = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other, rel_tol=1e-6) if both else bool(one == other)


def _code(lock: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the command that checks out the run's code, and remarks."""
    git, version = section(lock, "git"), one_line(section(lock, "versions").get("redline"))
    commit = one_line(git.get("commit"))
    if not commit:
        return [], [f"The run used redline {version}."] if version else []
    changed = ["The code had uncommitted changes."] if git.get("dirty") else []
    return [shlex.join(["git", "checkout", commit])], changed


def _overrides(start: Event) -> list[str]:
    return [clean(word) for word in override_words(start)]


# ----------------------------------------------------------------------------------------------------
# What resumes changed: the recipe at the end of the run, and the evaluations that can be compared.


def lock_at_the_end(run: Path, lock: Mapping[str, Any], history: History) -> Mapping[str, Any]:
    """Return the lock with the recipe as resumes changed it; unchanged if this version cannot read its recipe."""
    before = history.resume_overrides()
    if not before:
        return lock
    try:
        recipe = locked_recipe(run, {**lock, "began_in": None}, before=before).recipe
    except (UserError, KeyError, TypeError, ValueError):
        return lock
    return {**lock, "recipe": redact_all(recipe.model_dump(mode="json"))}


def comparable_evals(history: History) -> list[Event]:
    """Return the evaluations on the same sequences as the last one: a resume that sets eval.sequences changes them."""
    evals: list[Event] = []
    before: list[Event] = []
    for event in history.of_type("eval", "start"):
        if event["type"] == "eval":
            evals.append(event)
        elif event.get("resumed_from") is not None and "eval.sequences" in overridden_keys(event):
            evals, before = [], evals or before
    return evals or before


# ----------------------------------------------------------------------------------------------------
# The report as plain data.


_CURVES = ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "step_ms", "data_wait_ms", "memory_gib")
_EVAL_COLUMNS = ("step", "tokens", "loss", "perplexity", "bits_per_byte")
_MAX_ROWS = 60  # of a table
_CHECKPOINT_FIELDS = ("step", "path", "bytes", "seconds")
_SAMPLE_FIELDS = ("step", "label", "prompt", "text")
_INCIDENTS = frozenset({"warning", "replan", "recovery"})
_ENVIRONMENT = ("machine", "versions", "git", "data")
_RESUMABLE = frozenset({Status.CRASHED, Status.PREEMPTED, Status.STOPPED, Status.FAILED})


def report_data(run: Path) -> dict[str, Any]:
    """Return the content of the report as plain data."""
    return run_data(Path(run), *read_run(Path(run)))


def read_run(run: Path) -> tuple[History, Mapping[str, Any]]:
    """Return the events and the lock of a run."""
    if not (run / EVENTS_FILE).exists() and not (run / RECIPE_LOCK_FILE).exists():
        raise UserError("is not a run directory.", where=str(run), fix="`redline runs` lists the runs in ./runs.")
    try:
        lock = json.loads(read_text(run / RECIPE_LOCK_FILE))
    except (OSError, ValueError, RecursionError):  # most of the report is made from the events
        lock = {}
    # A lock of an older version may hold the values of secret environment variables.
    return read_events(run / EVENTS_FILE), redact_all(lock) if isinstance(lock, dict) else {}


def run_data(run: Path, history: History, lock: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the log and the lock hold about a run, as plain data."""
    summary = summarise(run, history)
    start, plan, stop = history.first_start, history.plan, history.stop
    steps, evals = history.of_type("step"), history.of_type("eval")
    roofline = analyse(steps, plan, lock)
    ended = summary.status not in (Status.RUNNING, Status.CRASHED) and stop is not None
    data: dict[str, Any] = {
        "schema": 1,
        "name": summary.name,
        "status": summary.status,
        "reason": one_line(stop.get("reason")) if ended and stop is not None else None,
        "reason_text": ending_reason(summary.status, stop),
        "recipe_name": lock.get("recipe_name") or start.get("recipe"),
        "device": section(lock, "machine").get("name") or start.get("device"),
        "started": number(start, "time"),
        "headline": _headline(steps, comparable_evals(history))
        | _totals(summary)
        | {"mfu_formula": _formula(lock, plan)},
        "parameters": dict(section(lock, "parameters") or section(plan, "parameters")),
        "steps": [{key: step.get(key) for key in _CURVES} for step in _evenly(steps)],
        "roofline": roofline.data() | {"sentences": limit_sentences(roofline)},
        "evals": [{key: value for key, value in e.items() if key != "type"} for e in evals],
        "checkpoints": [_fields(e, _CHECKPOINT_FIELDS) for e in history.of_type("checkpoint")],
        "samples": [_fields(e, _SAMPLE_FIELDS) for e in history.of_type("sample")],
        "choices": [c for c in _list(lock, "choices") or _list(plan, "choices") if isinstance(c, Mapping)],
        "incidents": _incidents(history),
        "skipped_steps": int(sum(numbers(steps, "skipped"))),
        "environment": {key: dict(section(lock, key)) for key in _ENVIRONMENT if section(lock, key)},
        "seed": lock.get("seed"),
        "run_id": lock.get("run_id") or start.get("run_id"),
        "recipe": dict(section(lock, "recipe")),
        "timeline": [moment.data() for moment in timeline(history)],
        "repeat": how_to_repeat(lock, history.of_type("start"), history.of_type("plan"), str(run)).data(),
    }
    data["plan_source"] = section(plan, "throughput").get("source")
    data["planned"] = [row.data() for row in plan_rows_of(plan, data["headline"], roofline)]
    # A run whose loss diverged would diverge again, so no command to resume it is shown.
    diverged = stop is not None and parse_stop_reason(stop.get("reason")) is StopReason.NONFINITE
    data["resume"] = resume_command(str(run)) if summary.status in _RESUMABLE and not diverged else None
    return {"verdict": summary_paragraph(data, history, roofline), **data}


def _headline(steps: Sequence[Event], evals: Sequence[Event]) -> dict[str, Any]:
    val_losses, speed = numbers(evals, "loss"), RunSpeed(steps)
    return {
        "train_loss": _last(numbers(steps, "loss")),
        "val_loss": _last(val_losses),
        "best_val_loss": min(val_losses, default=None),
        "perplexity": _last(numbers(evals, "perplexity")),
        "bits_per_byte": _last(numbers(evals, "bits_per_byte")),
        **{f"{rate}_median": speed.median(rate) for rate in RATES},
        "peak_memory_gib": max(numbers(steps, "memory_gib"), default=None),
    }


def _totals(summary: RunSummary) -> dict[str, Any]:
    return {key: getattr(summary, key) for key in ("step", "tokens", "hours", "cost_usd")}


def _formula(lock: Mapping[str, Any], plan: Event) -> str | None:
    formula = section(lock, "flops_per_token").get("formula") or section(plan, "flops_per_token").get("formula")
    return None if formula is None else str(formula)


def _incidents(history: History) -> list[dict[str, Any]]:
    """Return everything that did not go smoothly, in order, with the step at which it happened."""
    incidents: list[dict[str, Any]] = []
    step: float | None = None

    def add(kind: str, message: object) -> None:
        incidents.append({"kind": kind, "step": step, "message": message})

    for event in history:
        step = number(event, "step") if number(event, "step") is not None else step
        if event["type"] in _INCIDENTS:
            add(event["type"], event.get("message"))
        elif event["type"] == "plan":
            for text in _list(event, "warnings"):
                add("warning", text)
        elif event["type"] == "start" and number(event, "resumed_from") is not None:
            step = number(event, "resumed_from")
            add("resumed", describe_event(event))
        elif event["type"] == "step" and number(event, "skipped"):
            add("skipped", describe_event(event))
    step = None
    if history.left_out:
        add("log", f"{history.left_out:,} logged steps are not shown; those with the lowest and highest loss are.")
    if history.unreadable:
        add("log", f"{history.unreadable} line(s) of the event log could not be read: writing them was interrupted.")
    return incidents


# ----------------------------------------------------------------------------------------------------
# The report as a page.


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the page, RUN/report.html by default, and return its path."""
    run = Path(run)
    history, lock = read_run(run)
    page = _page(run_data(run, history, lock), history, lock)
    return write_page(run / REPORT_FILE if out is None else Path(out), page, named=out is not None)


def _page(data: dict[str, Any], history: History, lock: Mapping[str, Any]) -> str:
    steps, evals, plan = history.of_type("step"), history.of_type("eval"), history.plan
    roofline = analyse(steps, plan, lock)
    timeline_figure = draw_timeline(timeline(history))
    figures = {
        "figures": draw_figures(steps, evals),
        "ceilings": draw_roofline(roofline),
        "timeline_figures": [timeline_figure] if timeline_figure else [],
    }
    tables = {
        "plan_cells": [row.cells() for row in plan_rows_of(plan, data["headline"], roofline)],
        "eval_columns": _eval_columns(evals),
        "eval_rows": [_eval_cells(e, _eval_columns(evals)) for e in _evenly(evals, _MAX_ROWS)],
        "checkpoint_rows": data["checkpoints"][-_MAX_ROWS:],
        "incident_rows": data["incidents"][-_MAX_ROWS:],
    }
    texts = {
        "cards": _cards(data["headline"]),
        "sample_pairs": _sample_pairs(data["samples"]),
        "started_on": format_date(data["started"]),
        "recipe_yaml": _yaml(data["recipe"]),
    }
    return render("report.html.j2", data | figures | tables | texts)


def _eval_columns(evals: Sequence[Event]) -> list[str]:
    """Return the usual metrics first, then those of the job; only metrics that have numbers."""
    names = dict.fromkeys([*_EVAL_COLUMNS, *(key for event in evals for key in event if key != "time")])
    return [name for name in names if any(number(event, name) is not None for event in evals)]


def _eval_cells(event: Event, columns: Sequence[str]) -> list[str]:
    values = {name: number(event, name) for name in columns}
    formats = {"step": "{:,.0f}".format, "tokens": format_count}
    return ["–" if v is None else formats.get(name, _four_digits)(v) for name, v in values.items()]


def _four_digits(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _cards(headline: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of the page as (name, value, remark). Unknown numbers have no card."""
    h = headline
    best = f"best {h['best_val_loss']:.4f}" if h["best_val_loss"] != h["val_loss"] else ""
    causal = "" if h["mfu_causal_median"] is None else f"mask-exact {h['mfu_causal_median']:.1%}"
    formula = f"FLOPs/token = {h['mfu_formula']}" if h["mfu_formula"] else ""
    steps = f"{h['step']:,} steps" if h["step"] is not None else ""
    cards = [
        ("validation loss", h["val_loss"], "{:.4f}".format, best),
        ("training loss", h["train_loss"], "{:.4f}".format, "last logged step"),
        ("perplexity", h["perplexity"], "{:,.2f}".format, "validation"),
        ("bits per byte", h["bits_per_byte"], "{:.4f}".format, "validation"),
        ("tokens", h["tokens"], format_count, steps),
        ("tokens/s", h["tokens_per_s_median"], format_count, "median"),
        ("samples/s", h["samples_per_s_median"], format_count, "median; sequences of data.seq_len"),
        ("MFU", h["mfu_median"], "{:.1%}".format, "; ".join(filter(None, ["median", causal, formula]))),
        ("peak memory", h["peak_memory_gib"], format_gib, ""),
        ("training time", h["hours"], _hours, ""),
        ("cost", h["cost_usd"], dollars, ""),
    ]
    return [(name, show(value), remark) for name, value, show, remark in cards if value is not None]


def _sample_pairs(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the first and the last sample for each prompt: they show what training changed."""
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_prompt.setdefault(clean(sample.get("prompt")), []).append(sample)
    return [(prompt, [each[0], each[-1]] if len(each) > 1 else each) for prompt, each in by_prompt.items()]


def _yaml(recipe: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True) if recipe else ""


def _list(fields: Mapping[str, Any], key: str) -> list[Any]:
    value = fields.get(key)
    return value if isinstance(value, list) else []


def _fields(event: Event, keys: Sequence[str]) -> dict[str, Any]:
    return {key: event.get(key) for key in keys}


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def _evenly(events: Sequence[Event], most: int = MAX_POINTS) -> list[Event]:
    """Return at most this many events, evenly spaced, including the first and the last."""
    count = min(len(events), most)
    return [events[round(i * (len(events) - 1) / max(count - 1, 1))] for i in range(count)]


# ----------------------------------------------------------------------------------------------------
# Writing pages.


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return the page that a template in this folder makes of the values. All values are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"clean": clean, "bytes": format_bytes, "seconds": format_seconds}
    return jinja.get_template(template).render(values, written_on=format_date(time.time()))


def write_page(path: Path, page: str, *, named: bool = True) -> Path:
    """Write a page to a temporary file and rename it, so that no reader sees half a page.

    Only HTML files are replaced. A terminal or a pipe is written to only if the user `named` it: a pipe in a run
    directory may have been put there by somebody else, and writing to it would wait forever for a reader.
    """
    if not path.name:  # `.` or `/`
        raise UserError(
            "The report cannot be written: this is a folder.", where=str(path), fix="Name a file with --out."
        )
    target = path.resolve()  # a symbolic link stays one; the file it points to is replaced
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if _is_stream(path) and not named:
            check_regular(path)
        if _is_stream(path):
            path.write_bytes(page.encode("utf-8", "replace"))
            return path
        _refuse_other_files(target, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(page.encode("utf-8", "replace"))
        unfinished.replace(target)
    except OSError as error:
        with suppress(OSError):  # on a read-only disk the temporary file was never there
            unfinished.unlink()
        raise UserError(
            f"The report cannot be written ({error.strerror}).",
            where=str(path),
            fix="Choose a place with --out that can be written.",
        ) from error
    return path


def _is_stream(path: Path) -> bool:
    """Return whether this is a terminal, a pipe or /dev/null, which are written to and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _refuse_other_files(target: Path, path: Path) -> None:
    """Refuse to replace a file that is not HTML, such as the lock of a run."""
    if not target.is_file() or not target.stat().st_size:
        return
    with open(target, "rb", opener=open_regular) as file:
        begin = file.read(256).lstrip().lower()
    if not begin.startswith((b"<!doctype html", b"<html")):
        what = "The report cannot be written: the file exists and is not an HTML page."
        raise UserError(what, where=str(path), fix="Choose another place with --out.")


def format_date(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < 1e11:  # a clock was wrong if this is beyond the year 5000
        return ""
    return time.strftime("%d %B %Y, %H:%M UTC", time.gmtime(seconds))
