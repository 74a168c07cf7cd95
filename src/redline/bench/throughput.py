"""Tokens per second of the training loop, in several configurations of the same recipe, batch and tokens.

Each contender trains in a process of its own, one after the other in one call, so that all of them see the same card
at about the same clocks. `benchmarks/` adds contenders that are other programs.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from redline.bench.child import ChildError, TrainedRun, ask, train
from redline.bench.record import Row
from redline.bench.setting import UNDISTURBED, Setting
from redline.errors import UsageError
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
    overrides: tuple[str, ...] = ()  # defaults; the user's overrides win over these
    forced: tuple[str, ...] = ()  # what the contender is named for; these win over the user's overrides
    module: str | None = None  # `python -m MODULE` runs a training loop of its own; None: `redline train`


OURS = "redline"
CONTENDERS = (
    Contender(OURS, "redline train, as the recipe ships"),
    Contender("redline-fp8", "the same with fp8 matmuls", forced=("train.precision=fp8",)),
    Contender(
        "plain", "the same loop, its blocks by torch.compile alone", ("train.compile=true", "model.kernels=torch")
    ),
)

# For jobs whose attention mask is made of blocks: what such a mask costs without a kernel that skips empty blocks.
MASKED = (
    *CONTENDERS[:2],
    Contender("masked", "the same with a dense mask in torch's attention", forced=("model.attention=efficient",)),
    Contender("dense", "the same with every attention score computed", forced=("model.attention=dense",)),
    Contender(
        "textbook",
        "every attention score computed, nothing compiled",
        forced=("model.attention=dense", "model.kernels=torch", "train.compile=false"),
    ),
)


def contenders(recipe: Recipe) -> tuple[Contender, ...]:
    """Return the configurations that make sense for the recipe's job."""
    if job(recipe.objective).layout(recipe) is not None:
        return MASKED
    return CONTENDERS if recipe.model.base is None else CONTENDERS[:1]


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyContender = TypeVar("AnyContender", bound=Named)


def select(contenders: Sequence[AnyContender], only: str | None) -> tuple[AnyContender, ...]:
    """Return the contenders that `--only WORD[,WORD]` names: exactly, or else every name that contains the word."""
    if only is None:
        return tuple(contenders)
    words, names = [word.strip() for word in only.split(",") if word.strip()], [one.name for one in contenders]
    for word in words or [""]:
        if not word or not any(word in name for name in names):
            raise UsageError(
                f"{word!r} is in none of the names.", where="--only", fix=f"Choose from: {'; '.join(names)}."
            )
    matches = {name for word in words for name in names if (word == name if word in names else word in name)}
    return tuple(one for one in contenders if one.name in matches)


def run_throughput(setting: Setting, chosen: Sequence[Contender] | None = None) -> Iterator[Row]:
    """Yield a row for each contender; the row of one that cannot run has the reason in `error`."""
    with tempfile.TemporaryDirectory(prefix="redline-bench-") as name:
        folder = Path(name)
        setting = setting.with_tokens(folder / "tokens", _tokens_needed(setting))
        for contender in chosen or contenders(setting.recipe):
            own = [*contender.overrides, *contender.forced]
            row: Row = {"name": contender.name, "what": contender.what, "overrides": own}
            words = [setting.name, *UNDISTURBED, *contender.overrides, *setting.overrides, *contender.forced]
            try:
                if contender.module is None:
                    yield row | _measure(contender, train(words, folder / contender.name))
                else:
                    yield row | ask(contender.module, {"recipe": setting.name, "overrides": words[1:]})
            except ChildError as error:
                yield row | {"error": str(error)}


def add_ratios(rows: list[Row]) -> list[Row]:
    """Add to each row how many times as fast redline is; rows are unchanged if redline was not measured."""
    ours = next((row.get("tokens_per_s") for row in rows if row["name"] == OURS), None)
    return [row | {"redline_is": ours / row["tokens_per_s"]} if ours and "tokens_per_s" in row else row for row in rows]


