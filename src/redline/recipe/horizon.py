"""The length of a run: which stop conditions count, the last step they lead to, the warm-up, and warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from redline.fields import none_if_auto
from redline.planning.batch import BatchPlan, solve_batch
from redline.planning.schedule import horizon_steps
from redline.recipe.schema import Recipe

STOPS = ("train.steps", "train.tokens", "train.epochs")  # the counted stop conditions; train.hours is a time budget
FEW_STEPS = 20  # outside of these limits a run is probably a mistake
FEW_EPOCHS, MANY_EPOCHS = 0.1, 10.0


def replace_stop_conditions(base: Mapping[str, Any], typed: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return `base` without the counted stop conditions that typed ones replace, and a note for each of those.

    Otherwise `train.steps=40` on a recipe of three epochs would end after three epochs, which may be a single step.
    """
    set_keys = [key for key in STOPS if typed.get(key) is not None]
    dropped = [key for key in STOPS if set_keys and key not in typed]
    replacement = " and ".join(f"{key}={typed[key]}" for key in set_keys)
    notes = [f"{replacement} replaces {key}={base[key]} of the recipe" for key in dropped if base.get(key) is not None]
    return {key: value for key, value in base.items() if key not in dropped}, notes


def epoch_tokens(recipe: Recipe, train_tokens: int) -> int:
    """Return the tokens of one epoch, which consists of whole sequences; 0 if `train_tokens` is not known yet."""
    length = recipe.data.seq_len
    return max(length, train_tokens - train_tokens % length) if train_tokens else 0


def recipe_steps(recipe: Recipe, train_tokens: int, tokens_per_step: int) -> int | None:
    """Return the step at which the first counted stop condition is met, or None if none is set or known."""
    train, epoch = recipe.train, epoch_tokens(recipe, train_tokens)
    return horizon_steps(
        steps=train.steps,
        tokens=train.tokens,
        epochs=train.epochs if epoch else None,  # the length of an epoch is unknown before the data are prepared
        train_tokens=epoch,
        tokens_per_step=tokens_per_step,
    )


def horizon_fields(
    *, steps: int | None, hours: float | None, expected_tokens: int | None, tokens_per_step: int, epoch: int
) -> dict[str, Any]:
    """Return the plan's `horizon`. The `expected_…` fields are set if train.hours ends the run before a count."""
    tokens = steps * tokens_per_step if steps else None
    return {
        "steps": steps,
        "tokens": tokens,
        "epochs": _epochs(tokens, epoch),
        "seconds": hours * 3600 if hours else None,
        "expected_steps": None if expected_tokens is None else expected_tokens // tokens_per_step,
        "expected_tokens": expected_tokens,
        "expected_epochs": _epochs(expected_tokens, epoch),
    }


def remaining_fields(plan: Mapping[str, Any], step: int, seconds: float) -> dict[str, Any]:
    """Return what is left to do, by the plan, for a run that resumes at `step` after `seconds` of training."""
    horizon, rate = plan["horizon"], plan["throughput"]["tokens_per_s"]
    per_step = plan["batch"]["tokens_per_step"]
    steps = None if horizon["steps"] is None else max(0, horizon["steps"] - step)
    share = steps / horizon["steps"] if steps is not None and horizon["epochs"] is not None else None
    limits = [None if horizon["seconds"] is None else max(0.0, horizon["seconds"] - seconds)]
    limits.append(steps * per_step / rate if steps is not None and rate else None)
    return {
        "steps": steps,
        "tokens": None if steps is None else steps * per_step,
        "epochs": None if share is None else round(share * horizon["epochs"], 4),
        "seconds": min((limit for limit in limits if limit is not None), default=None),
    }


def horizon_warnings(horizon: Mapping[str, Any], *, embedded: bool) -> list[str]:
    """Warn about a run that is probably too short or too long. `embedded` is whether it trains on the built-in text."""
    by_clock = horizon["expected_tokens"] is not None
    about, prefix = ("about ", "expected_") if by_clock else ("", "")
    steps, epochs = horizon[f"{prefix}steps"], horizon[f"{prefix}epochs"]
    longer = "Raise train.hours" if by_clock else "Raise train.steps, train.tokens or train.epochs"
    warnings = []
    if steps is not None and steps < FEW_STEPS:
        counted = f"{steps:,} {'step' if steps == 1 else 'steps'}"
        warnings.append(f"the run is only {about}{counted} long. {longer}, or lower train.global_batch")
    if epochs is not None and epochs < FEW_EPOCHS:
        warnings.append(f"the run sees {about}{epochs:.2g} epochs: most of the training data is never used. {longer}")
    if epochs is not None and epochs > MANY_EPOCHS:
        shorter = "a smaller train.hours" if by_clock else "fewer train.steps, train.tokens or train.epochs"
        seen = f"{epochs:.3g}" if epochs < 1000 else f"{epochs:,.0f}"
        more = "Use your own text with data.source=PATH" if embedded else "Use more data"
        warnings.append(f"the run sees {about}{seen} epochs and may memorise the training data. {more}, or {shorter}")
    return warnings


def _epochs(tokens: int | None, epoch: int) -> float | None:
    return round(tokens / epoch, 4) if tokens is not None and epoch else None


def token_limit(recipe: Recipe, train_tokens: int, world: int) -> float:
    """Return the earliest counted stop condition in tokens, before the batch is chosen; infinity if there is none."""
    train = recipe.train
    limits = [math.inf]
    if train.epochs and train_tokens:
        limits.append(train.epochs * train_tokens)
    if train.tokens:
        limits.append(train.tokens)
    if train.steps:
        requested = requested_batch(recipe)
        solved = solve_batch(*requested, world)
        batch = solved.global_batch if isinstance(solved, BatchPlan) else requested[0] or train.batch_base
        limits.append(train.steps * batch * recipe.data.seq_len)
    return min(limits)


def requested_batch(recipe: Recipe) -> tuple[int | None, int | None, int | None]:
    """Return global batch, micro-batch and accumulation as the recipe sets them; None for those the plan chooses."""
    train = recipe.train
    return none_if_auto(train.global_batch), none_if_auto(train.micro_batch), none_if_auto(train.accumulation)


UNKNOWN_WARMUP = 100  # steps of warm-up if the length of the run is not known


def default_warmup(expected_steps: float) -> tuple[int, str]:
    """Return the steps of warm-up and the reason: 2 % of the run, at least 5 and at most 1000."""
    if math.isinf(expected_steps):
        return UNKNOWN_WARMUP, "the length of the run is not known yet"
    value = min(1000, max(min(5, expected_steps // 2), expected_steps // 50, 1))
    least = ", at least 5" if 10 <= expected_steps < 250 else ""
    return int(value), f"about 2 % of an expected {expected_steps:.0f} steps{least}"


def warmup_warnings(warmup_steps: int, expected_steps: float) -> list[str]:
    """Warn about a warm-up that takes more than half of the run."""
    if warmup_steps <= expected_steps / 2:
        return []
    what = f"train.warmup_steps={warmup_steps} is more than half of an expected {expected_steps:.0f} steps"
    tenth = f"Use, for example, a tenth: {max(1, expected_steps // 10):.0f}"
    return [f"{what}: the learning rate hardly reaches its peak. {tenth}"]
