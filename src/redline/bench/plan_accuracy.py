"""The plan against real steps: peak memory and tokens/s, planned and measured, configuration by configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from redline.bench.record import Row
from redline.bench.trial import run_trial
from redline.data.facts import vocabulary
from redline.errors import UserError
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, resolve

if TYPE_CHECKING:
    from redline.hardware.machine import Machine

CASES = {
    "cuda": (
        "pretrain-350m",
        "pretrain-350m train.micro_batch=64",
        "pretrain-350m train.micro_batch=32",
        "pretrain-350m data.seq_len=512 train.global_batch=256",
        "pretrain-350m data.seq_len=2048 train.global_batch=64",
        "pretrain-350m data.seq_len=4096 train.global_batch=32",
        "pretrain-350m train.grad_checkpointing=full",
        "pretrain-350m train.grad_checkpointing=selective",
        "pretrain-350m train.optimizer=muon",
        "pretrain-350m train.ema=0.999 train.micro_batch=64",
        "pretrain-350m data.pack=true",
        "pretrain-350m train.compile=false train.micro_batch=32",
        "pretrain-350m model.heads=8",
        "pretrain-125m",
        "pretrain-125m data.seq_len=2048 train.global_batch=64",
        "quickstart train.global_batch=512",
        "quickstart model.size=40m train.global_batch=512",
        "pretrain-350m model.d_model=1536 model.d_ff=4096 train.micro_batch=32",
        "pretrain-350m model.d_model=2048 model.d_ff=5504 train.micro_batch=16",
    ),
    "cpu": (
        "quickstart model.size=5m",
        "quickstart model.size=5m data.seq_len=512",
        "quickstart model.layers=2 model.d_model=128 model.heads=2",
    ),
}


def cases(name: str | None, overrides: list[str], device: str) -> list[str]:
    """The one that was named, else all for this device, each with the overrides."""
    return [" ".join([case, *overrides]) for case in ([name] if name else CASES[device])]


def run_plan_accuracy(chosen: list[str], machine: Machine) -> Iterator[Row]:
    for case in chosen:
        name, *overrides = case.split()
        yield {"case": case, **_compared(name, overrides, machine)}


def _compared(name: str, overrides: list[str], machine: Machine) -> Row:
    recipe = load(name, overrides).recipe
    # as if there were enough data for any size of model
    facts = DataFacts(vocabulary(recipe.data.tokenizer), 3_700_000, 190_000, "", recipe.data.tokenizer, "")
    resolved = resolve(recipe, machine, facts)
    plan = resolved.plan_event()
    planned = {
        "memory_gib": plan["memory_gib"]["peak"],
        "tokens_per_s": plan["throughput"]["tokens_per_s"],
        "micro": plan["batch"]["micro"],
    }
    try:
        measured = vars(run_trial(resolved, facts))
    except UserError as error:
        return {"planned": planned, "error": error.message()}
    errors = {f"{key}_error": _error(planned[key], measured[key]) for key in ("memory_gib", "tokens_per_s")}
    return {"planned": planned, "measured": measured, **errors}


def _error(planned: float | None, measured: float | None) -> float | None:
    return planned / measured - 1 if planned and measured else None
