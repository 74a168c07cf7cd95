"""What a benchmark trains: a recipe with overrides and data, or a tiny model on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redline.jobs.base import job
from redline.recipe.load import canonical_keys, load, parse_overrides

if TYPE_CHECKING:
    from redline.hardware.machine import Machine
    from redline.recipe.schema import Recipe

RECIPE = "pretrain-350m"
# On a CPU a benchmark only shows, within a minute, that it works: the recipe's vocabulary on a tiny model.
TINY = (
    "model.layers=2",
    "model.d_model=64",
    "model.heads=2",
    "model.d_ff=128",
    "data.seq_len=64",
    "train.global_batch=4",
    "train.precision=fp32",
    "eval.sequences=4",
)
# Only training is timed: no evaluation and no checkpoint in between.
UNDISTURBED = (
    "eval.every=1000000000",
    "eval.sequences=8",
    "eval.samples=0",
    "checkpoint.every=1000000000",
    "checkpoint.best=false",
)


@dataclass(frozen=True)
class Setting:
    """A recipe with its overrides; `words` are the arguments of `redline train`."""

    name: str
    overrides: tuple[str, ...]
    machine: Machine
    recipe: Recipe

    @property
    def words(self) -> list[str]:
        return [self.name, *self.overrides]

    def with_tokens(self, folder: Path, count: int) -> Setting:
        """Return the setting with random tokens, unless the user named data: speed does not depend on the text.

        Random tokens cannot stand in for questions with answers.
        """
        data = self.recipe.data
        asked = any(word.startswith("data.source=") and word != "data.source=embedded" for word in self.overrides)
        if asked or data.tokenizer != "gpt2" or job(self.recipe.objective).can_answer(self.recipe):
            return self
        from redline.data.estimate import vocabulary

        write_random_tokens(folder, vocabulary(data.tokenizer), count)
        overrides = (*self.overrides, f"data.source={folder}")
        return Setting(self.name, overrides, self.machine, load(self.name, list(overrides)).recipe)


def key_of(word: str) -> str:
    """Return the canonical key of `key=value`, whatever alias was typed."""
    flat, _, _ = canonical_keys(parse_overrides([word]), "command line")
    return next(iter(flat))


def with_defaults(defaults: Iterable[str], asked: Iterable[str]) -> list[str]:
    """Return the user's overrides preceded by the defaults of keys that the user did not set, under any alias."""
    asked = list(asked)
    given = {key_of(word) for word in asked}
    return [*(word for word in defaults if key_of(word) not in given), *asked]


def choose_setting(
    name: str | None, overrides: list[str], defaults: Mapping[str, tuple[str, ...]], tiny: tuple[str, ...] = TINY
) -> Setting:
    """Return the named recipe, or RECIPE (on a CPU shrunk by `tiny`). The user's overrides win over `defaults`."""
    asked = load(name or RECIPE, overrides).recipe  # report a mistake before torch is imported
    from redline.hardware.probe import detect_machine

    machine = detect_machine(asked.train.device)
    smaller = tiny if name is None and machine.device != "cuda" else ()
    words = with_defaults(smaller, with_defaults(defaults["cuda" if machine.device == "cuda" else "cpu"], overrides))
    return Setting(name or RECIPE, tuple(words), machine, load(name or RECIPE, words).recipe)


def write_random_tokens(folder: Path, vocabulary: int, count: int) -> None:
    """Write train.bin and val.bin in nanoGPT's format (uint16 ids)."""
    import numpy as np

    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for name, tokens in (("train.bin", count), ("val.bin", max(100_000, count // 100))):
        chance.integers(0, vocabulary, tokens, dtype=np.uint16).tofile(folder / name)
