"""Time to loss: each arm trains for the same seconds on the same tokens; a row is its validation loss over time.

The table compares when each arm passes the final loss of the baseline, a GPT-2 trained in nanoGPT's style.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.bench.child import ChildError, DivergedError, TrainedRun, ask, train
from redline.bench.record import Row
from redline.bench.setting import UNDISTURBED, key_of
from redline.errors import UsageError
from redline.fields import AUTO
from redline.recipe.load import load
from redline.recipe.lock import git_state
from redline.units import format_count, parse_hours

if TYPE_CHECKING:
    from redline.hardware.machine import Machine
import math
import statistics
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from redline.bench.setting import TINY, with_defaults
from redline.errors import did_you_mean
from redline.recipe.load import current_name, parse_overrides, shipped
from redline.runs.events import Event, number

BASELINE = "nanogpt"
# The arm that decides: the architecture, kernels and code of `pretrain-350m` with AdamW in bf16. What lies between it
# and `pretrain-350m` is the optimizer and fp8; what lies between it and the baseline is the architecture and the loop.
ADAMW = "pretrain-350m-adamw"
RECIPES = {"pretrain-350m": "pretrain-350m", ADAMW: "pretrain-350m", "speedrun-50m": "speedrun-50m"}  # arm → recipe
ARMS = (BASELINE, *RECIPES)
# Overrides that an arm is named for; the user may not change them.
FORCED: dict[str, tuple[str, ...]] = {ADAMW: ("train.optimizer=adamw", "train.precision=bf16")}
# Keys that the baseline's loop reads. It would ignore any other without a word, so others are refused.
BASELINE_READS = {
    *(f"data.{key}" for key in ("source", "tokenizer", "seq_len", "shuffle", "workers", "val_fraction", "text_key")),
    *(f"model.{key}" for key in ("layers", "d_model", "heads")),
    *(f"train.{key}" for key in ("lr", "global_batch", "micro_batch", "warmup_steps", "weight_decay", "min_lr_ratio")),
    *(f"train.{key}" for key in ("betas", "schedule", "decay_fraction")),
    *(f"train.{key}" for key in ("device", "precision", "compile")),
    "eval.sequences",
}
# Keys that the benchmark sets itself: they follow from the budget, the seed, and the rule that only training is timed.
OWN = {
    "train.seed": "Use --seed.",
    **dict.fromkeys(
        ("train.steps", "train.tokens", "train.epochs", "train.hours", "train.target_loss", "eval.patience"),
        "Use --budget.",
    ),
    **dict.fromkeys(("eval.every", "eval.samples", "monitor.log_every"), "Leave it out."),
    **dict.fromkeys(("checkpoint.every", "checkpoint.best", "checkpoint.keep"), "Leave it out."),
}
# Keys that do not change the time of a step: trials that differ only in these share a measured step time.
SAME_SPEED = {
    *(f"train.{key}" for key in ("lr", "lr_base", "batch_base", "embedding_lr", "head_lr", "scalar_lr", "muon_lr")),
    *(f"train.{key}" for key in ("muon_momentum", "muon_momentum_warmup", "muon_beta2", "betas", "eps")),
    *(f"train.{key}" for key in ("weight_decay", "schedule", "warmup_steps", "decay_fraction", "min_lr_ratio")),
    *(f"train.{key}" for key in ("pct_start", "cycle_momentum")),
    "model.init",
    "model.embedding_std",
    "data.source",
}
SAME_FOR_ALL = {
    "cuda": ("eval.sequences=256",),
    "cpu": (*TINY, "train.compile=false", "eval.sequences=16"),
}
OF_THE_TEXT = {f"data.{key}" for key in ("source", "tokenizer", "val_fraction", "text_key", "dedup")}
TINY_TEXT = ("data.source=embedded", "data.tokenizer=bytes")


@dataclass(frozen=True)
class Trial:
    """An arm with its overrides, budget and seed, which identify a row."""

    arm: str
    overrides: tuple[str, ...]
    budget_s: float
    seed: int

    @property
    def name(self) -> str:
        return " ".join([self.arm, *self.overrides, f"· {self.budget_s:g} s · seed {self.seed}"])

    @property
    def speed(self) -> tuple[str, ...]:
        """What the time of a step depends on: trials in which it is equal share a step time."""
        return (self.arm, *(word for word in self.overrides if key_of(word) not in SAME_SPEED))


def in_order(overrides: Iterable[str]) -> tuple[str, ...]:
    """Return the overrides sorted, with canonical keys; of two values for a key the last counts.

    The same overrides in another order or spelling are the same trial.
    """
    values: dict[str, str] = {}
    for word in overrides:
        key, typed = key_of(word), word.partition("=")[2]
        (value,) = parse_overrides([word]).values()
        values[key] = f"{value:g}" if isinstance(value, float) else typed
    return tuple(f"{key}={value}" for key, value in sorted(values.items()))


def with_current_names(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of an earlier result with the present names of arms that were renamed since."""
    return [_with_current_name(row) for row in rows]


