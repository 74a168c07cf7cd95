"""finetune: go on with a pretrained model, on prompts and answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.data.chat_template import ANSWERS, ChatTokenizer, load_chat_tokenizer
from redline.data.read_stats import ProgressCallback
from redline.errors import Problem, RecipeError, UserError
from redline.fields import AUTO
from redline.jobs.decoder_objective import InFloat8, scored_alone
from redline.jobs.finetune.costs import adapter_of
from redline.jobs.finetune.data import DROP, AnswerData, Members, PackedSplit, load_answers, packed
from redline.jobs.objective import Answered, Asked, Batch, OnBase, Sample, Sampling
from redline.kernels.cross_entropy import IGNORE
from redline.metrics import perplexity
from redline.models.families import inexact
from redline.models.generate import answer_each, generate
from redline.models.pretrained import Base, fill_frozen, load_base, open_base, random_tensors
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import Model, Recipe

_MARK = "§"  # a question to look at a template with


@dataclass(frozen=True)
class FinetuneData:
    facts: DataFacts
    base: Base | None = None  # None: random weights, for steps that are only timed
    answers: AnswerData | None = None
    held_out: PackedSplit | None = None  # what evaluation reads

    @property
    def told(self) -> list[str]:
        return [] if self.answers is None else self.answers.report.lines()

    def row_keys(self, *, trained: bool) -> list[int] | None:
        """One key per row to train on, or per row that is evaluated."""
        to_train = None if self.answers is None else self.answers.train
        split = to_train if trained else self.held_out
        return None if split is None else split.samples.keys


def complete(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    """The recipe with the shape of its base, which it may also state itself, but not differently."""
    base = open_base(str(recipe.model.base), say)
    fields = Model.model_fields
    given = {key: getattr(recipe.model, key) for key in base.model}
    differing = {
        key: value for key, value in given.items() if value not in (AUTO, fields[key].default, base.model[key])
    }
    if differing:
        found = [
            Problem(f"model.{key}", f"{value} is not the base's {base.model[key]}.", "Leave it out.")
            for key, value in differing.items()
        ]
        raise RecipeError(str(recipe.model.base), found)
    if recipe.data.seq_len > base.context:
        what = f"{recipe.data.seq_len} is longer than the {base.context} that {base.source} was made for."
        raise RecipeError("recipe", [Problem("data.seq_len", what, f"Use at most {base.context}.")])
    if base.model["tied"] and recipe.train.head_lr not in (AUTO, recipe.train.embedding_lr):
        what = "does nothing: the head of this base is its embedding."
        raise RecipeError("recipe", [Problem("train.head_lr", what, "Use train.embedding_lr.")])
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={**base.model, "size": None})})


def load_data(
    recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
) -> FinetuneData:
    """The recipe's rows as packed sequences; all of them are held out when nothing is trained."""
    base = open_base(str(recipe.model.base))
    options: Any = recipe.finetune  # type: ignore[attr-defined]
    answers = load_answers(
        recipe.data,
        folder=base.folder,
        seq_len=recipe.data.seq_len,
        pack=recipe.data.pack,
        learn=options.learn,
        overlong=options.overlong,
        template=options.template,
        seed=recipe.train.seed,
        val_fraction=0.0 if for_evaluation else recipe.data.val_fraction,
        progress=progress,
    )
    return FinetuneData(answers.facts, base, answers, answers.train if for_evaluation else answers.val)


def random_data(facts: DataFacts) -> FinetuneData:
    """As if such data, and such a base, were there."""
    return FinetuneData(facts)


def tokenizer_alone(facts: DataFacts, folder: Path, recipe: Recipe) -> FinetuneData:
    """For a model that only writes."""
    return FinetuneData(facts, open_base(str(recipe.model.base)))


