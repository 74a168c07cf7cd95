"""Runs side by side: what each reached, and how fast."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from redline.jobs.base import is_job, options_of
from redline.recipe.load import flatten
from redline.runs.console import one_line
from redline.runs.events import Event, number, read_events, section
from redline.runs.report.figures import RUN_INKS, Figure, draw_curve, drawing, ink, series
from redline.runs.report.html import render, write_page
from redline.runs.report.page import as_it_ended, comparable_evals, read_run, run_data
from redline.runs.report.timeline import time_unit
from redline.runs.report.verdict import dollars
from redline.runs.summary import last_number, run_status
from redline.units import format_count, format_seconds
from redline.vocabulary import COMPARISON_FILE, EVENTS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One run of a comparison. What its log does not say is None."""

    name: str
    values: dict[str, str]
    status: str
    exit_code: int | None  # None: it was not started this time
    step: int | None = None
    loss: float | None = None
    best_val: float | None = None
    tokens_per_s: float | None = None
    hours: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_run(run: Path, values: dict[str, str], exit_code: int | None) -> Row:
    """The row of a run, or of what never became one."""
    if not (run / EVENTS_FILE).is_file():
        return Row(run.name, values, "waiting" if exit_code is None else "failed", exit_code)
    events = read_events(run / EVENTS_FILE)
    steps = [e for e in events if e["type"] == "step"]
    counted = [e for e in events if e["type"] in ("step", "stop")]
    losses = [loss for e in events if e["type"] == "eval" and (loss := number(e, "loss")) is not None]
    rates = [rate for e in steps if (rate := number(e, "tokens_per_s")) is not None]
    reached = last_number(counted, "step")
    return Row(
        run.name,
        values,
        run_status(run, events),
        exit_code,
        step=None if reached is None else int(reached),
        loss=last_number(steps, "loss"),
        best_val=min(losses, default=None),
        tokens_per_s=statistics.median(rates) if rates else None,
        hours=last_number(counted, "hours"),
    )


# ----------------------------------------------------------------------------------------------------
# Several runs held against each other: what differs in their recipes, what each reached, and which won by how much.


MISSING = "–"
# Besides the recipe: what else may explain a difference.
_CONDITIONS = (
    ("machine", ("machine", "name")),
    ("commit", ("git", "commit")),
    ("redline", ("versions", "redline")),
    ("torch", ("versions", "torch")),
    ("training tokens", ("data", "train_tokens")),
    ("data", ("data", "fingerprint")),
)


@dataclass(frozen=True)
class Side:
    """One run of a comparison: what its report says, and the events that its curves are drawn from."""

    name: str
    data: dict[str, Any]
    lock: Mapping[str, Any]
    steps: list[Event]
    evals: list[Event]


@dataclass(frozen=True)
class Difference:
    """A key that the runs do not agree on, with each run's value as text."""

    key: str
    values: list[str]

    @property
    def real(self) -> bool:
        return len({value for value in self.values if value != MISSING}) > 1


def read_sides(runs: Sequence[Path]) -> list[Side]:
    names = _names(runs)
    return [_side(run, name) for run, name in zip(runs, names, strict=True)]


def _names(runs: Sequence[Path]) -> list[str]:
    """A run's folder; where two have the same, the whole path."""
    short = [run.resolve().name for run in runs]
    return [one_line(name if short.count(name) == 1 else run) for name, run in zip(short, runs, strict=True)]


def _side(run: Path, name: str) -> Side:
    events, lock = read_run(run)
    steps = sorted((e for e in events if e["type"] == "step"), key=lambda event: number(event, "step") or 0)
    return Side(name, run_data(run, events, lock), as_it_ended(run, lock, events), steps, comparable_evals(events))


def recipe_differences(sides: Sequence[Side]) -> list[Difference]:
    """Keys of the resolved recipes that runs give different values, in the recipe's own order. A key that only some
    have (of another objective or version) is no difference by itself."""
    flat = [dict(flatten(dict(section(side.lock, "recipe")))) for side in sides]
    keys = dict.fromkeys(key for recipe in flat for key in recipe if key != "description")
    rows = [Difference(key, [_text(recipe[key]) if key in recipe else MISSING for recipe in flat]) for key in keys]
    return [row for row in rows if row.real]


