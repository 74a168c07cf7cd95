"""One page about one run, made from its lock and its event log: self-contained HTML that can be mailed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.cache import read_text
from redline.errors import UserError, cleaned
from redline.monitor.console import clean, one_line
from redline.monitor.events import Event, EventList, number, read_events, section
from redline.monitor.figures import MAX_POINTS, draw_figures
from redline.monitor.pages import format_date, render, write_page
from redline.monitor.plan_table import plan_rows_of
from redline.monitor.repeat import how_to_repeat
from redline.monitor.resumed import comparable_evals
from redline.monitor.roofline import standing
from redline.monitor.roofline_figures import draw_roofline
from redline.monitor.runs import EVENTS, LOCK, RunSummary, summarise
from redline.monitor.timeline import draw_timeline, timeline
from redline.monitor.verdict import dollars, resume_line, verdict
from redline.units import format_count, format_seconds

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
    return write_page(run / "report.html" if out is None else Path(out), page, named=out is not None)


def report_data(run: Path) -> dict[str, Any]:
    """What the page says, as plain data."""
    return run_data(Path(run), *read_run(Path(run)))


def read_run(run: Path) -> tuple[EventList, Mapping[str, Any]]:
    if not (run / EVENTS).exists() and not (run / LOCK).exists():
        raise UserError("This holds no run.", where=str(run), fix="`redline runs` lists the runs there are.")
    try:
        lock = json.loads(read_text(run / LOCK))
    except (OSError, ValueError, RecursionError):  # the events still tell most of it
        lock = {}
    # a lock of an older version may hold values of secret environment variables
    return read_events(run / EVENTS), cleaned(lock) if isinstance(lock, dict) else {}


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
