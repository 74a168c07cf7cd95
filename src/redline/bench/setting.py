"""What a benchmark runs: the recipe it is about and its data, or something tiny where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redline.jobs.base import job
from redline.recipe.aliases import canonical_keys
from redline.recipe.load import load, parse_overrides

if TYPE_CHECKING:
    from redline.hardware.machine import Machine
    from redline.recipe.schema import Recipe

RECIPE = "pretrain-350m"
# On a CPU the benchmarks show that they work, within a minute: the vocabulary is the recipe's, the model is not.
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
# Only training is timed: no look at the data, and no checkpoint, in between.
UNDISTURBED = (
    "eval.every=1000000000",
    "eval.sequences=8",
    "eval.samples=0",
    "checkpoint.every=1000000000",
    "checkpoint.best=false",
)


@dataclass(frozen=True)
class Setting:
    """A recipe with everything that was asked for; the words are those of `redline train`."""

    name: str
    overrides: tuple[str, ...]
    machine: Machine
    recipe: Recipe

    @property
    def words(self) -> list[str]:
        return [self.name, *self.overrides]

    def with_tokens(self, folder: Path, count: int) -> Setting:
        """With random tokens, unless other data were asked for: a speed does not depend on what they say."""
        data = self.recipe.data
        asked = any(word.startswith("data.source=") and word != "data.source=embedded" for word in self.overrides)
        if asked or data.tokenizer != "gpt2" or _asks(self.recipe):
            return self
        from redline.data.facts import vocabulary

        write_random_tokens(folder, vocabulary(data.tokenizer), count)
        overrides = (*self.overrides, f"data.source={folder}")
        return Setting(self.name, overrides, self.machine, load(self.name, list(overrides)).recipe)


def _asks(recipe: Recipe) -> bool:
    """Its data are questions with their answers, which random tokens are not."""
    module = job(recipe.objective)
    given = hasattr(module, "layout") and any(segment.given for segment in module.layout(recipe).segments)
    return recipe.objective == "finetune" or given


def key_of(word: str) -> str:
    """Its one name, whatever spelling was typed."""
    flat, _, _ = canonical_keys(parse_overrides([word]), "command line")
    return next(iter(flat))


def beneath(defaults: Iterable[str], asked: Iterable[str]) -> list[str]:
    """The defaults of keys that were not asked for, in any spelling, and then what was."""
    asked = list(asked)
    given = {key_of(word) for word in asked}
    return [*(word for word in defaults if key_of(word) not in given), *asked]


def choose_setting(
    name: str | None, overrides: list[str], defaults: Mapping[str, tuple[str, ...]], tiny: tuple[str, ...] = TINY
) -> Setting:
    """The recipe that was named, else `RECIPE`, on a CPU with `tiny`. What was asked for wins over the `defaults`."""
    asked = load(name or RECIPE, overrides).recipe  # a slip is answered before torch is imported
    from redline.hardware.probe import detect_machine

    machine = detect_machine(asked.train.device)
    smaller = tiny if name is None and machine.device == "cpu" else ()
    words = beneath(smaller, beneath(defaults[machine.device], overrides))
    return Setting(name or RECIPE, tuple(words), machine, load(name or RECIPE, words).recipe)


def write_random_tokens(folder: Path, vocabulary: int, count: int) -> None:
    """train.bin and val.bin, as nanoGPT writes them."""
    import numpy as np

    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for name, tokens in (("train.bin", count), ("val.bin", max(100_000, count // 100))):
        chance.integers(0, vocabulary, tokens, dtype=np.uint16).tofile(folder / name)
