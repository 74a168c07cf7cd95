"""What a latent prefix is trained on, and through which frozen models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redline.data.latent import PairData, Reader, Rows, load_pairs
from redline.data.mixture import epoch_sample
from redline.data.progress import ProgressCallback
from redline.data.tokenizer import ByteTokenizer
from redline.errors import Problem, RecipeError, UserError
from redline.fields import AUTO
from redline.jobs.latent_prefix import slots_read
from redline.models.pretrained import Base, open_base
from redline.recipe.resolve import DataFacts
from redline.recipe.schema import Model, Recipe


@dataclass(frozen=True)
class LatentData:
    facts: DataFacts
    bases: dict[str, Base] | None = None  # by number; None: random weights, for steps that are only timed
    readers: dict[str, Reader] | None = None
    pairs: PairData | None = None  # None when nothing is trained or looked at
    held_out: Rows | None = None

    @property
    def told(self) -> list[str]:
        return [] if self.pairs is None else self.pairs.report.lines()

    def row_keys(self, *, trained: bool) -> list[bytes] | None:
        """One key per row to train on, or per row that is evaluated."""
        to_train = None if self.pairs is None else self.pairs.train
        rows = to_train if trained else self.held_out
        return None if rows is None else [pair.key() for pair in rows.pairs]


def options_of(recipe: Recipe) -> Any:
    return recipe.latent_prefix  # type: ignore[attr-defined]


def wanted(recipe: Recipe) -> dict[str, tuple[str, Any]]:
    """Number → where the model lies, and what says how it is kept."""
    options = options_of(recipe)
    every = [(str(recipe.model.base), recipe.model), *((one.base, one) for one in options.others)]
    return {str(n): one for n, one in enumerate(every) if options.only in (None, n)}


def complete(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    """The recipe with the shapes of its models, which it may also state itself, but not differently."""
    options, model = options_of(recipe), recipe.model
    first, *rest = (open_base(source, say) for source in (str(model.base), *(one.base for one in options.others)))
    found = []
    for key, there in first.model.items():
        given = getattr(model, key)
        if given not in (AUTO, Model.model_fields[key].default, there):
            found.append(Problem(f"model.{key}", f"{given} is not the base's {there}.", "Leave it out."))
    for number, (one, base) in enumerate(zip(options.others, rest, strict=True)):
        stated = one.shape or {}
        wrong = [key for key, value in stated.items() if value != vars(base.shape)[key]]
        what = f"the shape of {one.base} has another {' and '.join(wrong)}."
        found += [Problem(f"latent_prefix.others.{number}", what, "Leave it out.")] if wrong else []
    for base in (first, *rest):
        if recipe.data.seq_len > base.context:
            what = f"{recipe.data.seq_len} is longer than the {base.context} that {base.source} was made for."
            found.append(Problem("data.seq_len", what, f"Use at most {base.context}."))
    if found:
        raise RecipeError("recipe", found)
    known = tuple(
        one.model_copy(update={"shape": vars(base.shape)}) for one, base in zip(options.others, rest, strict=True)
    )
    return recipe.model_copy(
        update={
            "model": model.model_copy(update={**first.model, "size": None}),
            "latent_prefix": options.model_copy(update={"others": known}),
        }
    )


def load_data(recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None) -> LatentData:
    """The recipe's rows; all of them are held out when nothing is trained."""
    found = _without_rows(recipe)
    options = options_of(recipe)
    assert found.readers is not None
    pairs = load_pairs(
        recipe.data,
        list(found.readers.values()),
        most_bytes=options.bytes,
        patch=options.patch,
        slots=slots_read(options),
        words=options.words_weight > 0,
        seed=recipe.train.seed,
        val_fraction=0.0 if for_evaluation else recipe.data.val_fraction,
        progress=progress,
    )
    seq_len = recipe.data.seq_len
    rows = {
        **pairs.train.means(epoch_sample(pairs.index)),
        "before": [len(reader.begin) + len(reader.anchor) for reader in found.readers.values()],
    }
    facts = replace(
        found.facts,
        train_tokens=len(pairs.index) * seq_len,
        val_tokens=0 if pairs.val is None else len(pairs.val) * seq_len,
        fingerprint=pairs.fingerprint,
        content=pairs.content,
        val_rows=0 if pairs.val is None else len(pairs.val),
        rows=rows if options.only is None else None,  # with one model alone nothing is trained
    )
    return replace(found, facts=facts, pairs=pairs, held_out=pairs.train if for_evaluation else pairs.val)


def _without_rows(recipe: Recipe) -> LatentData:
    own = ByteTokenizer()
    bases = {name: open_base(source) for name, (source, _) in wanted(recipe).items()}
    readers = {name: Reader(base.folder, options_of(recipe).anchor) for name, base in bases.items()}
    for name, base in bases.items():
        if readers[name].vocab_size > base.shape.vocab:
            what = f"its tokenizer has {readers[name].vocab_size:,} entries, and the model {base.shape.vocab:,}."
            raise UserError(what, where=base.source, fix="Put the tokenizer that belongs to the model beside it.")
    return LatentData(DataFacts(own.vocab_size, 0, 0, "", own.name, own.fingerprint), bases, readers)


def random_data(facts: DataFacts) -> LatentData:
    """As if such data, and such models, were there."""
    return LatentData(facts)


def tokenizer_alone(facts: DataFacts, folder: Path, recipe: Recipe) -> LatentData:
    """For models that only answer."""
    return replace(_without_rows(recipe), facts=facts)
