"""Comparisons of several runs: what differs, which one won and by how much, and their curves on one page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from redline.jobs.base import is_job, options_of
from redline.recipe.load import flatten
from redline.runs.events import Event, number, numbers, one_line, read_events, section
from redline.runs.report.figures import RUN_INKS, Figure, draw_curve, drawing, ink, series, time_unit
from redline.runs.report.page import comparable_evals, lock_at_the_end, read_run, render, run_data, write_page
from redline.runs.speed import RunSpeed
from redline.runs.summary import dollars, summarise
from redline.units import format_count, format_gib, format_seconds
from redline.vocabulary import COMPARISON_FILE, EVENTS_FILE, Status

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


NOT_STARTED = "waiting"  # the status of a member of a sweep without a run


@dataclass(frozen=True)
class Row:
    """A run in the table of a sweep. Figures that its log does not hold are None."""

    name: str
    values: dict[str, str]
    status: str
    exit_code: int | None  # None: not started by this command
    step: int | None = None
    loss: float | None = None
    best_val: float | None = None
    tokens_per_s: float | None = None
    hours: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sweep_row(run: Path, values: dict[str, str], exit_code: int | None) -> Row:
    """Return the row of a run, or of a directory in which no run was started."""
    if not (run / EVENTS_FILE).is_file():
        return Row(run.name, values, NOT_STARTED if exit_code is None else Status.FAILED, exit_code)
    history = read_events(run / EVENTS_FILE)
    summary, speed = summarise(run, history), RunSpeed(history.of_type("step"))
    return Row(
        run.name,
        values,
        summary.status,
        exit_code,
        step=summary.step,
        loss=summary.loss,
        best_val=min(numbers(history.of_type("eval"), "loss"), default=None),
        tokens_per_s=speed.median("tokens_per_s"),
        hours=summary.hours,
    )


# ----------------------------------------------------------------------------------------------------
# What differs between the runs.


MISSING = "–"
# What else may explain a difference, besides the recipe: the name and the place in the lock.
_CONDITIONS = (
    ("machine", ("machine", "name")),
    ("commit", ("git", "commit")),
    ("redline", ("versions", "redline")),
    ("torch", ("versions", "torch")),
    ("training tokens", ("data", "train_tokens")),
    ("data", ("data", "fingerprint")),
)


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison: the data of its report, and the events from which its curves are drawn."""

    name: str
    data: dict[str, Any]
    lock: Mapping[str, Any]
    steps: list[Event]
    evals: list[Event]


@dataclass(frozen=True)
class Difference:
    """A key and the value that each run has for it, as text."""

    key: str
    values: list[str]

    @property
    def differs(self) -> bool:
        return len({value for value in self.values if value != MISSING}) > 1


