"""Planned against measured: peak memory and tokens/s of several configurations, by a few real steps of each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from redline.bench.child import ask_trial
from redline.bench.record import Row
from redline.bench.throughput import why_not_fp8
from redline.data.estimate import vocabulary
from redline.errors import UsageError, UserError, did_you_mean
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, resolve

if TYPE_CHECKING:
    from redline.hardware.machine import Machine
    from redline.recipe.schema import Recipe

Cases = dict[str, str]  # name → the words of `redline train`

_760M = "pretrain-350m model.d_model=1536 model.d_ff=4096"
_1300M = "pretrain-350m model.d_model=2048 model.d_ff=5504"
_200M = "pretrain-350m model.layers=16 model.d_model=896 model.heads=14 model.d_ff=2432"
_DEEP = "pretrain-350m model.layers=40 model.d_model=768 model.heads=12 model.d_ff=2048"
_1000M = "pretrain-350m model.d_model=1792 model.heads=14 model.d_ff=4864"
# A few configurations of each kind. On an H200 a step takes 0.1 to 0.4 s, so the timed steps take about 5 s a case.
CASES: dict[str, Cases] = {
    "cuda": {
        "125m": "pretrain-125m train.global_batch=64",
        "125m-t512": "pretrain-125m data.seq_len=512 train.global_batch=256",
        "125m-t4096-fp8": "pretrain-125m data.seq_len=4096 train.global_batch=16 train.precision=fp8",
        "350m": "pretrain-350m train.global_batch=64",
        "350m-micro-96": "pretrain-350m train.global_batch=96 train.micro_batch=96",
        "350m-micro-16": "pretrain-350m train.global_batch=48 train.micro_batch=16",
        "350m-t2048-fused": "pretrain-350m data.seq_len=2048 train.global_batch=24 model.kernels=fused",
        "350m-t4096": "pretrain-350m data.seq_len=4096 train.global_batch=8",
        "350m-torch": "pretrain-350m train.global_batch=48 model.kernels=torch",
        "350m-selective": "pretrain-350m train.global_batch=48 train.grad_checkpointing=selective",
        "350m-full": "pretrain-350m train.global_batch=48 train.grad_checkpointing=full",
        "350m-fp8": "pretrain-350m train.global_batch=64 train.precision=fp8",
        "350m-muon": "pretrain-350m train.global_batch=48 train.optimizer=muon",
        "760m": f"{_760M} train.global_batch=24",
        "1.3b": f"{_1300M} train.global_batch=16",
        "1.3b-fp8": f"{_1300M} train.global_batch=16 train.precision=fp8",
    },
    "cpu": {
        "1m": "quickstart model.size=1m",
        "2m": "quickstart model.size=2m",
        "2m-fp32": "quickstart model.size=2m train.precision=fp32",
        "2m-adamw": "quickstart model.size=2m train.optimizer=adamw",
        "2m-t1024": "quickstart model.size=2m data.seq_len=1024",
        "5m": "quickstart model.size=5m",
        "5m-t512": "quickstart model.size=5m data.seq_len=512",
        "2-layers": "quickstart model.layers=2 model.d_model=128 model.heads=2",
        "bd3lm": "problems-bd3lm",
        "5m-full": "quickstart model.size=5m train.grad_checkpointing=full",
    },
}
# Configurations that no constant of the plan may be fitted to, from the commit that added this list on. They cover what
# the cases above do not: other widths and depths, grouped-query attention, two lengths at once, both kinds of kernels,
# accumulation, and other jobs. A constant that must change because of one of them moves it to CASES, in the same
# commit, and another takes its place here.
HELD_OUT: dict[str, Cases] = {
    "cuda": {
        "200m": f"{_200M} train.global_batch=64",
        "350m-deep": f"{_DEEP} train.global_batch=48",
        "350m-gqa": "pretrain-350m model.kv_heads=4 train.global_batch=64",
        "350m-t1536": "pretrain-350m data.seq_len=1536 train.global_batch=40",
        "350m-accumulated-fp8": "pretrain-350m train.global_batch=96 train.micro_batch=24 train.precision=fp8",
        "350m-packed-fused": "pretrain-350m data.pack=true train.global_batch=64",
        "350m-uncompiled": "pretrain-350m train.global_batch=24 train.compile=false model.kernels=torch",
        "350m-full-t2048": "pretrain-350m data.seq_len=2048 train.global_batch=24 train.grad_checkpointing=full",
        "1b": f"{_1000M} train.global_batch=16",
        "1b-normuon": f"{_1000M} train.global_batch=16 train.optimizer=normuon",
        "bd3lm-blocks-8": "owt-bd3lm block_diffusion.block_size=8 train.global_batch=64",
    },
    "cpu": {
        "3-layers": "quickstart model.layers=3 model.d_model=192 model.heads=3",
        "2m-batch-16": "quickstart model.size=2m train.global_batch=16 train.micro_batch=16",
        "2m-vocab-1024": "quickstart model.size=2m data.tokenizer=train:1024 data.seq_len=128",
        "6-layers-gqa": "quickstart model.layers=6 model.d_model=256 model.heads=4 model.kv_heads=2",
        "5m-fp32-muon": "quickstart model.size=5m train.precision=fp32 train.optimizer=muon",
        "4-layers-full": "quickstart model.layers=4 model.d_model=256 model.heads=4 train.grad_checkpointing=full",
    },
}
NAMES = {False: "plan-accuracy", True: "plan-accuracy-held-out"}  # of the results: they are never in one file
LEAST_STEPS = {"cuda": 15, "cpu": 3}  # timed steps, after the ones in which clocks and caches settle


def cases(name: str | None, overrides: list[str], device: str, *, held_out: bool = False) -> Cases:
    """Return the named recipe as the only case, or all cases of the device, each with the overrides.

    With `held_out`, return the cases that no constant was fitted to instead.
    """
    if name is not None:
        words = " ".join([name, *overrides])
        return {words: words}
    chosen = HELD_OUT if held_out else CASES
    return {case: " ".join([words, *overrides]) for case, words in chosen[device].items()}


def due(known: Cases, only: str | None, earlier: list[Row]) -> Cases:
    """Return the cases that `--only` names, or else all that have no figure yet."""
    if only is None:
        done = {(row["name"], row.get("case")) for row in earlier if "error" not in row}
        return {name: words for name, words in known.items() if (name, words) not in done}
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"There are {', '.join(known)}."
            raise UsageError(f"{name!r} is none of the configurations.", where="--only", fix=hint)
    return {name: known[name] for name in dict.fromkeys(names)}


def in_order(rows: list[Row], known: Cases) -> list[Row]:
    """Return the rows in the order of the cases; others come last."""
    order = list(known)
    return sorted(rows, key=lambda row: order.index(row["name"]) if row["name"] in known else len(order))


def run_plan_accuracy(chosen: Cases, machine: Machine) -> Iterator[Row]:
    """Yield a row for each case; the row of one that cannot be planned or run has the reason in `error`."""
    for name, case in chosen.items():
        recipe, *overrides = case.split()
        begin = time.perf_counter()
        compared = _compared(recipe, overrides, machine)
        yield {"name": name, "case": case, **compared, "seconds": round(time.perf_counter() - begin, 1)}


def _compared(name: str, overrides: list[str], machine: Machine) -> Row:
    planned: Row = {}
    try:
        recipe = load(name, overrides).recipe
        # Enough data for any model, so that no size is limited by them.
        facts = DataFacts(vocabulary(recipe.data.tokenizer), 3_700_000, 190_000, "", recipe.data.tokenizer, "")
        resolved = resolve(recipe, machine, facts)
        plan, used = resolved.plan_event(), resolved.recipe.train.precision
        planned |= {
            "memory_gib": plan["memory_gib"]["peak"],
            "tokens_per_s": plan["throughput"]["tokens_per_s"],
            "micro": plan["batch"]["micro"],
        }
        _require_precision(recipe, used, plan["choices"])
        measured = ask_trial(resolved, facts, least_steps=LEAST_STEPS[machine.device])
        _require_precision(recipe, used, measured["choices"])
    except UserError as error:
        # The trial's errors name `plan --probe`, which the user did not type here.
        return {"planned": planned, "error": error.what if error.where == "--probe" else error.message()}
    errors = {f"{key}_error": _error(planned[key], measured[key]) for key in ("memory_gib", "tokens_per_s")}
    return {"planned": planned, "measured": measured, **errors}


def _require_precision(recipe: Recipe, used: str, choices: list[Row]) -> None:
    """Raise a UserError if a case that asked for fp8 does not compute in it: its figure would have the wrong name."""
    if recipe.train.precision == "fp8" and (why := why_not_fp8(used, choices)):
        raise UserError(why)


def _error(planned: float | None, measured: float | None) -> float | None:
    return planned / measured - 1 if planned and measured else None