class Finetune(InFloat8):
    can_answer = True
    rereads = True

    def __init__(self, resolved: Resolved, data: FinetuneData) -> None:
        super().__init__(resolved)
        self.data, self.adapter = data, adapter_of(self.recipe)
        self.base_learns = self.adapter is None

    def identity(self) -> dict[str, str]:
        base, tokenizer = self.data.base, self.tokenizer
        if base is None or tokenizer is None:
            return {}
        return {"base": base.fingerprint, "template": tokenizer.identity}

    # --- building

    def build(self, device: torch.device) -> None:
        """A frozen base is read into its place; a model that learns whole begins with it."""
        self.device = device
        if self.adapter is None:
            self.model = self.decoder().to(device)
            self._begin_whole()
            return
        with torch.device("meta"):
            self.model = self.decoder()
        base = self.data.base
        fill_frozen(
            self.model,
            random_tensors(self.model, device) if base is None else base.tensors(),
            self.adapter,
            lora=self.recipe.model.lora,
            device=device,
            generator=torch.Generator().manual_seed(self.recipe.train.seed),
        )
        self.use_float8()

    def _begin_whole(self) -> None:
        if self.data.base is None:
            self.model.initialise(torch.Generator().manual_seed(self.recipe.train.seed))
        else:
            load_base(self.model, self.data.base)

    @property
    def replayable(self) -> bool:
        """The seed of an adapter's dropout is drawn for each pass; a recorded one would be drawn once."""
        return super().replayable and (self.adapter is None or self.recipe.model.lora.dropout == 0)

    # --- training

    def batch(self, samples: np.ndarray) -> Batch:
        assert self.data.answers is not None
        return self._packed(self.data.answers.batch(samples))

    def _packed(self, rows: dict[str, np.ndarray]) -> Batch:
        batch = self.laid_out(rows["inputs"], rows["targets"], rows["documents"])
        return batch if self.recorded else scored_alone(batch)

    def worst_batch(self, micro: int) -> Batch:
        chance, shape = np.random.default_rng(0), (micro, self.seq_len)
        tokens = chance.integers(0, self.data.facts.vocab_size, (2, *shape), dtype=np.int64)
        return self._packed({"inputs": tokens[0], "targets": tokens[1], "documents": np.zeros(shape, dtype=np.int32)})

    # --- looking

    @torch.no_grad()
    def evaluate(self, micro: int) -> dict[str, float | None]:
        """Over all that is learnt in the held-out sequences, unless `eval.sequences` ends it earlier."""
        split = self.data.held_out
        if split is None or len(split) == 0:
            return {"loss": None, "perplexity": None}
        count = min(len(split), self.recipe.eval.sequences)
        total, tokens = torch.zeros((), dtype=torch.float64, device=self.device), 0
        self.model.eval()
        with self.uncompiled():
            for first in range(0, count, micro):
                batch = self._packed(split.rows(np.arange(first, min(first + micro, count))))
                tokens += int((batch["targets"] != IGNORE).sum())
                total += self.loss({k: v.to(self.device) for k, v in batch.items()})["cross_entropy"].sum
        self.model.train()
        loss = total.item() / max(1, tokens)
        return {"loss": loss, "perplexity": perplexity(loss)}

    def first_prompt(self) -> str:
        """The first held-out question; "" where prompts are learnt too, for then a row has no question apart."""
        found = self.data.answers
        if found is None:
            return ""
        split = found.train if self.data.held_out is None else self.data.held_out
        return next((self._asked(one.prompt) for one in found.questions(split, 1)), "")

    def _asked(self, prompt: list[int]) -> str:
        """The question of a prompt, without the template's marks."""
        assert self.tokenizer is not None
        marked = self.tokenizer.decode(self.tokenizer.encode(_MARK), special=False)
        before, _, behind = marked.partition(_MARK)
        return self.tokenizer.decode(prompt, special=False).removeprefix(before).removesuffix(behind)

    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        """The answer to a prompt, as its template puts it; without one, the text that follows it."""
        tokenizer = self.tokenizer
        return self._written(tokenizer, prompt, tokenizer.encode(prompt), how) if tokenizer and prompt else []

    def continuation(self, prompt: str, how: Sampling) -> list[Sample]:
        """The text that follows a prompt without a template."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return []
        bare = tokenizer.encode_bare(prompt)
        return self._written(tokenizer, prompt, bare, how, follows=True) if bare else []

    def _written(
        self, tokenizer: ChatTokenizer, prompt: str, start: list[int], how: Sampling, *, follows: bool = False
    ) -> list[Sample]:
        """What `follows` is decoded behind its beginning: a text's first space is none of its own."""
        base = self.data.base
        if base is not None and len(start) + how.tokens > base.context:
            what = f"the prompt has {len(start):,} tokens and {how.tokens:,} are to follow"
            self.log(f"{what}: more than the {base.context:,} that {base.source} was made for")
        self.model.eval()
        rows = generate(
            self.model,
            start,
            stop=tokenizer.eos_ids,
            vocab=self.data.facts.vocab_size,
            **vars(how),
        )
        self.model.train()
        before = start if follows else []
        given = len(tokenizer.decode(before, special=False)) if before else 0
        return [Sample(prompt, tokenizer.decode([*before, *row], special=False)[given:]) for row in rows]

    def narrow(self, count: int | None) -> None:
        """Half an answer is no reference: what was cut is left out."""
        if self.data.answers is None or self.data.held_out is None:
            return
        found, split = self._examined()
        chosen = split.samples.take(_uncut(split.samples)[:count])
        longest = int(chosen.length.max(initial=self.seq_len))
        again = packed(chosen, longest, pack=self.recipe.data.pack, seed=None, group=0)
        self.data = replace(self.data, answers=found, held_out=PackedSplit(*again, longest, split.pad))

    def _examined(self) -> tuple[AnswerData, PackedSplit]:
        """The rows that are held out; of data that are only evaluated all that the base can read, in their order,
        however long the run's own sequences are."""
        recipe, base, found, split = self.recipe, self.data.base, self.data.answers, self.data.held_out
        assert base is not None and found is not None and split is not None  # noqa: PT018
        options: Any = recipe.finetune  # type: ignore[attr-defined]
        everything = split is found.train
        if not everything and options.learn == ANSWERS:
            return found, split
        rows = {"seq_len": base.context, "pack": False, "shuffle": False} if everything else {}
        rule = {"learn": ANSWERS, "overlong": DROP if everything else options.overlong}
        changed = {"data": recipe.data.model_copy(update=rows), "finetune": options.model_copy(update=rule)}
        again = load_data(recipe.model_copy(update=changed), for_evaluation=everything)
        assert again.answers is not None and again.held_out is not None  # noqa: PT018
        for source in again.answers.report.sources if everything else ():
            if source.train_samples < source.rows:
                rest = f"{source.overlong:,} are longer than the {base.context:,} tokens that the base reads"
                self.log(f"{source.source}: {source.rows:,} rows, {source.train_samples:,} can be asked; {rest}")
        return again.answers, again.held_out

    def questions(self) -> list[Asked]:
        """The held-out rows up to their first answer."""
        found, split = self.data.answers, self.data.held_out
        if found is None or split is None:
            return []
        asked = found.questions(split, len(split.samples))
        return [Asked(self._asked(one.prompt), one.prompt, one.reference) for one in asked]

    def answer(
        self, asked: Sequence[Asked], tokens: int, told: Callable[[int], None] = lambda _: None
    ) -> list[Answered]:
        tokenizer, base = self.tokenizer, self.data.base
        assert tokenizer is not None
        assert base is not None
        self.model.eval()
        written = answer_each(
            self.model,
            [one.prompt for one in asked],
            tokens=tokens,
            vocab=self.data.facts.vocab_size,
            stop=tokenizer.eos_ids,
            longest=base.context,
            told=told,
        )
        self.model.train()
        return [Answered(tokenizer.decode(one.tokens, special=False), one.ended) for one in written]

    @cached_property
    def tokenizer(self) -> ChatTokenizer | None:
        if self.data.answers is not None:
            return self.data.answers.tokenizer
        options: Any = self.recipe.finetune  # type: ignore[attr-defined]
        return None if self.data.base is None else load_chat_tokenizer(self.data.base.folder, options.template)


def _uncut(samples: Members) -> np.ndarray:
    """Places of the samples that are there to their end."""
    lengths = [store.lengths for store in samples.stores]
    whole = [lengths[part][number] for part, number in zip(samples.part, samples.number, strict=True)]
    return np.flatnonzero(samples.length == np.array(whole))


create = Finetune


def can_answer(recipe: Recipe) -> bool:
    return True


def export(recipe: Recipe, tensors: dict[str, Tensor], **_: Any) -> OnBase:
    """What there is to write; with the base it becomes an adapter's folder or a whole model's."""
    options: Any = recipe.finetune  # type: ignore[attr-defined]
    if recipe.model.softcap is not None:
        raise UserError(" ".join(problem.line() for problem in inexact(recipe.model)))
    return OnBase(
        base=str(recipe.model.base),
        method=options.method,
        adapter=adapter_of(recipe),
        lora=recipe.model.lora,
        template=options.template,
        tensors=tensors,
    )
