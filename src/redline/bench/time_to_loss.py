"""Each arm trained for the same seconds on the same tokens: a row is a curve of the validation loss over time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.bench.arms import BASELINE, OF_THE_TEXT, Trial, in_order, words_for
from redline.bench.child import ChildError, DivergedError, TrainedRun, ask, train
from redline.bench.curve import OFF_BUDGET, Looks, curve_of, figures, fitted_steps, median_step_ms, typical_step_ms
from redline.bench.loss_page import sections
from redline.bench.passing import compare
from redline.bench.record import Row
from redline.bench.setting import UNDISTURBED, key_of
from redline.errors import UsageError
from redline.fields import AUTO
from redline.recipe.load import load
from redline.recipe.lock import git_state
from redline.units import format_count, parse_hours

if TYPE_CHECKING:
    from redline.hardware.machine import Machine

BUDGETS = {"cuda": 120.0, "cpu": 2.0}  # seconds
ANCHOR_STEPS = {"cuda": (24, 4), "cpu": (6, 1)}  # and of how many each logged window is; the first settles
MOST_WARMUP = 0.05  # of the steps: a recipe's own warm-up is meant for its own horizon
UNTIMED_S = 1800  # starting, compiling, evaluating
MOST_S = 7 * 24 * 3600.0
_STOPS = ("train.tokens", "train.epochs", "train.hours", "train.target_loss", "eval.patience")
_NO_OTHER_STOP = tuple(f"{key}=null" for key in _STOPS)
KNOWN_BY = ("name", "arm", "overrides", "budget_s", "seed", "card_anchor_ms")  # in every row, whatever came of it
_LOCKED = ("recipe", "parameters", "batch", "choices", "data", "machine", "versions", "git")


def parse_budget(text: str) -> float:
    """Seconds of training: 2m, 90s; a bare number is seconds."""
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
    """A loss says something of real text only, and of the text that was chosen."""
    if machine.device == "cuda" and not any(key_of(word) == "data.source" for word in overrides):
        fix = "Name it: data.source=./tokens, with data.tokenizer=… for text."
        raise UsageError("time to loss is measured on a text of yours.", where="data.source", fix=fix)


def check_rows(rows: Sequence[Row], out: Path | None, overrides: Sequence[str], machine: Machine) -> None:
    """That an earlier call's rows can be gone on from: they are whole, and of the text that lies there now."""
    other = "Choose another --out, or remove it."
    try:
        sections({"rows": rows, "comparison": compare(rows)})  # all that is shown of them later
        told = {row["lock"]["data"]["fingerprint"] for row in rows if "lock" in row and _same_source(row, overrides)}
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError):
        raise UsageError("is there already, and its rows are not whole.", where=str(out), fix=other) from None
    if told:
        from redline.jobs.causal_lm.objective import load_data

        words = words_for("pretrain-350m", [word for word in overrides if key_of(word) in OF_THE_TEXT], machine.device)
        now = load_data(load("pretrain-350m", words).recipe).facts.fingerprint
        if told != {now}:
            what = "has runs on another text than data.source holds now."
            raise UsageError(what, where=str(out), fix=other)


def _same_source(row: Row, overrides: Sequence[str]) -> bool:
    """The same words for the text, which must be some: what is embedded cannot change."""
    both = (in_order(row["overrides"]), in_order(overrides))
    of_row, asked = ({word for word in words if key_of(word) in OF_THE_TEXT} for words in both)
    return bool(asked) and of_row == asked


def is_there(trial: Trial, rows: Sequence[Row]) -> bool:
    """Whether it has been tried: who diverged would diverge again, what failed otherwise may have been mended."""
    return any(_trial_of(row) == trial and ("error" not in row or row.get("diverged")) for row in rows)


@dataclass(frozen=True)
class Call:
    """What all rows of a call have in common."""

    device: str
    folder: Path
    card_anchor_ms: float | None


def run_time_to_loss(trials: Sequence[Trial], machine: Machine, rows: Sequence[Row], *, again: bool) -> Iterator[Row]:
    """A row for each; who cannot run says why in `error`. `rows` are there already: they know how long a step takes,
    unless all is to be measured `again`."""
    anchor, told = _card_anchor(machine) if trials else (None, [])
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
            }
            try:
                found = _trained(trial, Call(machine.device, Path(folder), anchor), known)
                row |= found | {"warnings": [*told, *found["warnings"], *_warnings(trial, found)]} | _end(found)
                known.append(row)
                yield row
            except DivergedError as error:
                yield row | {"lock": _kept(error.run.lock), "error": str(error), "diverged": True}
            except ChildError as error:
                yield row | {"error": str(error)}


def _card_anchor(machine: Machine) -> tuple[float | None, list[str]]:
    """Milliseconds, and what is to be said without them."""
    try:
        return float(ask("redline.bench.anchor", {"device": machine.device})["step_ms"]), []
    except ChildError as error:
        return None, [f"the card's anchor could not be timed: {error}"]