def why_not_fp8(precision: str, choices: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why a run that asked for fp8 did not compute in it, or None if it did.

    `precision` is the resolved `train.precision`, and `choices` has the automatic choices of the plan and of the model.
    A row named fp8 must show an fp8 figure, but a card without fp8 units falls back to another precision, and
    `train.fp8` is "none" if no matmul of the model is faster in fp8.
    """
    chosen = {choice["key"]: choice for choice in choices}
    if precision != "fp8":
        fallback = chosen.get("train.precision")
        reason = f" ({fallback['reason']})" if fallback else ""
        return f"this run computes in {precision}, not in fp8{reason}."
    backend = chosen.get("train.fp8")
    if backend is not None and backend["value"] == "none":
        return f"none of its matmuls runs in fp8: {backend['reason']}."
    return None


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def card_figures(readings: Sequence[dict[str, Any]], tokens_per_step: int) -> dict[str, float | None]:
    """Return power, clock and energy per step from readings that have `step`, `time` and NVML's fields.

    Energy is the difference of the card's own counter between the first and the last reading. Power follows from it;
    without a counter it is the median of the sampled values.
    """
    steady = readings[1:] or readings
    figures = {
        "power_w": median([reading.get("power_w") for reading in steady]),
        "sm_clock_mhz": median([reading.get("sm_clock_mhz") for reading in steady]),
        "joules_per_step": None,
        "joules_per_token": None,
    }
    counted = [reading for reading in readings if reading.get("energy_j") is not None]
    if len(counted) < 2:
        return figures
    first, last = counted[0], counted[-1]
    joules, steps, seconds = (last[key] - first[key] for key in ("energy_j", "step", "time"))
    if joules <= 0 or steps <= 0 or seconds <= 0:  # the counter does not move, or was reset in between
        return figures
    per_step = joules / steps
    return figures | {
        "power_w": joules / seconds,
        "joules_per_step": per_step,
        "joules_per_token": per_step / tokens_per_step,
    }


def data_wait_share(figures: dict[str, Any]) -> float | None:
    wait, step = figures.get("data_wait_ms"), figures.get("step_ms")
    return wait / step if wait is not None and step else None


def _tokens_needed(setting: Setting) -> int:
    """Return enough tokens for 200 steps without repetition; longer runs read them again."""
    recipe = setting.recipe
    batch = recipe.train.global_batch if isinstance(recipe.train.global_batch, int) else 256
    return min(200, recipe.train.steps or 200) * batch * recipe.data.seq_len + 100_000


def _measure(contender: Contender, run: TrainedRun) -> dict[str, Any]:
    figures = _figures(run)
    if "train.precision=fp8" in contender.forced:
        choices = [choice for event in run.of_type("plan") for choice in event["choices"]]
        if reason := why_not_fp8(figures["precision"], choices):
            raise ChildError(reason)
    return figures | _kernel_time(run)


def _figures(run: TrainedRun) -> dict[str, Any]:
    steps, plan = run.of_type("step"), run.of_type("plan")[-1]
    steady = steps[1:] or steps  # during the first interval the GPU's clocks and the loader still settle
    names = ("tokens_per_s", "mfu", "mfu_causal", "step_ms", "data_wait_ms")
    figures: dict[str, Any] = {name: median([event[name] for event in steady]) for name in names}
    memory = [event["memory_gib"] for event in steps if event["memory_gib"] is not None]
    recipe, plans = run.lock["recipe"], run.of_type("plan")
    # what qualifies a figure: not compiled after all, a smaller micro-batch, something switched off
    warnings = [text for event in plans for text in event["warnings"]]
    warnings += [event["message"] for kind in ("warning", "recovery") for event in run.of_type(kind)]
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
        "compiled": recipe["train"]["compile"],
        "kernels": recipe["model"]["kernels"],
        "precision": recipe["train"]["precision"],
        "ceiling_tokens_per_s": plan["ceiling"]["tokens_per_s"],
        "warnings": warnings,
        "choices": {choice["key"]: choice["value"] for event in plans for choice in event["choices"]},
    }


def _kernel_time(run: TrainedRun) -> dict[str, Any]:
    """Profile a few steps of the same recipe in another process, so that the profiler does not slow the timed steps."""
    if run.lock["machine"]["device"] != "cuda":
        return {}
    request = {"recipe": run.lock["recipe"], "facts": run.lock["data"], "profile": PROFILED_STEPS}
    try:
        answer = ask("redline.training.trial", request)
    except ChildError as error:
        return {"profile_error": str(error)}
    return {key: answer[key] for key in ("kernel_ms", "kernel_share") if key in answer}
