"""Compare fine-tuning by redline with the usual stack, on the same base, tokens and adapters.

Each row runs in a process of its own: `benchmarks.finetune_steps` for redline, `benchmarks.peers.hf_qlora` for the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redline.bench.child import ChildError, ask
from redline.bench.record import Row
from redline.bench.setting import Setting, choose_setting
from redline.bench.throughput import why_not_fp8
from redline.errors import UsageError, UserError
from redline.fields import AUTO, none_if_auto
from redline.jobs.base import costs
from redline.jobs.objective import job_runtime
from redline.planning.batch import BatchPlan, solve_batch
from redline.planning.flops import mfu
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, Resolved, resolve
from redline.recipe.schema import Recipe

RECIPE = "qlora-8b"
# On a CPU the benchmark only shows, within seconds, that it works.
TINY = (
    "model.layers=2",
    "model.d_model=64",
    "model.heads=4",
    "model.kv_heads=2",
    "model.d_ff=128",
    "model.vocab=512",
    "data.seq_len=64",
    "train.precision=fp32",
)
COUNTED = ("train.epochs=null", "train.hours=null", "train.global_batch=4")
DEFAULTS = {"cuda": (*COUNTED, "train.steps=20"), "cpu": (*COUNTED, "train.steps=3")}
SAMPLE_TOKENS = 512  # mean length of the samples in a packed row


@dataclass(frozen=True)
class Contender:
    name: str
    what: str
    method: str = "qlora"
    packed: bool = False  # several samples a row, which do not attend to each other
    forced: tuple[str, ...] = ()  # what the contender is named for; wins over the user's overrides
    peer: dict[str, bool | int] | None = None  # options of the usual stack; None: redline


PLAIN = "hf+peft+bitsandbytes"
CONTENDERS = (
    Contender("redline qlora", "NF4 base, each row one document"),
    Contender(
        "redline qlora packed",
        "the same, each row filled with short samples that do not attend to each other",
        packed=True,
    ),
    Contender(
        "redline qlora fp8",
        "NF4 base, each row one document, the frozen base's products in fp8",
        forced=("train.precision=fp8",),
    ),
    Contender(
        "redline qlora fp8 packed",
        "the same, each row filled with short samples",
        packed=True,
        forced=("train.precision=fp8",),
    ),
    Contender("redline lora", "base not quantised, each row one document", method="lora"),
    Contender(
        PLAIN,
        "transformers, PEFT and bitsandbytes: NF4 base, each row one document, SDPA, recomputing blocks",
        peer={"liger": False, "recompute": True},
    ),
    Contender(f"{PLAIN}+liger", "the same with Liger's kernels", peer={"liger": True, "recompute": True}),
    Contender(
        f"{PLAIN}+liger, nothing recomputed",
        "the same, keeping every activation",
        peer={"liger": True, "recompute": False},
    ),
    Contender(
        f"{PLAIN}+liger, row by row",
        "the same, one row at a time",
        peer={"liger": True, "recompute": False, "micro_batch": 1},
    ),
)


def choose(name: str | None, overrides: list[str]) -> Setting:
    """Return the named recipe, or `RECIPE`, which is shrunk on a CPU."""
    objective = load(name or RECIPE, overrides).recipe.objective
    if objective != "finetune":
        raise UsageError(
            f"is a recipe for {objective}.", where=name or RECIPE, fix=f"Use {RECIPE}, or another finetune."
        )
    tiny = TINY if name is None else ()
    return choose_setting(name or RECIPE, overrides, {**DEFAULTS, "cpu": (*tiny, *DEFAULTS["cpu"])})


def run_finetune(setting: Setting, contenders: Sequence[Contender] = CONTENDERS) -> Iterator[Row]:
    """Yield a row for each contender; the row of one that cannot run has the reason in `error`."""
    for contender in contenders:
        row: Row = {"name": contender.name, "what": contender.what}
        try:
            yield row | _figures(contender, setting)
        except ChildError as error:
            yield row | {"error": str(error)}
        except UserError as error:
            yield row | {"error": error.message()}


def request_for(contender: Contender, setting: Setting) -> tuple[Resolved, dict[str, Any]]:
    """Return the resolved recipe of a contender, and the request to its process."""
    words = [*setting.overrides, f"finetune.method={contender.method}", *contender.forced]
    recipe = _complete(load(setting.name, words).recipe)
    facts = DataFacts(int(none_if_auto(recipe.model.vocab) or 0), 10**9, 10**7, "", recipe.data.tokenizer, "")
    resolved = resolve(recipe, setting.machine, facts)
    theirs = {} if contender.peer is None else {"micro_batch": _peers_batch(recipe, resolved).micro, **contender.peer}
    return resolved, {
        "recipe": resolved.recipe.model_dump(mode="json"),
        "facts": asdict(facts),
        "steps": recipe.train.steps or 1,
        "sample_tokens": _sample_tokens(recipe) if contender.packed else None,
        **theirs,
    }


def _figures(contender: Contender, setting: Setting) -> Row:
    resolved, request = request_for(contender, setting)
    if "train.precision=fp8" in contender.forced and resolved.recipe.train.precision != "fp8":
        why = why_not_fp8(str(resolved.recipe.train.precision), [asdict(choice) for choice in resolved.choices])
        raise UserError(str(why))  # before the process starts
    if contender.peer is None:
        measured = ask("benchmarks.finetune_steps", request)
        figures = measured | _planned(resolved, measured)
    else:
        figures = ask("benchmarks.peers.hf_qlora", request)
    # One formula for all contenders, in which T is the mean length of the document that a token is in.
    flops = costs(resolved.recipe).flops(resolved.shape, round(figures["document_tokens"]), "none").useful
    return figures | {"mfu": mfu(figures["tokens_per_s"], flops, setting.machine.peak("bf16"))}


def _complete(recipe: Recipe) -> Recipe:
    """Return the recipe with its base's shape, if it leaves the shape to the base."""
    if AUTO not in (recipe.model.layers, recipe.model.vocab):
        return recipe
    completed: Recipe = job_runtime(recipe.objective).complete(recipe, lambda _: None)
    return completed