def other_differences(sides: Sequence[Side]) -> list[Difference]:
    """Of the machine, the code and the data."""
    rows = [
        Difference(name, [_text(section(side.lock, part).get(key, MISSING)) for side in sides])
        for name, (part, key) in _CONDITIONS
    ]
    return [row for row in rows if row.real]


def _text(value: Any) -> str:
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


# ----------------------------------------------------------------------------------------------------
# Which of several runs won, by how much, and whether the question can be asked at all.


_TOKENIZER = ("data", "tokenizer_fingerprint")
_OTHER_DATA = (
    "Their data differ, so there is no winner: a lower loss may come from easier text. "
    "`redline eval RUN --data FILE` scores each on the same text."
)
_EASIER = {
    "data.fingerprint": "The same rows are split or packed in different ways, so other rows may be held out.",
    "recipe.data.seq_len": "Their data.seq_len differ: a longer context makes each token easier to predict.",
    "recipe.eval.sequences": "Their eval.sequences differ: they were evaluated on different text, in part.",
}
_PART = "Each looked at the beginning of what is held out, by its own tokens: `redline eval` scores all of it."
_EVEN = 0.001  # of a loss: closer than that is a draw


@dataclass(frozen=True)
class Measure:
    """The fairest one that runs share: its name, a number for each run, and what to beware of."""

    name: str
    scores: list[float | None]
    cautions: list[str]

    @property
    def ranked(self) -> list[tuple[float, int]]:
        """Scores with their runs' places, the lowest first: the winner's."""
        return sorted((score, place) for place, score in enumerate(self.scores) if score is not None)


def measure(sides: Sequence[Side]) -> Measure | str:
    """Or a sentence: why their losses do not compare."""
    objectives = _known(sides, "recipe", "objective")
    if len(objectives) > 1:
        return f"They learn different things ({', '.join(sorted(objectives))}): their losses do not compare."
    if _other_data(sides):
        return _OTHER_DATA
    if not _same_loss(sides):
        return "Their losses divide by different tokens (loss_per), so there is no winner."
    if len(_known(sides, *_TOKENIZER)) > 1:
        bits = [_lowest(side, "bits_per_byte") for side in sides]
        if None in bits:
            return "Their tokenizers differ, and not all know their bits per byte: their losses do not compare."
        beware = "Their tokenizers differ, so bits per byte are compared, not losses."
        text = _differing(sides, "recipe.data.seq_len")
        return Measure("bits per byte", bits, [beware, *_in_part(sides), *text])
    cautions = _differing(sides, "data.fingerprint", "recipe.data.seq_len", "recipe.eval.sequences")
    held_out = [_lowest(side, "loss") for side in sides]
    if any(value is not None for value in held_out):
        return Measure("best validation loss", held_out, cautions)
    trained = [side.data["headline"]["train_loss"] for side in sides]
    return Measure("training loss", trained, [*cautions, "Nothing was held out: training losses are compared."])


def winner(sides: Sequence[Side]) -> list[str]:
    """Sentences, the first about the winner; what forbids or weakens the comparison is one of them."""
    found = measure(sides)
    if isinstance(found, str):
        return [found]
    if len(found.ranked) < 2:
        return ["Fewer than two of them have a loss: there is nothing to compare yet."]
    (best, first), (second, other) = found.ranked[:2]
    gap = second - best
    if _even(found):
        said = f"{sides[first].name} and {sides[other].name} are even: {found.name} {best:.4g} and {second:.4g}."
        return [said, *_pace(sides), *found.cautions]
    share = f" ({100 * gap / abs(second):.1f} %)" if second else ""
    said = f"{sides[first].name} won: {found.name} {best:.4g}, {gap:.2g}{share} lower than that of {sides[other].name}."
    return [said, *_sooner(sides[first], sides[other], found.name), *_pace(sides), *found.cautions]


def winner_name(sides: Sequence[Side]) -> str | None:
    """Return the run with the lowest score; None where scores do not compare, are even, or are fewer than two."""
    found = measure(sides)
    if isinstance(found, str) or len(found.ranked) < 2 or _even(found):
        return None
    return sides[found.ranked[0][1]].name


