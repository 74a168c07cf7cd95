"""One page about one run, made from its lock and its event log: self-contained HTML that can be mailed."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.cache import read_text
from redline.errors import UserError, redact_all
from redline.fields import AUTO
from redline.recipe.load import flatten, load, shipped
from redline.recipe.lock import locked_recipe
from redline.runs.console import clean, one_line
from redline.runs.events import Event, EventList, number, read_events, section
from redline.runs.report.figures import MAX_POINTS, draw_figures
from redline.runs.report.html import format_date, render, write_page
from redline.runs.report.roofline import Standing, draw_roofline, standing
from redline.runs.report.timeline import draw_timeline, timeline
from redline.runs.report.verdict import dollars, resume_line, verdict
from redline.runs.summary import RunSummary, summarise
from redline.units import format_count, format_seconds
from redline.vocabulary import EVENTS_FILE, RECIPE_LOCK_FILE, REPORT_FILE

# ----------------------------------------------------------------------------------------------------
# The plan beside what was measured.


@dataclass(frozen=True)
class PlanRow:
    """Something that the plan foretold, that the run measured, or both."""

    what: str
    planned: float | None
    measured: float | None
    show: Callable[[float], str]

    @property
    def share(self) -> float | None:
        """Of the plan; None where there is nothing to divide."""
        return self.measured / self.planned if self.measured is not None and self.planned else None

    def data(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "show"} | {"share": self.share}

    def cells(self) -> tuple[str, str, str, str]:
        planned, measured = ("–" if v is None else self.show(v) for v in (self.planned, self.measured))
        return self.what, planned, measured, "–" if self.share is None else f"{100 * self.share:.0f} %"


def plan_rows_of(plan: Event, headline: Mapping[str, Any], standing: Standing) -> list[PlanRow]:
    """Only what the plan had a figure for."""
    speed, horizon = section(plan, "throughput"), section(plan, "horizon")
    by_the_clock = number(horizon, "expected_tokens") is not None  # then the horizon's tokens are all that there are
    rows = [
        PlanRow("tokens/s", number(speed, "tokens_per_s"), headline["tokens_per_s_median"], format_count),
        PlanRow("ms per step", standing.planned_ms, standing.step_ms, _ms),
        PlanRow("MFU", number(speed, "mfu"), headline["mfu_median"], _percent),
        PlanRow("mask-exact MFU", number(speed, "mfu_causal"), headline["mfu_causal_median"], _percent),
        PlanRow("peak memory", number(section(plan, "memory_gib"), "peak"), headline["peak_memory_gib"], _gib),
        PlanRow("steps", None if by_the_clock else number(horizon, "steps"), headline["step"], "{:,.0f}".format),
        PlanRow(
            "tokens",
            number(horizon, "expected_tokens" if by_the_clock else "tokens"),
            headline["tokens"],
            format_count,
        ),
        PlanRow("training time", number(plan, "hours"), headline["hours"], _hours),
        PlanRow("cost", number(plan, "cost_usd"), headline["cost_usd"], dollars),
    ]
    return [row for row in rows if row.planned is not None]


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _gib(value: float) -> str:
    return f"{value:.1f} GiB" if value >= 1 else f"{value:.2f} GiB"


def _hours(value: float) -> str:
    return format_seconds(3600 * value)


# ----------------------------------------------------------------------------------------------------
# The commands that make a run again.


@dataclass(frozen=True)
class Repeat:
    """Lines to copy, and what one has to know beside them."""

    commands: list[str]
    remarks: list[str]

    def data(self) -> dict[str, Any]:
        return asdict(self)


def how_to_repeat(lock: Mapping[str, Any], starts: Sequence[Event], plans: Sequence[Event], run: str) -> Repeat:
    """Empty for a run whose recipe is not known. Each start has its plan."""
    first: Event = starts[0] if starts else {}
    name = one_line(lock.get("recipe_name") or first.get("recipe"))
    if not name:
        return Repeat([], [])
    own = not _is_shipped(name, _overrides(first), section(lock, "recipe"))
    code, remarks = _code(lock)
    if own:
        remarks.append(f"{name}.yaml is the resolved recipe below: its values hold the overrides, too.")
    words = ["redline", "train", f"{name}.yaml" if own else name, *([] if own else _overrides(first))]
    cards = [_cards_option(plan) for plan in plans] or [[]]
    words += cards[0]
    cards += [cards[-1]] * (len(starts) - len(cards))
    again = f"{run}-again"  # beside it: what goes on from the repetition must not go on from the run itself
    later = [
        ["redline", "train", "--resume", again, *_overrides(start), *now]
        for start, before, now in zip(starts[1:], cards, cards[1:], strict=False)
        if _overrides(start) or now != before
    ]
    words += ["--run", again] if later else []
    if any(word.startswith("data.source=") for word in words):
        remarks.append("data.source is a path of the machine it ran on.")
    return Repeat([*code, *(shlex.join(command) for command in (words, *later))], remarks)


def _cards_option(plan: Event) -> list[str]:
    count = number(plan, "gpus")
    return ["--gpus", f"{count:.0f}"] if count and count > 1 else []


def _is_shipped(name: str, overrides: list[str], resolved: Mapping[str, Any]) -> bool:
    """Whether the recipe of this name still says what the run did: a user's own file may have the same name."""
    if name not in shipped():
        return False
    try:
        asked = dict(flatten(load(name, overrides).recipe.model_dump(mode="json")))
    except UserError:  # of another version
        return False
    did = dict(flatten(dict(resolved)))
    return all(value in (None, AUTO) or _same(did.get(key, value), value) for key, value in asked.items())


