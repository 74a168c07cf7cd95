"""How much a recipe asks to be trained, as far as it can be told before the run."""

from __future__ import annotations

import math

from redline.plan.batch import BatchPlan, given_batch
from redline.plan.schedule import horizon_steps
from redline.recipe.checks import number
from redline.recipe.schema import Recipe


def steps_of(recipe: Recipe, train_tokens: int, tokens_per_step: int) -> int | None:
    train, length = recipe.train, recipe.data.seq_len
    return horizon_steps(
        steps=train.steps,
        tokens=train.tokens,
        epochs=train.epochs if train_tokens else None,  # unknown before they are prepared
        train_tokens=max(length, train_tokens - train_tokens % length),  # an epoch has whole sequences alone
        tokens_per_step=tokens_per_step,
    )


def token_limit(recipe: Recipe, train_tokens: int, world: int) -> float:
    """The earliest of its counted stops, in tokens, before the batch is chosen."""
    train = recipe.train
    limits = [math.inf]
    if train.epochs and train_tokens:
        limits.append(train.epochs * train_tokens)
    if train.tokens:
        limits.append(train.tokens)
    if train.steps:
        asked = asked_batch(recipe)
        given = given_batch(*asked, world)
        batch = given.global_batch if isinstance(given, BatchPlan) else asked[0] or train.batch_base
        limits.append(train.steps * batch * recipe.data.seq_len)
    return min(limits)


def asked_batch(recipe: Recipe) -> tuple[int | None, int | None, int | None]:
    """Global, of a micro-batch, and how many of those; None is for the plan to choose."""
    train = recipe.train
    return number(train.global_batch), number(train.micro_batch), number(train.accumulation)
