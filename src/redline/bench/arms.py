"""Who runs for time to loss, and with which words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from redline.bench.setting import TINY, beneath, key_of
from redline.errors import UsageError, did_you_mean
from redline.recipe.load import load, parse_overrides, shipped

BASELINE = "nanogpt"
ARMS = (BASELINE, "pretrain-350m", "speedrun-350m")  # all but the first are recipes
# what the baseline's loop reads; anything else it would pass over in silence
BASELINE_READS = {
    *(f"data.{key}" for key in ("source", "tokenizer", "seq_len", "shuffle", "workers", "val_fraction", "text_key")),
    *(f"model.{key}" for key in ("layers", "d_model", "heads")),
    *(f"train.{key}" for key in ("lr", "global_batch", "micro_batch", "warmup_steps", "weight_decay", "min_lr_ratio")),
    *(f"train.{key}" for key in ("device", "precision", "compile")),
    "eval.sequences",
}
# what follows from the budget, the seed and the rule that only training is timed
OWN = {
    "train.seed": "Use --seed.",
    **dict.fromkeys(
        ("train.steps", "train.tokens", "train.epochs", "train.hours", "train.target_loss", "eval.patience"),
        "Use --budget.",
    ),
    **dict.fromkeys(("eval.every", "eval.samples", "monitor.log_every"), "Leave it out."),
    **dict.fromkeys(("checkpoint.every", "checkpoint.best", "checkpoint.keep"), "Leave it out."),
}
# neither makes a step slower or faster: trials that differ in these alone share a step time
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
    """What a row is known by."""

    arm: str
    overrides: tuple[str, ...]
    budget_s: float
    seed: int

    @property
    def name(self) -> str:
        return " ".join([self.arm, *self.overrides, f"· {self.budget_s:g} s · seed {self.seed}"])

    @property
    def speed(self) -> tuple[str, ...]:
        """Trials in which this is equal take the same time for a step."""
        return (self.arm, *(word for word in self.overrides if key_of(word) not in SAME_SPEED))


def in_order(overrides: Iterable[str]) -> tuple[str, ...]:
    """The same words in another order or spelling are the same trial; of two values for a key the last counts."""
    values: dict[str, str] = {}
    for word in overrides:
        key, typed = key_of(word), word.partition("=")[2]
        (value,) = parse_overrides([word]).values()
        values[key] = f"{value:g}" if isinstance(value, float) else typed
    return tuple(f"{key}={value}" for key, value in sorted(values.items()))


def is_control(arm: str, overrides: Iterable[str]) -> bool:
    """The baseline's loop with a model of another shape: it tells what size is worth, and is no baseline."""
    return arm == BASELINE and any(key_of(word).startswith("model.") for word in overrides)


def choose_arms(asked: str | None) -> list[str]:
    """Those that were named, else all that this version has a recipe for."""
    known = shipped()
    if asked is None:
        return [arm for arm in ARMS if arm == BASELINE or arm in known]
    names = list(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
    if not names:
        raise UsageError("names no arm.", where="--arm", fix=f"There are {', '.join(ARMS)}.")
    for name in names:
        if name not in ARMS:
            hint = did_you_mean(name, ARMS) or f"There are {', '.join(ARMS)}."
            raise UsageError(f"{name!r} is none of the arms.", where="--arm", fix=hint)
        if name != BASELINE and name not in known:
            what = f"{name!r} has no recipe in this version."
            raise UsageError(what, where="--arm", fix=f"There are {', '.join(choose_arms(None))}.")
    return names


def check_overrides(arms: Iterable[str], overrides: Iterable[str]) -> None:
    """Refuses what the benchmark decides itself, and what the baseline would not read."""
    keys = {key_of(word): word for word in overrides}
    for key, word in keys.items():
        if key in OWN:
            raise UsageError("the benchmark sets this itself.", where=word, fix=OWN[key])
    for arm in arms:
        if arm != BASELINE:
            load(arm, list(overrides))  # a slip is answered before anything is measured
        elif strange := [word for key, word in keys.items() if key not in BASELINE_READS]:
            fix = "Name the other arms with --arm, and run nanogpt in a call of its own."
            raise UsageError("nanogpt does not read this.", where=strange[0], fix=fix)


def device_of(overrides: Iterable[str]) -> str:
    asked = [word.partition("=")[2] for word in overrides if key_of(word) == "train.device"]
    return asked[-1] if asked else "auto"


def words_for(arm: str, overrides: Iterable[str], device: str) -> list[str]:
    """Everything but steps and seed; what was asked for wins over what all have in common."""
    overrides = list(overrides)
    own_text = any(key_of(word) == "data.source" for word in overrides)
    common = [*SAME_FOR_ALL[device], *(TINY_TEXT if device == "cpu" and not own_text else ())]
    if arm == BASELINE:
        common = [word for word in common if key_of(word) in BASELINE_READS]
    return beneath(common, overrides)