def _with_current_name(row: Row) -> Row:
    arm = current_name(row["arm"])
    return row if arm == row["arm"] else {**row, "arm": arm, "name": row["name"].replace(row["arm"], arm, 1)}


def is_control(arm: str, overrides: Iterable[str]) -> bool:
    """Return whether this is a control: the baseline's loop with another shape, which shows what size is worth."""
    return arm == BASELINE and any(key_of(word).startswith("model.") for word in overrides)


def choose_arms(asked: str | None) -> list[str]:
    """Return the named arms, or all that this version has a recipe for."""
    known = shipped()
    if asked is None:
        return [arm for arm in ARMS if arm == BASELINE or RECIPES[arm] in known]
    names = list(dict.fromkeys(current_name(name.strip()) for name in asked.split(",") if name.strip()))
    if not names:
        raise UsageError("names no arm.", where="--arm", fix=f"There are {', '.join(ARMS)}.")
    for name in names:
        if name not in ARMS:
            hint = did_you_mean(name, ARMS) or f"There are {', '.join(ARMS)}."
            raise UsageError(f"{name!r} is none of the arms.", where="--arm", fix=hint)
        if name != BASELINE and RECIPES[name] not in known:
            what = f"{name!r} has no recipe in this version."
            raise UsageError(what, where="--arm", fix=f"There are {', '.join(choose_arms(None))}.")
    return names


def check_overrides(arms: Iterable[str], overrides: Iterable[str]) -> None:
    """Refuse overrides of keys that the benchmark sets itself, or that the baseline does not read."""
    keys = {key_of(word): word for word in overrides}
    for key, word in keys.items():
        if key in OWN:
            raise UsageError("the benchmark sets this itself.", where=word, fix=OWN[key])
    for arm in arms:
        if arm != BASELINE:
            load(RECIPES[arm], list(overrides))  # report a mistake before anything is measured
            _refuse_forced(arm, keys)
        elif unread := [word for key, word in keys.items() if key not in BASELINE_READS]:
            fix = "Name the other arms with --arm, and run nanogpt in a call of its own."
            raise UsageError("nanogpt does not read this.", where=unread[0], fix=fix)


def _refuse_forced(arm: str, keys: dict[str, str]) -> None:
    """Refuse an override of what the arm is named for: its row would have the wrong name."""
    for forced in FORCED.get(arm, ()):
        word = keys.get(key_of(forced))
        if word is not None and word != forced:
            raise UsageError(f"{arm} is defined by {forced}.", where=word, fix="Leave it out, or name another --arm.")


def device_of(overrides: Iterable[str]) -> str:
    asked = [word.partition("=")[2] for word in overrides if key_of(word) == "train.device"]
    return asked[-1] if asked else "auto"


def words_for(arm: str, overrides: Iterable[str], device: str) -> list[str]:
    """Return an arm's overrides without steps and seed; the user's win over those that all arms have in common."""
    overrides = list(overrides)
    own_text = any(key_of(word) == "data.source" for word in overrides)
    common = [*SAME_FOR_ALL[device], *(TINY_TEXT if device == "cpu" and not own_text else ())]
    if arm == BASELINE:
        common = [word for word in common if key_of(word) in BASELINE_READS]
    return with_defaults(with_defaults(common, FORCED.get(arm, ())), overrides)


Point = dict[str, Any]  # step, tokens, seconds, loss

EVALUATIONS = 12  # of a run, besides the one before the first step
MOST_UNLOGGED = 10  # steps between two lines of the log
OFF_BUDGET = 0.03  # share of the budget; a run that differs by more is marked