def _trained(trial: Trial, call: Call, rows: Sequence[Row]) -> dict[str, Any]:
    words, limit = words_for(trial.arm, trial.overrides, call.device), trial.budget_s + UNTIMED_S
    known = known_step_ms(trial, rows, call.card_anchor_ms)
    if trial.arm == BASELINE:
        words = [*words, f"train.seed={trial.seed}"]
        return ask("redline.bench.nanogpt", {"words": words, "budget_s": trial.budget_s, "step_ms": known}, limit)
    step_ms = known or _anchor_step_ms(trial, words, call)
    steps = fitted_steps(trial.budget_s, step_ms)
    looks = Looks.over(steps)
    timed = [
        *(f"train.steps={steps}", f"train.seed={trial.seed}", *_warmup(trial, words, steps)),
        *(f"eval.every={looks.every}", f"monitor.log_every={looks.log_every}"),
    ]
    run = _redline(trial, words, timed, call, limit)
    found = {"anchor_step_ms": step_ms, **row_of(run)}
    if found["steps"] != steps:
        raise ChildError(f"it stopped after {found['steps']} of {steps} steps")
    return found


def known_step_ms(trial: Trial, rows: Sequence[Row], card_anchor_ms: float | None) -> float | None:
    """From the rows whose steps are the same work by the same code, at the speed that the card has now. The fastest
    counts: a busy host makes a whole row slow, and those after it would get too few steps."""
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
    """A short real run: what a step takes, before it is known how many there will be."""
    steps, window = ANCHOR_STEPS[call.device]
    short = [f"train.steps={steps}", f"monitor.log_every={window}", "eval.sequences=1", "train.warmup_steps=1"]
    short += ["train.lr=1e-9", "train.muon_lr=1e-9"]  # without a warm-up a rate that is right may diverge
    return median_step_ms(_redline(trial, words, short, call, UNTIMED_S).events)


def _redline(trial: Trial, words: list[str], last: list[str], call: Call, limit_s: float) -> TrainedRun:
    """Its run directory is gone afterwards: a checkpoint of it has gigabytes."""
    run = Path(tempfile.mkdtemp(dir=call.folder)) / "run"
    common = [word for word in UNDISTURBED if key_of(word) not in {key_of(w) for w in (*words, *last)}]
    given = {key_of(word) for word in last}
    words = [word for word in words if key_of(word) not in given]
    try:
        return train([trial.arm, *common, *words, *_NO_OTHER_STOP, *last], run, limit_s=limit_s)
    finally:
        shutil.rmtree(run, ignore_errors=True)


def _warmup(trial: Trial, words: list[str], steps: int) -> list[str]:
    """The recipe's own, or what was asked for; but a recipe's own never longer than a share of the run."""
    if any(key_of(word) == "train.warmup_steps" for word in trial.overrides):
        return []
    own, most = load(trial.arm, words).recipe.train.warmup_steps, max(1, round(MOST_WARMUP * steps))
    return [] if own == AUTO or int(own) <= most else [f"train.warmup_steps={most}"]


def row_of(run: TrainedRun) -> dict[str, Any]:
    """The figures of a redline run, from its log and its lock."""
    memory = [event["memory_gib"] for event in run.of_type("step") if event["memory_gib"] is not None]
    told = [event["message"] for kind in ("warning", "recovery") for event in run.of_type(kind)]
    return {
        **figures(curve_of(run.events), run.lock["data"]["train_tokens"]),
        "warmup_s": sum(event.get("seconds", 0.0) for event in run.of_type("warmup")),
        "memory_gib": max(memory, default=None),
        "lock": _kept(run.lock),
        "warnings": told,
    }


def _kept(lock: dict[str, Any]) -> dict[str, Any]:
    return {key: lock[key] for key in _LOCKED}


def _warnings(trial: Trial, found: dict[str, Any]) -> list[str]:
    told = []
    off = found["seconds"] / trial.budget_s - 1
    if abs(off) > OFF_BUDGET:
        told.append(f"trained {found['seconds']:.1f} s of a budget of {trial.budget_s:g} s")
    if (found["epochs"] or 0) > 1:
        tokens = format_count(found["lock"]["data"]["train_tokens"])
        told.append(f"its {tokens} tokens repeat: {found['epochs']:.2f} epochs")
    return told


def _end(found: dict[str, Any]) -> dict[str, Any]:
    """A trial that diverged is one, too."""
    if found["final_loss"] is not None:
        return {}
    if not found["lock"]["data"]["val_tokens"]:
        return {"error": "the data have no validation tokens. Set data.val_fraction, or prepare them with some."}
    return {"error": "it diverged: its last validation loss is not finite.", "diverged": True}
