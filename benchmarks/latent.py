"""Compare a latent prefix by redline with the textbook loop, on the same models, texts and loss terms.

Each row runs in a process of its own: `benchmarks.latent_steps` for redline, `benchmarks.peers.latent_textbook` for the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redline.bench.child import ChildError, ask
from redline.bench.record import Row
from redline.bench.setting import Setting, choose_setting
from redline.errors import UsageError, UserError
from redline.fields import AUTO, none_if_auto
from redline.jobs.objective import job_runtime
from redline.planning.batch import BatchPlan, solve_batch
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, Resolved, resolve
from redline.recipe.schema import Recipe

RECIPE, OBJECTIVE = "latentwire-squad", "latent_prefix"
COUNTED = ("train.epochs=null", "train.hours=null", "train.micro_batch=auto")
# The guide's two model families at a size that is built within seconds. Weights are random; nothing is downloaded.
ONE_BILLION = (
    "model.base=meta-llama/Llama-3.2-1B-Instruct",
    "model.quant=none",
    "model.layers=16",
    "model.d_model=2048",
    "model.heads=32",
    "model.kv_heads=8",
    "model.d_ff=8192",
    "model.tied=true",
    "latent_prefix.others=[{base: Qwen/Qwen2.5-1.5B-Instruct, shape: {layers: 28, d_model: 1536, heads: 12,"
    " kv_heads: 2, d_ff: 8960, vocab: 151936, tied: true, qkv_bias: true}}]",
)
# On a CPU the benchmark only shows, within seconds, that it works.
TINY = (
    "model.base=tiny",
    "model.quant=none",
    "model.layers=2",
    "model.d_model=64",
    "model.heads=4",
    "model.kv_heads=2",
    "model.d_ff=128",
    "model.vocab=512",
    "model.tied=true",
    "latent_prefix.others=[{base: tinier, shape: {layers: 1, d_model: 48, heads: 4, d_ff: 96, vocab: 300,"
    " qkv_bias: true}}]",
    "latent_prefix.d_z=32",
    "latent_prefix.slots=8",
    "latent_prefix.layers=1",
    "latent_prefix.heads=2",
    "latent_prefix.bytes=256",
    "data.seq_len=32",
    "train.precision=fp32",
)
DEFAULTS = {
    "cuda": (*COUNTED, "train.global_batch=64", "train.steps=20"),
    "cpu": (*COUNTED, "train.global_batch=4", "train.steps=3"),
}
SMALLER = {"cuda": ONE_BILLION, "cpu": TINY}


@dataclass(frozen=True)
class Contender:
    name: str
    what: str
    peer: dict[str, Any] | None = None  # options of the textbook loop; None: redline


TEXTBOOK = "textbook"
CONTENDERS = (
    Contender("redline", "one pass for all terms, the teacher's states from disk"),
    Contender(
        TEXTBOOK,
        "transformers, a forward for the answer, its first token and each of its first K; the teacher in each step",
        {"one_pass": False},
    ),
    Contender(
        f"{TEXTBOOK}, one pass",
        "the same with one forward for all of these, and logits only where they are needed",
        {"one_pass": True},
    ),
)


def choose(name: str | None, overrides: list[str]) -> Setting:
    """Return the named recipe, or `RECIPE` with smaller models, on a CPU with tiny ones."""
    objective = load(name or RECIPE, overrides).recipe.objective
    if objective != OBJECTIVE:
        fix = f"Use {RECIPE}, or another {OBJECTIVE}."
        raise UsageError(f"is a recipe for {objective}.", where=name or RECIPE, fix=fix)
    smaller = SMALLER if name is None else dict.fromkeys(SMALLER, ())
    defaults = {device: (*smaller[device], *words) for device, words in DEFAULTS.items()}
    return choose_setting(name or RECIPE, overrides, defaults, tiny=())


def run_latent(setting: Setting, contenders: Sequence[Contender] = CONTENDERS) -> Iterator[Row]:
    """Yield a row for each contender; the row of one that cannot run has the reason in `error`."""
    recipe = _complete(setting.recipe)
    facts = DataFacts(257, 10**9, 10**7, "", "bytes", "")
    resolved = resolve(recipe, setting.machine, facts)
    request = {
        "recipe": resolved.recipe.model_dump(mode="json"),
        "facts": asdict(facts),
        "steps": recipe.train.steps or 1,
    }
    for contender in contenders:
        row: Row = {"name": contender.name, "what": contender.what}
        try:
            if contender.peer is None:
                yield row | ask("benchmarks.latent_steps", request)
            else:
                more = {"micro_batch": _peers_batch(recipe, resolved).micro, **contender.peer}
                yield row | ask("benchmarks.peers.latent_textbook", {**request, **more})
        except ChildError as error:
            yield row | {"error": str(error)}
        except UserError as error:
            yield row | {"error": error.message()}


def _complete(recipe: Recipe) -> Recipe:
    """Return the recipe with its models' shapes, if it leaves the shapes to the models."""
    others = recipe.latent_prefix.others  # type: ignore[attr-defined]
    if AUTO not in (recipe.model.layers, recipe.model.vocab) and all(one.shape for one in others):
        return recipe
    completed: Recipe = job_runtime(OBJECTIVE).complete(recipe, lambda _: None)
    return completed


def _peers_batch(recipe: Recipe, resolved: Resolved) -> BatchPlan:
    """Return the recipe's batch, or else one micro-batch: redline's plan of memory does not hold for other programs."""
    total = resolved.batch.global_batch
    batch = solve_batch(total, none_if_auto(recipe.train.micro_batch), none_if_auto(recipe.train.accumulation))
    return batch if isinstance(batch, BatchPlan) else BatchPlan(total, 1)


def add_ratios(rows: list[Row]) -> list[Row]:
    """Add to each row how many times as fast it is as the textbook loop, and how far its first loss terms differ.

    In a run of one epoch the teacher reads every text once, so redline's steps are also compared with that added.
    """
    textbook = next((row for row in rows if row["name"] == TEXTBOOK and "step_ms" in row), None)
    if textbook is None:
        return rows
    with_ratios = []
    for row in rows:
        if "step_ms" in row:
            with_teacher = row["step_ms"] + row.get("teacher_ms", 0.0)
            row = row | {
                "times_textbook": textbook["step_ms"] / row["step_ms"],
                "times_textbook_one_epoch": textbook["step_ms"] / with_teacher,
                "terms_apart": _largest_difference(row, textbook),
            }
        with_ratios.append(row)
    return with_ratios


def _largest_difference(row: Row, other: Row) -> float | None:
    """Return the largest difference of a loss term, as a share of the loss; None if the terms are not the same."""
    terms, others = row["first_terms"], other["first_terms"]
    if terms.keys() != others.keys():
        return None
    return max(abs(terms[name] - value) for name, value in others.items()) / float(other["first_loss"])
