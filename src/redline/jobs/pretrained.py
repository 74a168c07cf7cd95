"""What the jobs share that may start from a pretrained base (`model.base`): its tokenizer, its weights, its identity.

A run may also train on random weights: without `model.base`, or for steps that are only timed. The shape of a base is
filled into the recipe by `complete_recipe` in `models/pretrained.py`; the torch-free half of all this is in
`jobs/base.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from redline.data.chat_template import definition_file
from redline.data.corpus import TextData, load_text, random_text, text_tokenizer
from redline.data.sources import ProgressCallback, holds_tokens
from redline.data.tokenizer import Tokenizer, load_tokenizer, trained_size, vocabulary_of
from redline.data.tokens import OtherTokenizerError
from redline.errors import UserError
from redline.jobs.base import BASE_TOKENIZER, job
from redline.jobs.objective import DataT, FinetunedModel, Float8Objective, JobRuntime, Log
from redline.models.pretrained import (
    Base,
    complete_recipe,
    fill_frozen_in_parts,
    load_base,
    load_base_in_parts,
    open_base,
    random_tensors,
)
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import Data, Recipe

# ----------------------------------------------------------------------------------------------------
# The objective.


class PretrainedObjective(Float8Objective):
    """The base class of objectives that train a base, adapters on a frozen base, or random weights."""

    casts_weights = True

    def __init__(self, resolved: Resolved, base: Base | None) -> None:
        super().__init__(resolved)
        self.base = base  # None: random weights
        self.adapter = job(self.recipe.objective).adapter(self.recipe)
        self.base_is_trained = self.adapter is None

    @property
    def known_tokens(self) -> int | None:
        """The tokens of the base's own tokenizer, for a job that adds new ones behind them; None if it adds none."""
        return None

    def identity(self) -> dict[str, str]:
        return {} if self.base is None else {"base": self.base.fingerprint}

    def build(self, device: torch.device) -> None:
        """Build the decoder: with the base's weights, with them frozen beside adapters, or with random weights."""
        self.device, options = device, self.recipe.model
        generator = torch.Generator().manual_seed(self.recipe.train.seed)
        if self.adapter is None:
            self.model = self.decoder().to(device)
            self.use_float8()
            if self.base is None:
                self.model.initialise(generator, options.init, options.embedding_std)
            else:
                load_base(self.model, self.base, known=self.known_tokens, generator=generator)
            return
        for _ in self.build_in_parts(device):
            pass

    def build_in_parts(self, device: torch.device) -> Iterator[nn.Module]:
        """Build the decoder on the meta device and fill it block by block.

        Not even a base to be quantised is in memory whole: in bf16 it may not fit where its quantised matrices do.
        """
        self.device, options = device, self.recipe.model
        generator = torch.Generator().manual_seed(self.recipe.train.seed)
        with torch.device("meta"):
            self.model = self.decoder()
        if self.adapter is not None:
            tensors = random_tensors(self.model, device) if self.base is None else self.base.tensors()
            yield from fill_frozen_in_parts(
                self.model, tensors, self.adapter, lora=options.lora, device=device, generator=generator
            )
        elif self.base is None:
            yield from self.model.initialise_in_parts(device, generator, options.init, options.embedding_std)
        else:
            yield from load_base_in_parts(self.model, self.base, device, known=self.known_tokens, generator=generator)
        self.use_float8()

    def remove_adapters(self) -> None:
        assert self.adapter is not None
        self.adapter = replace(self.adapter, targets=())

    @property
    def replayable(self) -> bool:
        """An adapter's dropout draws a seed for each pass; a CUDA graph would replay the seed that it was recorded
        with."""
        return super().replayable and (self.adapter is None or self.recipe.model.lora.dropout == 0)


class PretrainedRuntime(JobRuntime[DataT]):
    """The base class of the runtimes of such objectives."""

    def complete(self, recipe: Recipe, log: Log) -> Recipe:
        if recipe.model.base is None:
            return recipe
        return complete_recipe(recipe, log, new_tokens=job(recipe.objective).added_tokens(recipe))


def trained_on_base(
    recipe: Recipe, tensors: dict[str, torch.Tensor], *, learn: str, template: str | None
) -> FinetunedModel:
    """Return what a run with the option `method` trained on its base, for `redline export`."""
    return FinetunedModel(
        base=str(recipe.model.base),
        method=getattr(recipe, recipe.objective).method,
        learn=learn,
        adapter=job(recipe.objective).adapter(recipe),
        lora=recipe.model.lora,
        template=template,
        tensors=tensors,
    )


# ----------------------------------------------------------------------------------------------------
# Text, read with the base's tokenizer.