@dataclass(frozen=True)
class EvaluationPlan:
    """The steps at which a run is evaluated and logged.

    Every evaluation falls on a logged step. Logging waits for the GPU, so the time recorded with an evaluation neither
    misses a step nor contains one that is only queued.
    """

    steps: int
    log_every: int
    every: int

    @classmethod
    def over(cls, steps: int) -> EvaluationPlan:
        """Spread the evaluations evenly over a run of `steps`."""
        distance = max(1, round(steps / EVALUATIONS))
        log_every = min(MOST_UNLOGGED, distance)
        return cls(steps, log_every, log_every * max(1, round(distance / log_every)))

    def at(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps


def fitted_steps(budget_s: float, step_ms: float) -> int:
    return max(1, round(1e3 * budget_s / step_ms))


def curve_of(events: Sequence[Event]) -> list[Point]:
    """Return the curve of a run from its log.

    `step_ms` excludes evaluations and checkpoints, so the values add up to the seconds of training.
    """
    points: list[Point] = []
    seconds, logged = 0.0, 0
    for event in events:
        if event["type"] == "step":
            seconds += (number(event, "step_ms") or 0.0) * (event["step"] - logged) / 1e3
            logged = event["step"]
        elif event["type"] == "eval":
            points.append(point(event["step"], event["tokens"], seconds, number(event, "loss")))
    return points


def median_step_ms(events: Sequence[Event]) -> float:
    """Return the median of the logged windows without the first, in which clocks and loader still settle.

    The median ignores a window in which the host was held up.
    """
    windows = [event["step_ms"] for event in events if event["type"] == "step"]
    return float(median(windows[1:] or windows))


def typical_step_ms(curve: Sequence[Point]) -> float:
    """Return the median step time between two evaluations, which ignores an interval in which the host was held up."""
    intervals = [(b["step"] - a["step"], b["seconds"] - a["seconds"]) for a, b in pairwise(curve)]
    return float(median(1e3 * seconds / steps for steps, seconds in intervals if steps))


def point(step: int, tokens: int, seconds: float, loss: float | None) -> Point:
    known = loss is not None and math.isfinite(loss)
    return {"step": step, "tokens": tokens, "seconds": round(seconds, 4), "loss": loss if known else None}


def figures(curve: Sequence[Point], train_tokens: int) -> dict[str, Any]:
    """Return the figures of a complete training."""
    last = curve[-1]
    return {
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_s": last["tokens"] / last["seconds"],
        "step_ms": 1e3 * last["seconds"] / last["step"],
        "epochs": last["tokens"] / train_tokens if train_tokens else None,
        "final_loss": last["loss"],
        "evaluations": list(curve),
    }


def seconds_to(loss: float, curve: Sequence[Point]) -> float | None:
    """Return when the curve first passes the loss, interpolated between evaluations; None if it never does."""
    before: Point | None = None
    for after in curve:
        if after["loss"] is not None and after["loss"] <= loss:
            if before is None or before["loss"] is None:
                return float(after["seconds"])
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return float(before["seconds"] + share * (after["seconds"] - before["seconds"]))
        before = after
    return None


Entry = dict[str, Any]

ANCHORS_DIFFER = 0.03
# Keys that are equal in all rows of a table, because they are part of its key.
_OF_THE_TABLE = {*OF_THE_TEXT, "data.seq_len", "data.pack", "data.shuffle", "eval.sequences", "train.device"}
Key = tuple[float, str, int, int, bool, bool]


class _Trial(NamedTuple):
    """Rows that differ only in the seed, and how many further seeds have no curve because they diverged or failed."""

    rows: list[Row]
    without_curve: int

    @property
    def first(self) -> Row:
        return self.rows[0]


def compare(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a table for each budget, text and evaluation setting that has a baseline, the shortest budget first."""
    baselines = [row for row in rows if row["arm"] == BASELINE and "error" not in row]
    # If the user gave every baseline another shape, that shape is the baseline.
    tables = {table_of(row): None for row in [row for row in baselines if not _is_control(row)] or baselines}
    return [table for key in sorted(tables) if (table := _table(key, rows)) is not None]


def table_of(row: Row) -> Key:
    """Return the key of a row's table: within a table losses are comparable, and the data come in the same order."""
    recipe, facts = row["lock"]["recipe"], row["lock"]["data"]
    data = recipe["data"]
    evaluated = data["seq_len"], recipe["eval"]["sequences"]
    return row["budget_s"], facts["fingerprint"], *evaluated, data.get("pack", False), data.get("shuffle", True)


def _table(key: Key, rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the table, or None if no baseline has a curve for each of its seeds."""
    budget, _, seq_len, sequences, *_ = key
    text = [row for row in rows if "lock" in row and table_of(row)[1:] == key[1:]]
    failed = [row for row in rows if "lock" not in row]  # they failed before their text was known
    trials = _by_trial([row for row in (*failed, *text) if row["budget_s"] <= budget])
    at_budget = [trial for trial in trials if trial.first["budget_s"] == budget]
    baselines = [trial for trial in at_budget if trial.first["arm"] == BASELINE and not trial.without_curve]
    if not baselines:
        return None
    baselines = [trial for trial in baselines if not _is_control(trial.first)] or baselines
    baseline = min(baselines, key=lambda trial: _mean(trial.rows, "final_loss"))
    entries = [_entry(trial, baseline.rows) for trial in at_budget if trial is not baseline]
    # A run with a shorter budget may pass sooner, because its schedule ends earlier. If it does not pass, leave it out.
    shorter = [_entry(trial, baseline.rows) for trial in trials if trial.first["budget_s"] < budget]
    entries += [entry for entry in shorter if entry["passes_s"] is not None]
    data = baseline.first["lock"]["data"]
    return {
        "budget_s": budget,
        "data": {name: data[name] for name in ("fingerprint", "train_tokens", "val_tokens", "tokenizer")},
        "seq_len": seq_len,
        "eval_sequences": min(sequences, -(-(data["val_tokens"] - 1) // seq_len)),
        "trials": _counted(text),
        "baseline": _entry(baseline, baseline.rows),
        "entries": sorted(entries, key=_rank),
    }


def best_entries(table: dict[str, Any]) -> list[Entry]:
    """Return the best entry of each arm, the baseline first."""
    best = {entry["arm"]: entry for entry in reversed(table["entries"]) if entry["arm"] != BASELINE}
    return [table["baseline"], *(best[arm] for arm in sorted(best))]


def _rank(entry: Entry) -> tuple[bool, float, float]:
    """Return the sort key of an entry: by when it passes; those that never pass come last, by their final loss."""
    passes = entry["passes_s"]
    return passes is None, passes or 0.0, entry["final_loss"]


def _entry(trial: _Trial, baseline: Sequence[Row]) -> Entry:
    """Return the means and spreads of a trial over its seeds. A seed without a curve counts as not passed."""
    rows = trial.rows
    target, seconds, anchor = _mean(baseline, "final_loss"), _mean(baseline, "seconds"), _anchor(baseline)
    times = [seconds_to(target, row["evaluations"]) for row in rows]
    passed = [seconds for seconds in times if seconds is not None]
    every_seed = len(passed) == len(rows) and not trial.without_curve
    passes = statistics.fmean(passed) if every_seed else None
    own, first = _anchor(rows), trial.first
    ratio = passes / seconds if passes is not None else None
    return {
        "arm": first["arm"],
        "overrides": _own_words(first),
        "budget_s": first["budget_s"],
        "seeds": [row["seed"] for row in rows],
        "names": [row["name"] for row in rows],
        "final_loss": _mean(rows, "final_loss"),
        "final_loss_spread": _spread(row["final_loss"] for row in rows),
        "loss_difference": _mean(rows, "final_loss") - target,
        "seconds": _mean(rows, "seconds"),
        "tokens_per_s": _mean(rows, "tokens_per_s"),
        "passes_s": passes,
        "passes_s_spread": _spread(passed) if passes is not None else None,
        "passed_seeds": len(passed),
        "lost_seeds": trial.without_curve,
        "ratio": ratio,
        "card_anchor_ms": own,
        "anchor_difference": own / anchor - 1 if own and anchor else None,
        "ratio_corrected": ratio * anchor / own if ratio is not None and own and anchor else None,
    }


def _by_trial(rows: Sequence[Row]) -> list[_Trial]:
    """Return the trials with a curve for at least one seed; of several rows of a seed the last counts."""
    by_trial: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in rows:
        by_trial.setdefault((row["arm"], row["budget_s"], *in_order(_own_words(row))), {})[row["seed"]] = row
    curves = {key: [row for row in seeds.values() if "error" not in row] for key, seeds in by_trial.items()}
    return [_Trial(rows, len(by_trial[key]) - len(rows)) for key, rows in curves.items() if rows]


def _is_control(row: Row) -> bool:
    return is_control(row["arm"], row["overrides"])


def _own_words(row: Row) -> list[str]:
    """Return the overrides that distinguish a row's trial within its table."""
    return [word for word in row["overrides"] if key_of(word) not in _OF_THE_TABLE]


def _counted(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Count the trials of each arm at each budget, including diverged ones, so that tuning effort can be compared.

    Further seeds and controls do not count.
    """
    counted = [row for row in rows if not _is_control(row)]
    trials = dict.fromkeys((row["arm"], f"{row['budget_s']:g}", in_order(_own_words(row))) for row in counted)
    counts: dict[str, dict[str, int]] = {}
    for arm, budget, _ in trials:
        of_arm = counts.setdefault(arm, {})
        of_arm[budget] = of_arm.get(budget, 0) + 1
    return counts


def _anchor(rows: Sequence[Row]) -> float | None:
    known = [row["card_anchor_ms"] for row in rows if row["card_anchor_ms"]]
    return statistics.fmean(known) if known else None


def _mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _spread(values: Iterable[float]) -> float:
    known = list(values)
    return max(known) - min(known)


BUDGETS = {"cuda": 120.0, "cpu": 2.0}  # seconds
ANCHOR_STEPS = {"cuda": (24, 4), "cpu": (6, 1)}  # steps, and steps per logged window; the first window is not used
MOST_WARMUP = 0.05  # share of the steps; a recipe's own warm-up is meant for a longer run
UNTIMED_S = 1800  # limit on starting, compiling and evaluating
MOST_S = 7 * 24 * 3600.0
_STOPS = ("train.tokens", "train.epochs", "train.hours", "train.target_loss", "eval.patience")
_NO_OTHER_STOP = tuple(f"{key}=null" for key in _STOPS)
KNOWN_BY = (
    "name",
    "arm",
    "overrides",
    "budget_s",
    "seed",
    "card_anchor_ms",
)  # fields of every row, including failed ones
_LOCKED = ("recipe", "parameters", "batch", "choices", "data", "machine", "versions", "git")


def parse_budget(text: str) -> float:
    """Parse seconds of training: 2m, 90s; a plain number is seconds."""
    try:
        seconds = 3600 * parse_hours(f"{text}s" if text.strip()[-1:].isdigit() else text)
    except ValueError:
        raise UsageError(f"{text!r} is no time.", where="--budget", fix="Write for instance 2m or 90s.") from None
    if not 0.001 <= seconds <= MOST_S:
        what = f"{text} leaves no time to train." if seconds < 1 else f"{text} is longer than a week."
        raise UsageError(what, where="--budget", fix="Write for instance 2m or 90s.")
    return round(seconds, 3)


def parse_seeds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) < 1 << 63 for word in words):
        raise UsageError(f"{text!r} is no list of whole numbers.", where="--seed", fix="Write for instance 1337,1338.")
    return list(dict.fromkeys(map(int, words)))


def check_data(overrides: Sequence[str], machine: Machine) -> None:
    """Refuse to measure on a GPU without a text of the user's: the loss of any other text would mean nothing."""
    if machine.device == "cuda" and not any(key_of(word) == "data.source" for word in overrides):
        fix = "Name it: data.source=./tokens, with data.tokenizer=… for text."
        raise UsageError("time to loss is measured on a text of yours.", where="data.source", fix=fix)


def check_rows(rows: Sequence[Row], out: Path | None, overrides: Sequence[str], machine: Machine) -> None:
    """Refuse to continue an earlier result whose rows are incomplete, or whose text is not the present one."""
    other = "Choose another --out, or remove it."
    from benchmarks.pages import sections  # that module imports this one

    try:
        sections({"rows": rows, "comparison": compare(rows)})  # what will be shown of them must exist
        fingerprints = {
            row["lock"]["data"]["fingerprint"] for row in rows if "lock" in row and _same_source(row, overrides)
        }
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError):
        raise UsageError("is there already, and its rows are not whole.", where=str(out), fix=other) from None
    if fingerprints:
        from redline.data.corpus import load_text

        words = words_for("pretrain-350m", [word for word in overrides if key_of(word) in OF_THE_TEXT], machine.device)
        now = load_text(load("pretrain-350m", words).recipe).facts.fingerprint
        if fingerprints != {now}:
            what = "has runs on another text than data.source holds now."
            raise UsageError(what, where=str(out), fix=other)


def _same_source(row: Row, overrides: Sequence[str]) -> bool:
    """Return whether a row has the same overrides for the text, and has any: the embedded text cannot change."""
    both = (in_order(row["overrides"]), in_order(overrides))
    of_row, of_call = ({word for word in words if key_of(word) in OF_THE_TEXT} for words in both)
    return bool(of_call) and of_row == of_call


def is_there(trial: Trial, rows: Sequence[Row]) -> bool:
    """Return whether the trial need not run again.

    A diverged run would diverge again; the cause of another failure may have been fixed.
    """
    return any(_trial_of(row) == trial and ("error" not in row or row.get("diverged")) for row in rows)


@dataclass(frozen=True)
class Call:
    """What all trials of a call have in common."""

    device: str
    folder: Path
    card_anchor_ms: float | None


UNCOMMITTED = "measured in a tree with uncommitted changes: its commit does not say what was measured"


def check_tree(*, allow_dirty: bool) -> None:
    """Refuse to race in a tree with uncommitted changes: the commit in the rows would not say what was measured."""
    state = git_state()
    if state["dirty"] and not allow_dirty:
        what = f"the code has uncommitted changes since commit {str(state['commit'])[:7]}."
        raise UsageError(what, where="time-to-loss", fix="Commit them, or add --allow-dirty, which marks the rows.")


def run_time_to_loss(trials: Sequence[Trial], machine: Machine, rows: Sequence[Row], *, again: bool) -> Iterator[Row]:
    """Yield a row for each trial; the row of one that cannot run has the reason in `error`.

    Existing `rows` provide the time of a step, unless everything is measured `again`. Rows that are measured in a tree
    with uncommitted changes have `dirty`.
    """
    dirty = bool(git_state()["dirty"])
    anchor, anchor_warnings = _card_anchor(machine) if trials else (None, [])
    known = [] if again else list(rows)
    with tempfile.TemporaryDirectory(prefix="redline-bench-") as folder:
        for trial in trials:
            row: Row = {
                "name": trial.name,
                "arm": trial.arm,
                "overrides": list(trial.overrides),
                "budget_s": trial.budget_s,
                "seed": trial.seed,
                "card_anchor_ms": anchor,
                **({"dirty": True} if dirty else {}),
            }
            try:
                trained = _train(trial, Call(machine.device, Path(folder), anchor), known)
                warnings = [*anchor_warnings, *trained["warnings"], *_warnings(trial, trained)]
                warnings += [UNCOMMITTED] if dirty else []
                row |= trained | {"warnings": warnings} | _error_of(trained)
                known.append(row)
                yield row
            except DivergedError as error:
                yield row | {"lock": _kept(error.run.lock), "error": str(error), "diverged": True}
            except ChildError as error:
                yield row | {"error": str(error)}


def _card_anchor(machine: Machine) -> tuple[float | None, list[str]]:
    """Return the milliseconds of the anchor step, and a warning if it could not be timed."""
    try:
        return float(ask("benchmarks.peers.anchor", {"device": machine.device})["step_ms"]), []
    except ChildError as error:
        return None, [f"the card's anchor could not be timed: {error}"]


def _train(trial: Trial, call: Call, rows: Sequence[Row]) -> dict[str, Any]:
    words, limit = words_for(trial.arm, trial.overrides, call.device), trial.budget_s + UNTIMED_S
    known = known_step_ms(trial, rows, call.card_anchor_ms)
    if trial.arm == BASELINE:
        words = [*words, f"train.seed={trial.seed}"]
        return ask("benchmarks.peers.nanogpt", {"words": words, "budget_s": trial.budget_s, "step_ms": known}, limit)
    step_ms = known or _anchor_step_ms(trial, words, call)
    steps = fitted_steps(trial.budget_s, step_ms)
    plan = EvaluationPlan.over(steps)
    timed = [
        *(f"train.steps={steps}", f"train.seed={trial.seed}", *_warmup(trial, words, steps)),
        *(f"eval.every={plan.every}", f"monitor.log_every={plan.log_every}"),
    ]
    run = _redline(trial, words, timed, call, limit)
    fields = {"anchor_step_ms": step_ms, **row_of(run)}
    if fields["steps"] != steps:
        raise ChildError(f"it stopped after {fields['steps']} of {steps} steps")
    return fields


def known_step_ms(trial: Trial, rows: Sequence[Row], card_anchor_ms: float | None) -> float | None:
    """Return the step time from rows whose steps are the same work by the same code, scaled to the GPU's present speed.

    The fastest counts: a busy host makes a whole row slow, and later trials would then get too few steps.
    """
    code = git_state()["commit"]
    known = []
    for row in rows:
        old = "from" in row and (row["from"].get("git") or {}).get("commit") != code
        same = "error" not in row and not old and _trial_of(row).speed == trial.speed
        if same and card_anchor_ms and row["card_anchor_ms"]:
            known.append(typical_step_ms(row["evaluations"]) * card_anchor_ms / row["card_anchor_ms"])
    return min(known, default=None)


def _trial_of(row: Row) -> Trial:
    return Trial(row["arm"], in_order(row["overrides"]), row["budget_s"], row["seed"])


def _anchor_step_ms(trial: Trial, words: list[str], call: Call) -> float:
    """Measure the time of a step in a short run, from which the number of steps of the trial follows."""
    steps, window = ANCHOR_STEPS[call.device]
    short = [f"train.steps={steps}", f"monitor.log_every={window}", "eval.sequences=1", "train.warmup_steps=1"]
    short += ["train.lr=1e-9", "train.muon_lr=1e-9"]  # without a warm-up the trial's own rate may diverge
    return median_step_ms(_redline(trial, words, short, call, UNTIMED_S).events)


def _redline(trial: Trial, words: list[str], last: list[str], call: Call, limit_s: float) -> TrainedRun:
    """Train with redline in a temporary run directory, which is deleted: its checkpoints take gigabytes."""
    run = Path(tempfile.mkdtemp(dir=call.folder)) / "run"
    common = [word for word in UNDISTURBED if key_of(word) not in {key_of(w) for w in (*words, *last)}]
    given = {key_of(word) for word in last}
    words = [word for word in words if key_of(word) not in given]
    try:
        return train([RECIPES[trial.arm], *common, *words, *_NO_OTHER_STOP, *last], run, limit_s=limit_s)
    finally:
        shutil.rmtree(run, ignore_errors=True)


def _warmup(trial: Trial, words: list[str], steps: int) -> list[str]:
    """Return the override of the warm-up: none if the user set it, else the recipe's, limited to a share of the run."""
    if any(key_of(word) == "train.warmup_steps" for word in trial.overrides):
        return []
    own, most = load(RECIPES[trial.arm], words).recipe.train.warmup_steps, max(1, round(MOST_WARMUP * steps))
    return [] if own == AUTO or int(own) <= most else [f"train.warmup_steps={most}"]


def row_of(run: TrainedRun) -> dict[str, Any]:
    """Return the fields of a row from a run's log and lock."""
    memory = [event["memory_gib"] for event in run.of_type("step") if event["memory_gib"] is not None]
    warnings = [event["message"] for kind in ("warning", "recovery") for event in run.of_type(kind)]
    return {
        **figures(curve_of(run.events), run.lock["data"]["train_tokens"]),
        "warmup_s": sum(event.get("seconds", 0.0) for event in run.of_type("warmup")),
        "memory_gib": max(memory, default=None),
        "lock": _kept(run.lock),
        "warnings": warnings,
    }


def _kept(lock: dict[str, Any]) -> dict[str, Any]:
    return {key: lock[key] for key in _LOCKED}


def _warnings(trial: Trial, row: Row) -> list[str]:
    warnings = []
    if abs(row["seconds"] / trial.budget_s - 1) > OFF_BUDGET:
        warnings.append(f"trained {row['seconds']:.1f} s of a budget of {trial.budget_s:g} s")
    if (row["epochs"] or 0) > 1:
        tokens = format_count(row["lock"]["data"]["train_tokens"])
        warnings.append(f"its {tokens} tokens repeat: {row['epochs']:.2f} epochs")
    return warnings


def _error_of(row: Row) -> dict[str, Any]:
    """Return the error of a run that ended without a final loss."""
    if row["final_loss"] is not None:
        return {}
    if not row["lock"]["data"]["val_tokens"]:
        return {"error": "the data have no validation tokens. Set data.val_fraction, or prepare them with some."}
    return {"error": "it diverged: its last validation loss is not finite.", "diverged": True}