def read_runs(paths: Sequence[Path]) -> list[ComparedRun]:
    """Read the runs of a comparison."""
    return [_read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the folder name of each run, or its whole path if two have the same name."""
    names = [path.resolve().name for path in paths]
    return [one_line(name if names.count(name) == 1 else path) for name, path in zip(names, paths, strict=True)]


def _read_run(path: Path, name: str) -> ComparedRun:
    history, lock = read_run(path)
    steps = sorted(history.of_type("step"), key=lambda event: number(event, "step") or 0)
    data, final_lock = run_data(path, history, lock), lock_at_the_end(path, lock, history)
    return ComparedRun(name, data, final_lock, steps, comparable_evals(history))


def recipe_differences(runs: Sequence[ComparedRun]) -> list[Difference]:
    """Return the keys of the resolved recipes that differ, in the order of the recipe. A key that only some runs have,
    of another objective or version, is not a difference by itself."""
    flat = [dict(flatten(dict(section(run.lock, "recipe")))) for run in runs]
    keys = dict.fromkeys(key for recipe in flat for key in recipe if key != "description")
    rows = [Difference(key, [_text(recipe[key]) if key in recipe else MISSING for recipe in flat]) for key in keys]
    return [row for row in rows if row.differs]


def other_differences(runs: Sequence[ComparedRun]) -> list[Difference]:
    """Return what differs in the machine, the code and the data."""
    rows = [
        Difference(name, [_text(section(run.lock, part).get(key, MISSING)) for run in runs])
        for name, (part, key) in _CONDITIONS
    ]
    return [row for row in rows if row.differs]


def _text(value: Any) -> str:
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


# ----------------------------------------------------------------------------------------------------
# Which run won, by how much, and whether their losses can be compared at all.


_TOKENIZER = ("data", "tokenizer_fingerprint")
_OTHER_DATA = (
    "The runs have different data, so there is no winner: a lower loss may come from easier text. "
    "`redline eval RUN --data FILE` evaluates each run on the same text."
)
_CAUTIONS = {
    "data.fingerprint": "The same rows are split or packed differently, so the validation rows may differ.",
    "recipe.data.seq_len": "The runs differ in data.seq_len: a longer context makes each token easier to predict.",
    "recipe.eval.sequences": "The runs differ in eval.sequences: part of the validation text is not the same.",
}
_PARTIAL_EVALUATION = (
    "Each run evaluated the first sequences of the validation set, and with different tokenizers these are not the "
    "same text: `redline eval` evaluates all of it."
)
_EVEN = 0.001  # of a loss; a smaller difference is a draw


@dataclass(frozen=True)
class Measure:
    """The fairest measure that the runs share: its name, its key in evaluations, each run's score, and cautions."""

    name: str
    key: str | None  # None: training losses, which no evaluation holds
    scores: list[float | None]
    cautions: list[str]

    @property
    def ranked(self) -> list[tuple[float, int]]:
        """Return (score, index of the run), the lowest score, which wins, first."""
        return sorted((score, place) for place, score in enumerate(self.scores) if score is not None)


def measure(runs: Sequence[ComparedRun]) -> Measure | str:
    """Return the fairest measure, or a sentence that says why the losses cannot be compared."""
    objectives = _lock_values(runs, "recipe", "objective")
    if len(objectives) > 1:
        return f"The runs have different objectives ({', '.join(sorted(objectives))}): their losses do not compare."
    if _other_data(runs):
        return _OTHER_DATA
    if not _same_loss(runs):
        return "The losses are averaged over different tokens (loss_per), so there is no winner."
    if len(_lock_values(runs, *_TOKENIZER)) > 1:
        bits = [_lowest(run, "bits_per_byte") for run in runs]
        if None in bits:
            return "The tokenizers differ and a run has no bits per byte: the losses do not compare."
        caution = "The tokenizers differ, so bits per byte are compared, not losses."
        lengths = _cautions(runs, "recipe.data.seq_len")
        return Measure("bits per byte", "bits_per_byte", bits, [caution, *_partial_evaluation(runs), *lengths])
    cautions = _cautions(runs, "data.fingerprint", "recipe.data.seq_len", "recipe.eval.sequences")
    validation = [_lowest(run, "loss") for run in runs]
    if any(value is not None for value in validation):
        return Measure("best validation loss", "loss", validation, cautions)
    training = [run.data["headline"]["train_loss"] for run in runs]
    return Measure("training loss", None, training, [*cautions, "No validation data: training losses are compared."])


def winner(runs: Sequence[ComparedRun]) -> list[str]:
    """Return sentences about the comparison: the winner first, then what forbids or weakens the comparison."""
    comparison = measure(runs)
    if isinstance(comparison, str):
        return [comparison]
    if len(comparison.ranked) < 2:
        return ["Fewer than two runs have a loss: there is nothing to compare yet."]
    (best, first), (second, other) = comparison.ranked[:2]
    gap = second - best
    if _even(comparison):
        even = f"{runs[first].name} and {runs[other].name} are even: {comparison.name} {best:.4g} and {second:.4g}."
        return [even, *_speeds(runs), *comparison.cautions]
    share = f" ({100 * gap / abs(second):.1f} %)" if second else ""
    won = f"{runs[first].name} won: {comparison.name} {best:.4g}, {gap:.2g}{share} lower than {runs[other].name}."
    return [won, *_reached_earlier(runs[first], runs[other], comparison), *_speeds(runs), *comparison.cautions]


def winner_name(runs: Sequence[ComparedRun]) -> str | None:
    """Return the run with the lowest score; None if scores do not compare, are even, or are fewer than two."""
    comparison = measure(runs)
    if isinstance(comparison, str) or len(comparison.ranked) < 2 or _even(comparison):
        return None
    return runs[comparison.ranked[0][1]].name


def _even(comparison: Measure) -> bool:
    (best, _), (second, _) = comparison.ranked[:2]
    return second - best <= _EVEN * abs(best)


def losses_are_comparable(runs: Sequence[ComparedRun]) -> bool:
    """Return whether a lower loss is better: only for the same objective, tokenizer and data."""
    same = all(len(_lock_values(runs, *place)) <= 1 for place in (("recipe", "objective"), _TOKENIZER))
    return same and not _other_data(runs) and _same_loss(runs)


def _same_loss(runs: Sequence[ComparedRun]) -> bool:
    """Return whether the loss means the same in all runs. Keys that changed its meaning are missing in older locks,
    which then have the older value."""
    meanings = set()
    for run in runs:
        recipe = section(run.lock, "recipe")
        name = str(recipe.get("objective"))
        older = options_of(name).defaults_in_older_locks if is_job(name) else {}
        meanings.add(str({key: section(recipe, name).get(key, value) for key, value in older.items()}))
    return len(meanings) <= 1


def _other_data(runs: Sequence[ComparedRun]) -> bool:
    """Return whether the runs read different data.

    With different tokenizers no fingerprint of tokens can be equal, so the names of the sources and the bytes of each
    split are compared. A fingerprint of rows also covers how they are split and packed; `content`, which older locks
    lack, covers only the rows.
    """
    if len(_lock_values(runs, *_TOKENIZER)) > 1:
        names = {str(_sources(run)) for run in runs if _sources(run)}
        return len(names) > 1 or len(_lock_values(runs, "data", "text_bytes")) > 1
    contents = [section(run.lock, "data").get("content") for run in runs]
    key = "content" if all(contents) else "fingerprint"
    return len(_lock_values(runs, "data", key)) > 1


def _sources(run: ComparedRun) -> list[str]:
    """Return the names of the run's sources, without their weights."""
    given = section(section(run.lock, "recipe"), "data").get("source")
    parts = given if isinstance(given, list) else [given]
    return [str(part.get("source") if isinstance(part, dict) else part) for part in parts if part is not None]


def _lock_values(runs: Sequence[ComparedRun], *path: str) -> set[str]:
    """Return the different values that the locks hold at this path; a run without a lock adds none."""
    *parts, key = path
    values = [reduce(section, parts, run.lock).get(key) for run in runs]
    return {str(value) for value in values if value is not None}


def _cautions(runs: Sequence[ComparedRun], *paths: str) -> list[str]:
    """Return a caution for each of these paths at which the locks differ."""
    return [_CAUTIONS[path] for path in paths if len(_lock_values(runs, *path.split("."))) > 1]


def _partial_evaluation(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a caution if a run evaluated only the first sequences of its validation set."""
    for run in runs:
        recipe = section(run.lock, "recipe")
        sequences, length = number(section(recipe, "eval"), "sequences"), number(section(recipe, "data"), "seq_len")
        tokens = number(section(run.lock, "data"), "val_tokens")
        if None not in (sequences, length, tokens) and sequences * length < tokens:  # type: ignore[operator]
            return [_PARTIAL_EVALUATION]
    return []


def _lowest(run: ComparedRun, key: str) -> float | None:
    return min(numbers(run.evals, key), default=None)


def _reached_earlier(first: ComparedRun, other: ComparedRun, comparison: Measure) -> list[str]:
    """Return how much earlier, in time and money, the winner reached the best score of the next run."""
    target = _lowest(other, comparison.key) if comparison.key else None
    if comparison.key is None or target is None:
        return []
    savings = []
    units: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("hours", lambda hours: format_seconds(3600 * hours)),
        ("cost_usd", lambda cost: f"${cost:.2g}"),
    )
    for unit, show in units:
        mine, theirs = (_spent_until(run, comparison.key, target, unit) for run in (first, other))
        if mine is not None and theirs is not None and 0 < mine < theirs:
            savings.append(f"{show(mine)} instead of {show(theirs)}")
    return [f"It reached {other.name}'s {target:.4g} after {' and '.join(savings)}."] if savings else []


def _spent_until(run: ComparedRun, key: str, target: float, unit: str) -> float | None:
    """Return the hours or dollars at the first evaluation that is as good as the target."""
    step = next((number(e, "step") for e in run.evals if (v := number(e, key)) is not None and v <= target), None)
    at, value = series(run.steps, "step", unit)
    if step is None or not len(at):
        return None
    return float(np.interp(step, np.concatenate([[0.0], at]), np.concatenate([[0.0], value])))


def _speeds(runs: Sequence[ComparedRun]) -> list[str]:
    rates = [(run.data["headline"]["tokens_per_s_median"], run.name) for run in runs]
    known = sorted((rate, name) for rate, name in rates if rate)
    if len(known) < 2 or known[-1][0] < 1.02 * known[0][0]:
        return []
    (slow, slowest), (fast, fastest) = known[0], known[-1]
    return [f"{fastest} was the fastest, with {fast / slow:.2f} times the tokens/s of {slowest}."]


# ----------------------------------------------------------------------------------------------------
# Loss curves of the runs in one figure: by step, tokens, time or dollars.


DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 3)))
MARKS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class View:
    """The figures over one axis; `name` is the title of its tab."""

    key: str
    name: str
    figures: list[Figure]
    without: list[str]  # runs that have no number for this axis
    at_the_end: str  # a sentence with the loss of each run where the shortest run ended


_AXES = (("step", "steps"), ("tokens", "tokens"), ("hours", "time"), ("cost_usd", "dollars"))


def aligned_views(runs: Sequence[ComparedRun]) -> list[View]:
    """Return a view for each axis that some run has numbers for."""
    views = []
    for key, name in _AXES:
        without = [run.name for run in runs if not len(series(run.steps, key, "loss")[0])]
        if len(without) < len(runs):
            views.append(View(key, name, _figures(runs, key), without, _at_the_end(runs, key)))
    return views


def _at_the_end(runs: Sequence[ComparedRun], key: str) -> str:
    """Return the validation losses where the shortest run was evaluated last, the fair comparison on this axis."""
    curves = [(run.name, *_validation_curve(run, key)) for run in runs]
    known = [(name, x, y) for name, x, y in curves if len(x) and x[-1] > 0]
    if len(known) < 2:
        return ""
    unit, label = _unit(runs, key)
    end = min(float(x[-1]) for _, x, _ in known)
    losses = sorted((float(np.interp(end, x, y)), name) for name, x, y in known)
    place = f"${end:.2g}" if key == "cost_usd" else f"{format_count(end / unit)} {label}"
    return f"At {place}, where the shortest run ends: {', '.join(f'{name} {loss:.4g}' for loss, name in losses)}."


def _figures(runs: Sequence[ComparedRun], key: str) -> list[Figure]:
    unit, label = _unit(runs, key)
    training = [tuple(series(run.steps, key, "loss")) for run in runs]
    validation = [_validation_curve(run, key) for run in runs]
    figures = []
    for title, marked, curves in (("Training loss", False, training), ("Validation loss", True, validation)):
        if any(len(y) for _, y in curves):
            scaled = [(x / unit, y) for x, y in curves]
            svg = drawing(partial(_draw, runs=runs, curves=scaled, label=label, marked=marked))
            figures.append(Figure(f"{title} by {label}", svg))
    return figures


def _unit(runs: Sequence[ComparedRun], key: str) -> tuple[float, str]:
    """Return what the axis is divided by, and its name."""
    if key != "hours":
        return 1.0, {"step": "steps", "tokens": "tokens", "cost_usd": "dollars"}[key]
    longest = max((float(hours.max()) for run in runs if len(hours := series(run.steps, key)[0])), default=0.0)
    seconds, name = time_unit(3600 * longest)
    return seconds / 3600, f"{name} of training"


def _validation_curve(run: ComparedRun, key: str) -> tuple[Array, Array]:
    """Return the validation losses along an axis. Evaluations log their step; the rest is interpolated from steps."""
    step, loss = series(run.evals, "step", "loss")
    at, value = series(run.steps, "step", key) if key != "step" else (step, step)
    if not len(at):
        return step[:0], loss[:0]
    return np.interp(step, np.concatenate([[0.0], at]), np.concatenate([[0.0], value])), loss


def _draw(
    canvas: Canvas, runs: Sequence[ComparedRun], curves: Sequence[tuple[Array, Array]], label: str, marked: bool
) -> None:
    ax = canvas.subplots()
    for place, (run, (x, y)) in enumerate(zip(runs, curves, strict=True)):
        if len(y):
            _draw_run(ax, place, run.name, x, y, marked)
    ax.set_xlabel(label)
    ax.set_ylabel("loss")
    ax.xaxis.set_major_formatter(lambda value, _: f"${value:.3g}" if label == "dollars" else format_count(value))
    first = [y[0] for _, y in curves if len(y)]
    lowest = min(float(y.min()) for _, y in curves if len(y))
    ax.set_ylim(lowest - 0.03 * (max(first) - lowest or 1.0), None)
    for text in ax.legend(loc="upper right").get_texts():
        text.set_parse_math(False)  # the name of a run may hold dollar signs


def _draw_run(ax: Axes, place: int, name: str, x: Array, y: Array, marked: bool) -> None:
    """Draw a run in a colour and a dash of its own, so that the runs differ without colour too."""
    colour, dash = RUN_INKS[place % len(RUN_INKS)], DASHES[place % len(DASHES)]
    label = name if len(name) <= 32 else f"…{name[-31:]}"
    label = f" {label}" if label.startswith("_") else label  # matplotlib leaves labels with _ out of the legend
    if not marked:
        draw_curve(ax, x, y, colour, label, dash=dash)
        return
    mark = MARKS[place % len(MARKS)] if len(x) <= 60 else ""
    ax.plot(x, y, color=ink(colour), linestyle=dash, marker=mark, markersize=4, label=label)


def legend_of(count: int) -> list[dict[str, str]]:
    """Return the colour of each run and its dash as an SVG attribute, for the tables of the page."""
    dashes = ["none" if dash == "-" else " ".join(f"{part:g}" for part in dash[1]) for dash in DASHES]
    return [{"ink": RUN_INKS[i % len(RUN_INKS)], "dash": dashes[i % len(DASHES)]} for i in range(count)]


# ----------------------------------------------------------------------------------------------------
# The comparison as a page and as plain data.


@dataclass(frozen=True)
class Column:
    """A figure of each run. `best` picks the one to mark; None if neither more nor less is better."""

    title: str
    key: str
    show: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None


_COLUMNS = (
    Column("best validation loss", "best_val_loss", "{:.4f}".format, min),
    Column("training loss", "train_loss", "{:.4f}".format),
    Column("bits per byte", "bits_per_byte", "{:.4f}".format, min),
    Column("steps", "step", "{:,.0f}".format),
    Column("tokens", "tokens", format_count),
    Column("time", "hours", lambda hours: format_seconds(3600 * hours)),
    Column("cost", "cost_usd", dollars),
    Column("tokens/s", "tokens_per_s_median", format_count, max),
    Column("MFU", "mfu_median", "{:.1%}".format, max),
    Column("peak memory", "peak_memory_gib", format_gib, min),
)
_LOSSES = ("best_val_loss", "bits_per_byte")


def write_comparison(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page, comparison.html beside the first run by default, and return its path."""
    page = render("comparison.html.j2", _page_values(read_runs(paths)))
    path = paths[0].parent / COMPARISON_FILE if out is None else Path(out)
    return write_page(path, page, named=out is not None)


def comparison_data(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the content of the comparison as plain data."""
    runs = read_runs(paths)
    return {
        "schema": 1,
        "verdict": winner(runs),
        "winner": winner_name(runs),
        "recipe_differences": [asdict(row) for row in recipe_differences(runs)],
        "other_differences": [asdict(row) for row in other_differences(runs)],
        "runs": [run.data | {"name": run.name} for run in runs],
    }


def _page_values(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    views = aligned_views(runs)
    columns = [column for column in _COLUMNS if any(_value(run, column) is not None for run in runs)]
    if not losses_are_comparable(runs):
        views = [replace(view, at_the_end="") for view in views]
        columns = [replace(column, best=None) if column.key in _LOSSES else column for column in columns]
    return {
        "names": [run.name for run in runs],
        "runs": [run.data for run in runs],
        "inks": legend_of(len(runs)),
        "verdict": winner(runs),
        "figure_rows": [(column.title, _cells(runs, column)) for column in columns],
        "recipe_rows": recipe_differences(runs),
        "other_rows": other_differences(runs),
        "views": views,
    }


def _value(run: ComparedRun, column: Column) -> float | None:
    value = run.data["headline"][column.key]
    return None if value is None else float(value)


def _cells(runs: Sequence[ComparedRun], column: Column) -> list[tuple[str, bool]]:
    """Return each run's figure as text and whether to mark it as the best. Figures that read the same are not
    marked."""
    values = [_value(run, column) for run in runs]
    texts = ["–" if value is None else column.show(value) for value in values]
    known = [value for value in values if value is not None]
    best = column.best(known) if column.best is not None else None
    differ = len({text for text in texts if text != "–"}) > 1
    return [(text, differ and best is not None and value == best) for text, value in zip(texts, values, strict=True)]