def _even(found: Measure) -> bool:
    (best, _), (second, _) = found.ranked[:2]
    return second - best <= _EVEN * abs(best)


def losses_compare(sides: Sequence[Side]) -> bool:
    """Return whether a lower loss is a better one: only for one objective, one vocabulary and the same data."""
    same = all(len(_known(sides, *place)) <= 1 for place in (("recipe", "objective"), _TOKENIZER))
    return same and not _other_data(sides) and _same_loss(sides)


def _same_loss(sides: Sequence[Side]) -> bool:
    """Return whether the loss means the same in all runs: of keys that changed it, older locks have the older value."""
    meanings = set()
    for side in sides:
        recipe = section(side.lock, "recipe")
        name = str(recipe.get("objective"))
        older = options_of(name).defaults_in_older_locks if is_job(name) else {}
        meanings.add(str({key: section(recipe, name).get(key, value) for key, value in older.items()}))
    return len(meanings) <= 1


def _other_data(sides: Sequence[Side]) -> bool:
    """Return whether the runs read different data.

    With different tokenizers no digest of tokens can be equal, so the names of the sources and the bytes of each split
    have to do. A fingerprint of rows also covers how they are split and packed; `content`, which older locks lack,
    covers the rows alone.
    """
    if len(_known(sides, *_TOKENIZER)) > 1:
        names = {str(_sources(side)) for side in sides if _sources(side)}
        return len(names) > 1 or len(_known(sides, "data", "text_bytes")) > 1
    contents = [section(side.lock, "data").get("content") for side in sides]
    key = "content" if all(contents) else "fingerprint"
    return len(_known(sides, "data", key)) > 1


def _sources(side: Side) -> list[str]:
    """Return the names of the run's sources, without their weights."""
    given = section(section(side.lock, "recipe"), "data").get("source")
    parts = given if isinstance(given, list) else [given]
    return [str(part.get("source") if isinstance(part, dict) else part) for part in parts if part is not None]


def _known(sides: Sequence[Side], *path: str) -> set[str]:
    """What the locks hold there; a run without a lock says nothing."""
    *parts, key = path
    found = [reduce(section, parts, side.lock).get(key) for side in sides]
    return {str(value) for value in found if value is not None}


def _differing(sides: Sequence[Side], *paths: str) -> list[str]:
    return [_EASIER[path] for path in paths if len(_known(sides, *path.split("."))) > 1]


def _in_part(sides: Sequence[Side]) -> list[str]:
    """The first so many sequences of two tokenizers are not the same text."""
    for side in sides:
        recipe = section(side.lock, "recipe")
        sequences, length = number(section(recipe, "eval"), "sequences"), number(section(recipe, "data"), "seq_len")
        tokens = number(section(side.lock, "data"), "val_tokens")
        if None not in (sequences, length, tokens) and sequences * length < tokens:  # type: ignore[operator]
            return [_PART]
    return []


def _lowest(side: Side, key: str) -> float | None:
    return min((value for event in side.evals if (value := number(event, key)) is not None), default=None)


def _sooner(first: Side, other: Side, measure: str) -> list[str]:
    """How much earlier the winner stood where the next one ended, in time and money."""
    key = {"best validation loss": "loss", "bits per byte": "bits_per_byte"}.get(measure)
    target = _lowest(other, key) if key else None
    if key is None or target is None:
        return []
    said = []
    ways: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("hours", lambda hours: format_seconds(3600 * hours)),
        ("cost_usd", lambda cost: f"${cost:.2g}"),
    )
    for spent, show in ways:
        mine, theirs = (_spent_until(side, key, target, spent) for side in (first, other))
        if mine is not None and theirs is not None and 0 < mine < theirs:
            said.append(f"{show(mine)} instead of {show(theirs)}")
    reached = f"It stood at {other.name}'s {target:.4g} after {' and '.join(said)}."
    return [reached] if said else []


def _spent_until(side: Side, key: str, target: float, spent: str) -> float | None:
    """Hours or dollars at the first evaluation that is as good."""
    step = next((number(e, "step") for e in side.evals if (v := number(e, key)) is not None and v <= target), None)
    at, value = series(side.steps, "step", spent)
    if step is None or not len(at):
        return None
    return float(np.interp(step, np.concatenate([[0.0], at]), np.concatenate([[0.0], value])))