def _same(one: Any, other: Any) -> bool:
    """Numbers that a base's own files round are the same."""
    both = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other, rel_tol=1e-6) if both else bool(one == other)


def _code(lock: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    git, version = section(lock, "git"), one_line(section(lock, "versions").get("redline"))
    commit = one_line(git.get("commit"))
    if not commit:
        return [], [f"It ran with redline {version}."] if version else []
    changed = ["The code had changes that were not committed."] if git.get("dirty") else []
    return [shlex.join(["git", "checkout", commit])], changed


def _overrides(start: Event) -> list[str]:
    given = start.get("overrides")
    return [clean(word) for word in given] if isinstance(given, list) else []


# ----------------------------------------------------------------------------------------------------
# What resumes changed of a run: its recipe as it was in the end, and since when its evaluations compare.


def as_it_ended(run: Path, lock: Mapping[str, Any], events: Sequence[Event]) -> Mapping[str, Any]:
    """The lock, with what resumes changed in its recipe. One that this version cannot read stays as it is."""
    before = [words for event in events if (words := _changes(event))]
    if not before:
        return lock
    try:
        recipe = locked_recipe(run, {**lock, "began_in": None}, before=before).recipe
    except (UserError, KeyError, TypeError, ValueError):
        return lock
    return {**lock, "recipe": redact_all(recipe.model_dump(mode="json"))}


def comparable_evals(events: Sequence[Event]) -> list[Event]:
    """Evaluations of the same windows as the last: those before `eval.sequences` was changed are of other text."""
    found: list[Event] = []
    before: list[Event] = []
    for event in events:
        if any(word.startswith("eval.sequences=") for word in _changes(event)):
            found, before = [], found or before
        elif event["type"] == "eval":
            found.append(event)
    return found or before


def _changes(event: Event) -> list[str]:
    """The words of a resume."""
    words = event.get("overrides") if event["type"] == "start" and event.get("resumed_from") is not None else None
    return [str(word) for word in words] if isinstance(words, list) else []


_CURVES = ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "step_ms", "data_wait_ms", "memory_gib")
_EVAL_COLUMNS = ("step", "tokens", "loss", "perplexity", "bits_per_byte")
_MOST_ROWS = 60
_CHECKPOINT_FIELDS = ("step", "path", "bytes", "seconds")
_SAMPLE_FIELDS = ("step", "label", "prompt", "text")
_INCIDENTS = frozenset({"warning", "replan", "recovery"})
_ENVIRONMENT = ("machine", "versions", "git", "data")


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the page (RUN/report.html unless told otherwise) and return where it is."""
    run = Path(run)
    events, lock = read_run(run)
    page = _page(run_data(run, events, lock), events, lock)
    return write_page(run / REPORT_FILE if out is None else Path(out), page, named=out is not None)


def report_data(run: Path) -> dict[str, Any]:
    """What the page says, as plain data."""
    return run_data(Path(run), *read_run(Path(run)))


def read_run(run: Path) -> tuple[EventList, Mapping[str, Any]]:
    if not (run / EVENTS_FILE).exists() and not (run / RECIPE_LOCK_FILE).exists():
        raise UserError("This holds no run.", where=str(run), fix="`redline runs` lists the runs there are.")
    try:
        lock = json.loads(read_text(run / RECIPE_LOCK_FILE))
    except (OSError, ValueError, RecursionError):  # the events still tell most of it
        lock = {}
    # a lock of an older version may hold values of secret environment variables
    return read_events(run / EVENTS_FILE), redact_all(lock) if isinstance(lock, dict) else {}


def run_data(run: Path, events: EventList, lock: Mapping[str, Any]) -> dict[str, Any]:
    """What the log and the lock say, as plain data."""
    summary = summarise(run, events)
    start: Event = next(iter(_of(events, "start")), {})
    steps, evals = _of(events, "step"), _of(events, "eval")
    plan = _plan(events)
    against = standing(steps, plan, lock)
    data: dict[str, Any] = {
        "schema": 1,
        "name": summary.name,
        "status": summary.status,
        "reason": None if summary.status in ("running", "crashed") else one_line(_of(events, "stop")[-1].get("reason")),
        "recipe_name": lock.get("recipe_name") or start.get("recipe"),
        "device": section(lock, "machine").get("name") or start.get("device"),
        "started": number(start, "time"),
        "headline": _headline(steps, comparable_evals(events))
        | _totals(summary)
        | {"mfu_formula": _formula(lock, plan)},
        "parameters": dict(section(lock, "parameters") or section(plan, "parameters")),
        "steps": [{key: step.get(key) for key in _CURVES} for step in _evenly(steps)],
        "roofline": against.data(),
        "evals": [{key: value for key, value in e.items() if key != "type"} for e in evals],
        "checkpoints": [_fields(e, _CHECKPOINT_FIELDS) for e in _of(events, "checkpoint")],
        "samples": [_fields(e, _SAMPLE_FIELDS) for e in _of(events, "sample")],
        "choices": [c for c in _list(lock, "choices") or _list(plan, "choices") if isinstance(c, Mapping)],
        "incidents": _incidents(events),
        "skipped_steps": int(sum(number(step, "skipped") or 0 for step in steps)),
        "environment": {key: dict(section(lock, key)) for key in _ENVIRONMENT if section(lock, key)},
        "seed": lock.get("seed"),
        "run_id": lock.get("run_id") or start.get("run_id"),
        "recipe": dict(section(lock, "recipe")),
        "timeline": [moment.data() for moment in timeline(events)],
        "repeat": how_to_repeat(lock, _of(events, "start"), _of(events, "plan"), str(run)).data(),
    }
    data["plan_source"] = section(plan, "throughput").get("source")
    data["planned"] = [row.data() for row in plan_rows_of(plan, data["headline"], against)]
    data["resume"] = resume_line(data, str(run))
    return {"verdict": verdict(data, steps, plan, against), **data}


def _headline(steps: Sequence[Event], evals: Sequence[Event]) -> dict[str, Any]:
    val_losses, rates = _numbers(evals, "loss"), _numbers(steps, "tokens_per_s")
    mfu, causal = _numbers(steps, "mfu"), _numbers(steps, "mfu_causal")
    return {
        "train_loss": _last(_numbers(steps, "loss")),
        "val_loss": _last(val_losses),
        "best_val_loss": min(val_losses, default=None),
        "perplexity": _last(_numbers(evals, "perplexity")),
        "bits_per_byte": _last(_numbers(evals, "bits_per_byte")),
        "tokens_per_s_median": statistics.median(rates) if rates else None,
        "mfu_median": statistics.median(mfu) if mfu else None,
        "mfu_causal_median": statistics.median(causal) if causal else None,
        "peak_memory_gib": max(_numbers(steps, "memory_gib"), default=None),
    }


def _totals(summary: RunSummary) -> dict[str, Any]:
    return {key: getattr(summary, key) for key in ("step", "tokens", "hours", "cost_usd")}


def _formula(lock: Mapping[str, Any], plan: Event) -> str | None:
    formula = section(lock, "flops_per_token").get("formula") or section(plan, "flops_per_token").get("formula")
    return None if formula is None else str(formula)


def _incidents(events: EventList) -> list[dict[str, Any]]:
    """What did not go smoothly, in order, each with the step at which it happened."""
    found: list[dict[str, Any]] = []
    step: float | None = None
    for event in events:
        step = number(event, "step") if number(event, "step") is not None else step
        if event["type"] in _INCIDENTS:
            found.append({"kind": event["type"], "step": step, "message": event.get("message")})
        elif event["type"] == "plan":
            found += [{"kind": "warning", "step": step, "message": text} for text in _list(event, "warnings")]
        elif event["type"] == "start" and number(event, "resumed_from") is not None:
            step = number(event, "resumed_from")
            message = (
                "Went on from the checkpoint of this step." if step else "Began again: no checkpoint to go on from."
            )
            found.append({"kind": "resumed", "step": step, "message": message})
        elif event["type"] == "step" and number(event, "skipped"):
            message = f"{event['skipped']} update(s) skipped: a loss or gradient was not finite."
            found.append({"kind": "skipped", "step": step, "message": message})
    if events.left_out:
        message = f"{events.left_out:,} logged steps are not shown: of so many, the lows and the highs of the loss are."
        found.append({"kind": "log", "step": None, "message": message})
    if events.unreadable:
        message = f"{events.unreadable} line(s) of the event log could not be read (a write was cut off)."
        found.append({"kind": "log", "step": None, "message": message})
    return found


def _page(data: dict[str, Any], events: EventList, lock: Mapping[str, Any]) -> str:
    steps, evals, plan = _of(events, "step"), _of(events, "eval"), _plan(events)
    against = standing(steps, plan, lock)
    when = draw_timeline(timeline(events))
    drawn = {
        "figures": draw_figures(steps, evals),
        "ceilings": draw_roofline(against),
        "timeline_figures": [when] if when else [],
    }
    tables = {
        "plan_cells": [row.cells() for row in plan_rows_of(plan, data["headline"], against)],
        "eval_columns": _eval_columns(evals),
        "eval_rows": [_eval_cells(e, _eval_columns(evals)) for e in _evenly(evals, _MOST_ROWS)],
        "checkpoint_rows": data["checkpoints"][-_MOST_ROWS:],
        "incident_rows": data["incidents"][-_MOST_ROWS:],
    }
    words = {
        "cards": _cards(data["headline"]),
        "sample_pairs": _sample_pairs(data["samples"]),
        "started_on": format_date(data["started"]),
        "recipe_yaml": _yaml(data["recipe"]),
    }
    return render("report.html.j2", data | drawn | tables | words)


def _eval_columns(evals: Sequence[Event]) -> list[str]:
    """The usual ones first, then whatever else was evaluated; what has no numbers has no column."""
    names = dict.fromkeys([*_EVAL_COLUMNS, *(key for event in evals for key in event if key != "time")])
    return [name for name in names if any(number(event, name) is not None for event in evals)]


def _eval_cells(event: Event, columns: Sequence[str]) -> list[str]:
    values = {name: number(event, name) for name in columns}
    shown = {"step": "{:,.0f}".format, "tokens": format_count}
    return ["–" if v is None else shown.get(name, _figure)(v) for name, v in values.items()]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _cards(headline: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The numbers one looks for first: (name, value, remark). A number that is not known has no card."""
    h = headline
    best = f"best {h['best_val_loss']:.4f}" if h["best_val_loss"] != h["val_loss"] else ""
    causal = "" if h["mfu_causal_median"] is None else f"mask-exact {h['mfu_causal_median']:.1%}"
    formula = f"FLOPs/token = {h['mfu_formula']}" if h["mfu_formula"] else ""
    time_and_steps = f"{h['step']:,} steps" if h["step"] is not None else ""
    cards = [
        ("validation loss", h["val_loss"], "{:.4f}".format, best),
        ("training loss", h["train_loss"], "{:.4f}".format, "last logged step"),
        ("perplexity", h["perplexity"], "{:,.2f}".format, "validation"),
        ("bits per byte", h["bits_per_byte"], "{:.4f}".format, "validation"),
        ("tokens", h["tokens"], format_count, time_and_steps),
        ("tokens/s", h["tokens_per_s_median"], format_count, "median"),
        ("MFU", h["mfu_median"], "{:.1%}".format, "; ".join(filter(None, ["median", causal, formula]))),
        ("peak memory", h["peak_memory_gib"], "{:.1f} GiB".format, ""),
        ("training time", h["hours"], lambda hours: format_seconds(hours * 3600), ""),
        ("cost", h["cost_usd"], dollars, ""),
    ]
    return [(name, show(value), remark) for name, value, show, remark in cards if value is not None]


def _sample_pairs(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """For each prompt its first and its last sample: what training changed."""
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_prompt.setdefault(clean(sample.get("prompt")), []).append(sample)
    return [(prompt, [said[0], said[-1]] if len(said) > 1 else said) for prompt, said in by_prompt.items()]


def _yaml(recipe: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True) if recipe else ""


def _of(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["type"] == kind]


def _plan(events: Sequence[Event]) -> Event:
    return (_of(events, "plan") or [{}])[-1]


def _list(fields: Mapping[str, Any], key: str) -> list[Any]:
    value = fields.get(key)
    return value if isinstance(value, list) else []


def _fields(event: Event, keys: Sequence[str]) -> dict[str, Any]:
    return {key: event.get(key) for key in keys}


def _numbers(events: Sequence[Event], key: str) -> list[float]:
    return [value for event in events if (value := number(event, key)) is not None]


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def _evenly(events: Sequence[Event], most: int = MAX_POINTS) -> list[Event]:
    """At most so many events, the first and the last among them."""
    count = min(len(events), most)
    return [events[round(i * (len(events) - 1) / max(count - 1, 1))] for i in range(count)]
