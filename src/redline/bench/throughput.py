"""Tokens a second of the real loop, beside what others get from the same GPU, batch and tokens in the same call."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.bench.child import ChildError, TrainedRun, ask, train
from redline.bench.fp8 import not_in_fp8
from redline.bench.readings import card_figures, data_wait_share, median
from redline.bench.record import Row
from redline.bench.setting import UNDISTURBED, Setting
from redline.jobs.base import job

if TYPE_CHECKING:
    from redline.recipe.schema import Recipe

DEFAULTS = {
    "cuda": ("train.steps=200", "monitor.log_every=10"),
    "cpu": ("train.steps=6", "monitor.log_every=1", "train.compile=false"),
}
PROFILED_STEPS = 3


@dataclass(frozen=True)
class Contender:
    name: str
    what: str
    overrides: tuple[str, ...] = ()  # below what the user asks for
    forced: tuple[str, ...] = ()  # above it: what the contender is named for
    module: str | None = None  # a training loop of its own; else `redline train`


OURS = "redline"
CONTENDERS = (
    Contender(OURS, "redline train, as the recipe ships"),
    Contender("redline-fp8", "the same with fp8 matmuls", forced=("train.precision=fp8",)),
    Contender(
        "plain", "the same loop, its blocks by torch.compile alone", ("train.compile=true", "model.kernels=torch")
    ),
    Contender(
        "transformers",
        "transformers' Llama in a plain loop: float32 weights under bf16 autocast, SDPA, torch.compile, fused AdamW",
        ("train.compile=true",),
        module="redline.bench.llama",
    ),
)

# Of a job that reads a mask of blocks: what such a mask costs by itself.
MASKED = (
    *CONTENDERS[:2],
    Contender("masked", "the same, a dense mask given to torch's attention", forced=("model.attention=efficient",)),
    Contender("dense", "the same, every score made and masked", forced=("model.attention=dense",)),
    Contender(
        "textbook",
        "every score made and masked, not compiled",
        forced=("model.attention=dense", "model.kernels=torch", "train.compile=false"),
    ),
)


def contenders(recipe: Recipe) -> tuple[Contender, ...]:
    if recipe.objective == "causal_lm":
        return CONTENDERS
    return MASKED if hasattr(job(recipe.objective), "layout") else CONTENDERS[:1]


def run_throughput(setting: Setting, chosen: Sequence[Contender] | None = None) -> Iterator[Row]:
    """A row for each contender, one after the other; who cannot run says why in `error`."""
    with tempfile.TemporaryDirectory(prefix="redline-bench-") as name:
        folder = Path(name)
        setting = setting.with_tokens(folder / "tokens", _tokens_needed(setting))
        for contender in chosen or contenders(setting.recipe):
            own = [*contender.overrides, *contender.forced]
            row: Row = {"name": contender.name, "what": contender.what, "overrides": own}
            words = [setting.name, *UNDISTURBED, *contender.overrides, *setting.overrides, *contender.forced]
            try:
                if contender.module is None:
                    yield row | _ours(contender, train(words, folder / contender.name))
                else:
                    yield row | ask(contender.module, {"recipe": setting.name, "overrides": words[1:]})
            except ChildError as error:
                yield row | {"error": str(error)}


def _ours(contender: Contender, run: TrainedRun) -> dict[str, Any]:
    """Its figures, if it is what it is named for."""
    figures = _figures(run)
    if "train.precision=fp8" in contender.forced:
        choices = [choice for event in run.of_type("plan") for choice in event["choices"]]
        if why := not_in_fp8(figures["precision"], choices, figures["warnings"]):
            raise ChildError(why)
    return figures | _kernels(run)


def with_ratios(rows: list[Row]) -> list[Row]:
    """How many times as fast as each redline is, where it is among them."""
    ours = next((row.get("tokens_per_s") for row in rows if row["name"] == OURS), None)
    return [row | {"redline_is": ours / row["tokens_per_s"]} if ours and "tokens_per_s" in row else row for row in rows]


def _tokens_needed(setting: Setting) -> int:
    """For a few hundred steps without a repetition; more steps read them again."""
    recipe = setting.recipe
    batch = recipe.train.global_batch if isinstance(recipe.train.global_batch, int) else 256
    return min(200, recipe.train.steps or 200) * batch * recipe.data.seq_len + 100_000


def _figures(run: TrainedRun) -> dict[str, Any]:
    steps, plan = run.of_type("step"), run.of_type("plan")[-1]
    steady = steps[1:] or steps  # in the first the GPU's clocks and the loader still settle
    names = ("tokens_per_s", "mfu", "mfu_causal", "step_ms", "data_wait_ms")
    figures: dict[str, Any] = {name: median([event[name] for event in steady]) for name in names}
    memory = [event["memory_gib"] for event in steps if event["memory_gib"] is not None]
    return {
        **figures,
        **card_figures(steps, run.lock["batch"]["tokens_per_step"]),
        "data_wait_share": data_wait_share(figures),
        "memory_gib": max(memory, default=None),
        "micro_batch": run.lock["batch"]["micro"],
        "steps": steps[-1]["step"],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "warmup_s": sum(event.get("seconds", 0.0) for event in run.of_type("warmup")),
        "compiled": run.lock["recipe"]["train"]["compile"],
        "kernels": run.lock["recipe"]["model"]["kernels"],
        "precision": run.lock["recipe"]["train"]["precision"],
        "ceiling_tokens_per_s": plan["ceiling"]["tokens_per_s"],
        "warnings": _warnings(run),
        "choices": {choice["key"]: choice["value"] for event in run.of_type("plan") for choice in event["choices"]},
    }


def _warnings(run: TrainedRun) -> list[str]:
    """What else is to be known of a figure: not compiled after all, a smaller micro-batch, something switched off."""
    told = [event["message"] for kind in ("warning", "recovery") for event in run.of_type(kind)]
    return [*(text for event in run.of_type("plan") for text in event["warnings"]), *told]


def _kernels(run: TrainedRun) -> dict[str, Any]:
    """A few profiled steps of the same recipe, in a process of their own: the timed ones stay undisturbed."""
    if run.lock["machine"]["device"] != "cuda":
        return {}
    request = {"recipe": run.lock["recipe"], "facts": run.lock["data"], "profile": PROFILED_STEPS}
    try:
        answer = ask("redline.training.trial", request)
    except ChildError as error:
        return {"profile_error": str(error)}
    return {key: answer[key] for key in ("kernel_ms", "kernel_share") if key in answer}
