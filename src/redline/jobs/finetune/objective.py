"""finetune: train a pretrained model further, on prompts and answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.cache import read_text, write_atomically
from redline.data.chat import SYSTEM, Message
from redline.data.chat_template import ANSWERS, ChatTokenizer, load_chat_tokenizer
from redline.data.sources import ProgressCallback
from redline.errors import UserError
from redline.hardware.device import sum_dtype
from redline.jobs.base import export_problems
from redline.jobs.finetune.data import (
    DROP,
    AnswerData,
    Members,
    PackedSplit,
    load_answers,
    packed,
    preview_samples,
    usual_system_prompt,
)
from redline.jobs.objective import (
    Answer,
    Batch,
    FinetunedModel,
    Log,
    Question,
    Sample,
    Sampling,
    perplexity,
    with_scored_positions,
)
from redline.jobs.pretrained import PretrainedObjective, PretrainedRuntime, trained_on_base
from redline.jobs.preview import SamplePreview
from redline.jobs.streaming import CHAT, QUESTION, TEXT, Ask, Event, Panel, Section
from redline.jobs.token_stream import stream_tokens
from redline.kernels.cross_entropy import IGNORE
from redline.models.generate import generate, greedy_answers
from redline.models.pretrained import Base, open_base
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import Recipe

CHAT_FILE = "chat.json"  # in the run's directory
_MARKER = "§"  # a question whose place in an encoded prompt shows what the chat template puts around questions


@dataclass(frozen=True)
class FinetuneData:
    facts: DataFacts
    base: Base | None = None  # None: random weights, for steps that are only timed
    answers: AnswerData | None = None
    held_out: PackedSplit | None = None  # what evaluation reads
    system: str | None = None  # the system prompt of most training rows

    @property
    def messages(self) -> list[str]:
        return [] if self.answers is None else self.answers.report.lines()

    def row_keys(self, *, trained: bool) -> list[int] | None:
        """Return one key per row to train on, or per row that is evaluated."""
        to_train = None if self.answers is None else self.answers.train
        split = to_train if trained else self.held_out
        return None if split is None else split.samples.keys

    def held_out_sequences(self, seq_len: int) -> None:
        """Return None: the data are rows."""


class Finetune(PretrainedObjective):
    data: FinetuneData
    reloads_rows_for_questions = True

    def __init__(self, resolved: Resolved, data: FinetuneData) -> None:
        super().__init__(resolved, data.base)
        self.data = data

    def identity(self) -> dict[str, str]:
        return super().identity() | ({"template": self.tokenizer.identity} if self.tokenizer is not None else {})

    # --- training

    def batch(self, samples: np.ndarray) -> Batch:
        assert self.data.answers is not None
        return self._packed(self.data.answers.batch(samples))

    def _packed(self, rows: dict[str, np.ndarray]) -> Batch:
        batch = self.laid_out(rows["inputs"], rows["targets"], rows["documents"])
        return batch if self.uniform_layout else with_scored_positions(batch)

    def worst_batch(self, micro: int) -> Batch:
        chance, shape = np.random.default_rng(0), (micro, self.seq_len)
        tokens = chance.integers(0, self.data.facts.vocab_size, (2, *shape), dtype=np.int64)
        return self._packed({"inputs": tokens[0], "targets": tokens[1], "documents": np.zeros(shape, dtype=np.int32)})

    # --- evaluation and sampling

    @torch.no_grad()
    def evaluate(self, micro: int) -> dict[str, float | None]:
        """Score the learnt tokens of the held-out sequences; at most `eval.sequences` of these."""
        split = self.data.held_out
        if split is None or len(split) == 0:
            return {"loss": None, "perplexity": None}
        count = min(len(split), self.recipe.eval.sequences)
        total, tokens = torch.zeros((), dtype=sum_dtype(self.device), device=self.device), 0
        self.model.eval()
        with self.uncompiled():
            for first in range(0, count, micro):
                batch = self._packed(split.rows(np.arange(first, min(first + micro, count))))
                tokens += int((batch["targets"] != IGNORE).sum())
                total += self.evaluated(batch, "cross_entropy")
        self.model.train()
        loss = total.item() / max(1, tokens)
        return {"loss": loss, "perplexity": perplexity(loss)}

    def first_prompt(self) -> str:
        """Return the first held-out question; "" if prompts are learnt too: a row then has no separate question."""
        answers = self.data.answers
        if answers is None:
            return ""
        split = answers.train if self.data.held_out is None else self.data.held_out
        return next((self._question_text(question.prompt) for question in answers.questions(split, 1)), "")

    def _question_text(self, prompt: list[int]) -> str:
        """Decode a prompt without what the chat template puts around a question."""
        assert self.tokenizer is not None
        marked = self.tokenizer.decode(self.tokenizer.encode(_MARKER), special=False)
        before, _, after = marked.partition(_MARKER)
        return self.tokenizer.decode(prompt, special=False).removeprefix(before).removesuffix(after)

    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        """Answer a prompt in the chat template; without a template, continue it."""
        tokenizer = self.tokenizer
        return self._generate(tokenizer, prompt, tokenizer.encode(prompt), how) if tokenizer and prompt else []

    def continuation(self, prompt: str, how: Sampling) -> list[Sample]:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return []
        bare = tokenizer.encode_bare(prompt)
        return self._generate(tokenizer, prompt, bare, how, continues=True) if bare else []

    def _generate(
        self, tokenizer: ChatTokenizer, prompt: str, start: list[int], how: Sampling, *, continues: bool = False
    ) -> list[Sample]:
        base = self.data.base
        if base is not None and len(start) + how.tokens > base.context:
            what = f"the prompt has {len(start):,} tokens and {how.tokens:,} are to follow"
            self.log(f"{what}: more than the {base.context:,} tokens that {base.source} can read")
        self.model.eval()
        rows = generate(
            self.model,
            start,
            stop=tokenizer.eos_ids,
            vocab=self.data.facts.vocab_size,
            **vars(how),
        )
        self.model.train()
        # A continuation is decoded together with its prompt, and the prompt is cut off: decoded alone, a tokenizer may
        # drop the space that the continuation begins with.
        before = start if continues else []
        skipped = len(tokenizer.decode(before, special=False)) if before else 0
        return [Sample(prompt, tokenizer.decode([*before, *row], special=False)[skipped:]) for row in rows]

    def panels(self) -> list[Panel]:
        if self.tokenizer is None:
            return []
        kind = QUESTION if self.tokenizer.template is None else CHAT
        return [
            Panel("chat", "Chat", kind, "A message", system=self.data.system),
            Panel("complete", "Complete", TEXT, "A text to continue", options=("--plain",)),
        ]

    def stream(self, ask: Ask, how: Sampling) -> Iterator[Event]:
        tokenizer, chats = self.tokenizer, ask.panel == "chat"
        assert tokenizer is not None
        prompt = tokenizer.encode_chat(self._with_system(ask.messages)) if chats else tokenizer.encode_bare(ask.text)
        if not prompt:
            raise UserError("the prompt is empty.", fix="Write some text.")
        return stream_tokens(
            self.model,
            prompt,
            how,
            section=Section("answer" if chats else "text"),
            vocab=self.data.facts.vocab_size,
            stop=tokenizer.eos_ids,
            text_of=partial(tokenizer.decode, special=False),
            token_text=tokenizer.decode,
            alternatives=ask.alternatives,
            context=None if self.data.base is None else self.data.base.context,
            continues=not chats,
        )

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Begin with the system prompt of the training rows, unless the conversation has one of its own."""
        if self.data.system is None or any(message.role == SYSTEM for message in messages):
            return messages
        return (Message(SYSTEM, self.data.system), *messages)

    def save_tokenizer(self, folder: Path) -> None:
        """Record the system prompt of the training rows, so that the model is sampled under it without its data."""
        if (system := usual_system_prompt(self.recipe.data)) is not None:
            write_atomically(folder / CHAT_FILE, json.dumps({"system": system}) + "\n")

    def select_questions(self, count: int | None) -> None:
        """Keep the first `count` held-out questions that were not cut: half an answer cannot be a reference."""
        if self.data.answers is None or self.data.held_out is None:
            return
        answers, split = self._rows_to_ask()
        chosen = split.samples.take(_uncut(split.samples)[:count])
        longest = int(chosen.length.max(initial=self.seq_len))
        sequences = packed(chosen, longest, pack=self.recipe.data.pack, seed=None, group=0)
        self.data = replace(self.data, answers=answers, held_out=PackedSplit(*sequences, longest, split.pad))

    def _rows_to_ask(self) -> tuple[AnswerData, PackedSplit]:
        """Return the held-out rows with only their answers learnt, reading them again if necessary.

        Data that are only evaluated are read in their own order, up to the length that the base can read, however short
        the sequences of the run are.
        """
        recipe, base, answers, split = self.recipe, self.data.base, self.data.answers, self.data.held_out
        assert base is not None and answers is not None and split is not None  # noqa: PT018
        options: Any = recipe.finetune  # type: ignore[attr-defined]
        only_evaluated = split is answers.train
        if not only_evaluated and options.learn == ANSWERS:
            return answers, split
        rows = {"seq_len": base.context, "pack": False, "shuffle": False} if only_evaluated else {}
        rule = {"learn": ANSWERS, "overlong": DROP if only_evaluated else options.overlong}
        changed = {"data": recipe.data.model_copy(update=rows), "finetune": options.model_copy(update=rule)}
        reloaded = load_data(recipe.model_copy(update=changed), for_evaluation=only_evaluated)
        assert reloaded.answers is not None and reloaded.held_out is not None  # noqa: PT018
        for source in reloaded.answers.report.sources if only_evaluated else ():
            if source.train_samples < source.rows:
                rest = f"{source.overlong:,} are longer than the {base.context:,} tokens that the base can read"
                self.log(f"{source.source}: {source.rows:,} rows, {source.train_samples:,} can be asked; {rest}")
        return reloaded.answers, reloaded.held_out

    def questions(self) -> list[Question]:
        """Return the held-out rows up to their first answer."""
        answers, split = self.data.answers, self.data.held_out
        if answers is None or split is None:
            return []
        encoded = answers.questions(split, len(split.samples))
        return [Question(self._question_text(one.prompt), one.prompt, one.reference) for one in encoded]

    def answer(
        self, questions: Sequence[Question], tokens: int, progress: Callable[[int], None] = lambda done: None
    ) -> list[Answer]:
        tokenizer, base = self.tokenizer, self.data.base
        assert tokenizer is not None
        assert base is not None
        self.model.eval()
        written = greedy_answers(
            self.model,
            [question.prompt for question in questions],
            tokens=tokens,
            vocab=self.data.facts.vocab_size,
            stop=tokenizer.eos_ids,
            longest=base.context,
            progress=progress,
        )
        self.model.train()
        return [Answer(tokenizer.decode(row.tokens, special=False), row.ended) for row in written]

    @cached_property
    def tokenizer(self) -> ChatTokenizer | None:
        if self.data.answers is not None:
            return self.data.answers.tokenizer
        options: Any = self.recipe.finetune  # type: ignore[attr-defined]
        return None if self.data.base is None else load_chat_tokenizer(self.data.base.folder, options.template)