def _pace(sides: Sequence[Side]) -> list[str]:
    rates = [(side.data["headline"]["tokens_per_s_median"], side.name) for side in sides]
    known = sorted((rate, name) for rate, name in rates if rate)
    if len(known) < 2 or known[-1][0] < 1.02 * known[0][0]:
        return []
    (slow, slowest), (fast, fastest) = known[0], known[-1]
    return [f"{fastest} had the most tokens/s, {fast / slow:.2f} times those of {slowest}."]


# ----------------------------------------------------------------------------------------------------
# The losses of several runs over each other: by step, by tokens, by time, by dollars.


DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 3)))
MARKS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class View:
    """Figures over one axis; `name` is the tab's."""

    key: str
    name: str
    figures: list[Figure]
    without: list[str]  # runs that have no number for this axis
    at_the_end: str  # of the shortest: where each stood then


_AXES = (("step", "steps"), ("tokens", "tokens"), ("hours", "time"), ("cost_usd", "dollars"))


def aligned_views(sides: Sequence[Side]) -> list[View]:
    """One view for each axis that some run has numbers for."""
    views = []
    for key, name in _AXES:
        without = [side.name for side in sides if not len(series(side.steps, key, "loss")[0])]
        if len(without) < len(sides):
            views.append(View(key, name, _figures(sides, key), without, _at_the_end(sides, key)))
    return views


def _at_the_end(sides: Sequence[Side], key: str) -> str:
    """The validation losses where the shortest run was evaluated last: the fair comparison on this axis."""
    curves = [(side.name, *_held_out(side, key)) for side in sides]
    known = [(name, x, y) for name, x, y in curves if len(x) and x[-1] > 0]
    if len(known) < 2:
        return ""
    unit, label = _unit(sides, key)
    end = min(float(x[-1]) for _, x, _ in known)
    losses = sorted((float(np.interp(end, x, y)), name) for name, x, y in known)
    place = f"${end:.2g}" if key == "cost_usd" else f"{format_count(end / unit)} {label}"
    return f"At {place}, where the shortest ends: {', '.join(f'{name} {loss:.4g}' for loss, name in losses)}."


def _figures(sides: Sequence[Side], key: str) -> list[Figure]:
    unit, label = _unit(sides, key)
    curves = [_train(side, key) for side in sides], [_held_out(side, key) for side in sides]
    figures = []
    for title, marked, found in zip(("Training loss", "Validation loss"), (False, True), curves, strict=True):
        if any(len(y) for _, y in found):
            shown = [(x / unit, y) for x, y in found]
            svg = drawing(partial(_draw, sides=sides, curves=shown, label=label, marked=marked))
            figures.append(Figure(f"{title} by {label}", svg))
    return figures


def _unit(sides: Sequence[Side], key: str) -> tuple[float, str]:
    """What the axis is divided by, and its name."""
    if key != "hours":
        return 1.0, {"step": "steps", "tokens": "tokens", "cost_usd": "dollars"}[key]
    longest = max((float(hours.max()) for side in sides if len(hours := series(side.steps, key)[0])), default=0.0)
    seconds, name = time_unit(3600 * longest)
    return seconds / 3600, f"{name} of training"


def _train(side: Side, key: str) -> tuple[Array, Array]:
    x, loss = series(side.steps, key, "loss")
    return x, loss


def _held_out(side: Side, key: str) -> tuple[Array, Array]:
    """Evaluations only know their step; the steps around them know the rest."""
    step, loss = series(side.evals, "step", "loss")
    at, value = series(side.steps, "step", key) if key != "step" else (step, step)
    if not len(at):
        return step[:0], loss[:0]
    return np.interp(step, np.concatenate([[0.0], at]), np.concatenate([[0.0], value])), loss