@dataclass(frozen=True)
class BaseText(TextData):
    """Text as the data of a job that may start from a base."""

    base: Base | None = None
    base_tokenizer: str = ""  # fingerprint of the base's own tokenizer

    def identity(self) -> dict[str, str]:
        """Return what must be equal on resume, besides the base: the base's own tokenizer, which `export` writes."""
        return {"base_tokenizer": self.base_tokenizer} if self.base_tokenizer else {}


def load_base_text(
    recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
) -> BaseText:
    """Open the recipe's text. With a base, refuse tokens of another vocabulary than the base's."""
    if recipe.model.base is None:
        text = load_text(recipe, for_evaluation=for_evaluation, progress=progress)
        return BaseText(text.tokens, text.held_out, text.corpus)
    base = open_base(str(recipe.model.base))
    own = base_tokenizer(base)
    named = recipe.model_copy(update={"data": with_base_tokenizer(recipe.data, base)})
    try:
        text = load_text(named, for_evaluation=for_evaluation, progress=progress)
    except OtherTokenizerError:
        other = _tokenizer_of_prepared(recipe.data) if recipe.data.tokenizer == BASE_TOKENIZER else None
        if other is None:
            raise
        _check_vocabulary(load_tokenizer(other), own, base, recipe.data)
        named = recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokenizer": other})})
        text = load_text(named, for_evaluation=for_evaluation, progress=progress)
    if text.tokens.tokenizer_fingerprint != own.fingerprint:
        _check_vocabulary(text.tokenizer, own, base, recipe.data)
    return BaseText(text.tokens, text.held_out, text.corpus, base, own.fingerprint)


def random_base_text(facts: DataFacts) -> BaseText:
    """Return data for random tokens and random weights, for steps that are only timed."""
    text = random_text(facts)
    return BaseText(text.tokens, text.held_out)


def base_text_tokenizer(facts: DataFacts, folder: Path, recipe: Recipe) -> BaseText:
    """Return data of which only the tokenizer can be used.

    The base is opened only if the run trained adapters: otherwise the run's checkpoint has all weights.
    """
    text = text_tokenizer(facts, folder)
    needs_base = job(recipe.objective).adapter(recipe) is not None
    base = open_base(str(recipe.model.base)) if needs_base else None
    return BaseText(text.tokens, None, None, base)


def base_tokenizer(base: Base) -> Tokenizer:
    """Return the base's own tokenizer, as text is read with it."""
    tokenizer = load_tokenizer(str(definition_file(base.folder)))
    tokenizer.name = BASE_TOKENIZER
    return tokenizer


def with_base_tokenizer(data: Data, base: Base) -> Data:
    """Return the section with the file of the base's tokenizer in place of `data.tokenizer=base`."""
    if data.tokenizer != BASE_TOKENIZER:
        return data
    return data.model_copy(update={"tokenizer": str(definition_file(base.folder))})


def own_tokenizer(data: Data, base: Base) -> Data:
    """Return the section with the file of the base's tokenizer, for rows: refuse any other vocabulary than the base's.

    A tokenizer that is trained on the rows never has the base's vocabulary.
    """
    named = with_base_tokenizer(data, base)
    if data.tokenizer != BASE_TOKENIZER:
        other = None if trained_size(data.tokenizer) is not None else load_tokenizer(data.tokenizer)
        _check_vocabulary(other, base_tokenizer(base), base, data)
    return named


def _tokenizer_of_prepared(data: Data) -> str | None:
    """Return the tokenizer.json of the first prepared folder among the sources."""
    folders = [Path(part.source).expanduser() for part in data.parts]
    files = [folder / "tokenizer.json" for folder in folders if holds_tokens(folder)]
    return next((str(file) for file in files if file.is_file()), None)


def _check_vocabulary(tokenizer: Tokenizer | None, own: Tokenizer, base: Base, data: Data) -> None:
    """Raise a UserError unless each id of the tokenizer stands for the same token in the base's own tokenizer."""
    if tokenizer is not None and vocabulary_of(tokenizer) == vocabulary_of(own):
        return
    source = " and ".join(part.source for part in data.parts)
    name = data.tokenizer if data.tokenizer != BASE_TOKENIZER else "another tokenizer"
    what = f"the tokens of {source} are those of {name}, and model.base={base.source} reads another vocabulary."
    fix = "Leave out data.tokenizer and give the text itself, or prepare the text again: "
    fix += f"redline prepare TEXT --out DIR --tokenizer {definition_file(base.folder)}"
    raise UserError(what, where="data.tokenizer", fix=fix)