def _uncut(samples: Members) -> np.ndarray:
    """Return the indices of the samples with a question that were kept to their end."""
    lengths = [store.lengths for store in samples.stores]
    stored = [lengths[part][number] for part, number in zip(samples.part, samples.number, strict=True)]
    return np.flatnonzero((samples.length == np.array(stored)) & ~samples.is_text)


class FinetuneRuntime(PretrainedRuntime[FinetuneData]):
    def load_data(
        self, recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
    ) -> FinetuneData:
        return load_data(recipe, for_evaluation=for_evaluation, progress=progress)

    def random_data(self, facts: DataFacts) -> FinetuneData:
        """Return data for random tokens and a base with random weights."""
        return FinetuneData(facts)

    def tokenizer_alone(self, facts: DataFacts, folder: Path, recipe: Recipe) -> FinetuneData:
        return FinetuneData(facts, open_base(str(recipe.model.base)), system=_recorded_system(folder, recipe))

    def create(self, resolved: Resolved, data: FinetuneData) -> Finetune:
        return Finetune(resolved, data)

    def preview(self, recipe: Recipe, count: int, progress: ProgressCallback | None, log: Log) -> SamplePreview:
        answers = self.load_data(self.complete(recipe, log), progress=progress).answers
        assert answers is not None
        return SamplePreview(preview_samples(answers, count), answers.report.details())

    def export(
        self, recipe: Recipe, tensors: dict[str, Tensor], *, eot: Callable[[], int], vocab_size: int, dtype: str
    ) -> FinetunedModel:
        options: Any = recipe.finetune  # type: ignore[attr-defined]
        if recipe.model.softcap is not None:
            raise UserError(" ".join(problem.line() for problem in export_problems(recipe.model)))
        return trained_on_base(recipe, tensors, learn=options.learn, template=options.template)


def _recorded_system(folder: Path, recipe: Recipe) -> str | None:
    """Return the system prompt of the training rows: as the run recorded it, else from the rows if they are here."""
    try:
        found = json.loads(read_text(folder / CHAT_FILE))["system"]
    except FileNotFoundError:
        return usual_system_prompt(recipe.data)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def load_data(
    recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
) -> FinetuneData:
    """Read the recipe's rows as packed sequences. With `for_evaluation` nothing is trained, and all are held out."""
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