def _draw(
    canvas: Canvas, sides: Sequence[Side], curves: Sequence[tuple[Array, Array]], label: str, marked: bool
) -> None:
    ax = canvas.subplots()
    for place, (side, (x, y)) in enumerate(zip(sides, curves, strict=True)):
        if len(y):
            _draw_run(ax, place, side.name, x, y, marked)
    ax.set_xlabel(label)
    ax.set_ylabel("loss")
    ax.xaxis.set_major_formatter(lambda value, _: f"${value:.3g}" if label == "dollars" else format_count(value))
    first = [y[0] for _, y in curves if len(y)]
    lowest = min(float(y.min()) for _, y in curves if len(y))
    ax.set_ylim(lowest - 0.03 * (max(first) - lowest or 1.0), None)
    for text in ax.legend(loc="upper right").get_texts():
        text.set_parse_math(False)  # a run's name may hold dollars


def _draw_run(ax: Axes, place: int, name: str, x: Array, y: Array, marked: bool) -> None:
    """A colour and a dash for each run, so that neither alone has to tell it from the others."""
    colour, dash = RUN_INKS[place % len(RUN_INKS)], DASHES[place % len(DASHES)]
    label = name if len(name) <= 32 else f"…{name[-31:]}"
    label = f" {label}" if label.startswith("_") else label  # such lines have no place in a legend otherwise
    if not marked:
        draw_curve(ax, x, y, colour, label, dash=dash)
        return
    mark = MARKS[place % len(MARKS)] if len(x) <= 60 else ""
    ax.plot(x, y, color=ink(colour), linestyle=dash, marker=mark, markersize=4, label=label)


def legend_of(count: int) -> list[dict[str, str]]:
    """For the page's own tables: each run's colour, and its dash as SVG writes it."""
    dashes = ["none" if dash == "-" else " ".join(f"{part:g}" for part in dash[1]) for dash in DASHES]
    return [{"ink": RUN_INKS[i % len(RUN_INKS)], "dash": dashes[i % len(DASHES)]} for i in range(count)]


# ----------------------------------------------------------------------------------------------------
# One page about several runs: who won, what differs in their recipes, and their curves over each other.


@dataclass(frozen=True)
class Column:
    """A figure of the headline. `best` picks the one to stress; None where less or more is neither."""

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
    Column("peak memory", "peak_memory_gib", "{:.2f} GiB".format, min),
)
_LOSSES = ("best_val_loss", "bits_per_byte")


def write_comparison(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page (comparison.html beside the first run unless told otherwise) and return where it is."""
    sides = read_sides(runs)
    page = render("comparison.html.j2", _words(sides))
    place = runs[0].parent / COMPARISON_FILE if out is None else Path(out)
    return write_page(place, page, named=out is not None)


def comparison_data(runs: Sequence[Path]) -> dict[str, Any]:
    """What the page says, as plain data."""
    sides = read_sides(runs)
    return {
        "schema": 1,
        "verdict": winner(sides),
        "winner": winner_name(sides),
        "recipe_differences": [asdict(row) for row in recipe_differences(sides)],
        "other_differences": [asdict(row) for row in other_differences(sides)],
        "runs": [side.data | {"name": side.name} for side in sides],
    }


def _words(sides: Sequence[Side]) -> dict[str, Any]:
    views = aligned_views(sides)
    columns = [column for column in _COLUMNS if any(_value(side, column) is not None for side in sides)]
    if not losses_compare(sides):
        views = [replace(view, at_the_end="") for view in views]
        columns = [replace(column, best=None) if column.key in _LOSSES else column for column in columns]
    return {
        "names": [side.name for side in sides],
        "runs": [side.data for side in sides],
        "inks": legend_of(len(sides)),
        "verdict": winner(sides),
        "figure_rows": [(column.title, _cells(sides, column)) for column in columns],
        "recipe_rows": recipe_differences(sides),
        "other_rows": other_differences(sides),
        "views": views,
    }


def _value(side: Side, column: Column) -> float | None:
    value = side.data["headline"][column.key]
    return None if value is None else float(value)


def _cells(sides: Sequence[Side], column: Column) -> list[tuple[str, bool]]:
    """Each run's figure as text, and whether it is the best of them; what reads the same is not better."""
    values = [_value(side, column) for side in sides]
    texts = ["–" if value is None else column.show(value) for value in values]
    known = [value for value in values if value is not None]
    best = column.best(known) if column.best is not None else None
    differ = len({text for text in texts if text != "–"}) > 1
    return [(text, differ and best is not None and value == best) for text, value in zip(texts, values, strict=True)]