def _sample_tokens(recipe: Recipe) -> int:
    if not recipe.data.pack:
        raise UserError("with data.pack=false every row is one sample.")
    return max(2, min(SAMPLE_TOKENS, recipe.data.seq_len // 4))


def _peers_batch(recipe: Recipe, resolved: Resolved) -> BatchPlan:
    """Return the recipe's batch, or else one micro-batch: redline's plan of memory does not hold for other programs."""
    total = resolved.batch.global_batch
    batch = solve_batch(total, none_if_auto(recipe.train.micro_batch), none_if_auto(recipe.train.accumulation))
    return batch if isinstance(batch, BatchPlan) else BatchPlan(total, 1)


def _planned(resolved: Resolved, measured: Row) -> Row:
    plan = resolved.plan_event()
    planned = {"memory_gib": plan["memory_gib"]["peak"], "tokens_per_s": plan["throughput"]["tokens_per_s"]}
    errors = {
        f"{key}_error": value / measured[key] - 1 if value and measured[key] else None for key, value in planned.items()
    }
    return {"planned": planned, **errors}


def add_ratios(rows: list[Row]) -> list[Row]:
    """Add to each row how many times as fast it is as the usual stack, plain and at its best."""
    rates = {row["name"]: row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    peers = {one.name: rates[one.name] for one in CONTENDERS if one.peer is not None and one.name in rates}
    plain, best = peers.get(PLAIN), max(peers, key=peers.__getitem__, default=None)
    return [
        row
        | {
            "times_plain": row["tokens_per_s"] / plain if plain else None,
            "times_best": row["tokens_per_s"] / peers[best] if best else None,
            "best_of_theirs": row["name"] == best,
        }
        if "tokens_per_s" in row
        else row
        for row in rows
    ]
