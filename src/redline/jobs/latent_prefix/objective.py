"""The objective of latent_prefix: train latents of a text, through frozen models, so that these answer from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from redline.data.sources import ProgressCallback
from redline.errors import UserError
from redline.fields import AUTO
from redline.jobs.latent_prefix.costs import WORDS, PrefixShape, needs_teacher, prefix_length
from redline.jobs.latent_prefix.data import (
    PAD,
    LatentData,
    Pair,
    PairRows,
    RowLengths,
    byte_rows,
    complete,
    cut_bytes,
    frozen_models,
    load_data,
    open_models,
    options_of,
    separate,
    unrelated_pairs,
)
from redline.jobs.latent_prefix.encoder import PrefixModel, mean_cosine, token_loss, word_loss
from redline.jobs.latent_prefix.frozen import FrozenModel, FrozenSpec, Scores, build_frozen, choose_attention, score
from redline.jobs.latent_prefix.teacher import TeacherStates, load_teacher, text_prompt
from redline.jobs.objective import (
    CHOSEN_AT_START,
    Answer,
    AnswerEvaluation,
    Batch,
    CodeModel,
    JobRuntime,
    Log,
    Objective,
    ParamGroup,
    Sample,
    Sampling,
    Term,
    perplexity,
    role_groups,
)
from redline.jobs.preview import SamplePreview, SampleView, TokenRun
from redline.jobs.streaming import TEXT, Ask, Choice, Event, HeatMap, Panel, Section
from redline.jobs.token_stream import stream_tokens
from redline.kernels.attention import Selection
from redline.kernels.cross_entropy import IGNORE
from redline.kernels.matmul import DTYPES
from redline.models.decoder import Decoder
from redline.models.generate import Pick, continue_embeddings, generate, greedy_answers, sampler
from redline.planning.shapes import DecoderShape
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import Recipe

# ----------------------------------------------------------------------------------------------------
# Loss terms, all computed from one teacher-forced pass over the answer.
#
# ce        CE: −log p of the answer's tokens, its end included
# first     CE_first: −log p of its first token, × clamp(sg[CE_first / mean CE of the answer], 1, 8) per example
# k         CE_K: −log p of its first K tokens
# kd        KD_K: τ²·KL(teacher ‖ student) at these K positions; the teacher is the same model reading the text itself
# match     ‖student − teacher‖² / ‖teacher‖² of the last hidden states at these positions


def token_losses(logits_BAV: Tensor, targets_BA: Tensor) -> Tensor:
    """Return −log p [B, A]; 0 where there is no target."""
    losses = F.cross_entropy(logits_BAV.flatten(0, 1), targets_BA.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view(targets_BA.shape)


def first_losses(losses_BA: Tensor, targets_BA: Tensor, clamp: float) -> Tensor:
    """Return CE_first [B]; it counts more where the first token is predicted worse than the answer on average.

    The factor is detached: it weights examples and is not itself minimised.
    """
    mean = losses_BA.sum(1) / (targets_BA != IGNORE).sum(1).clamp_min(1)
    first = losses_BA[:, 0]
    return first * (first / mean.clamp_min(1e-6)).detach().clamp(1.0, clamp)


def kd_losses(student_BKV: Tensor, teacher_BKV: Tensor, valid_BK: Tensor, tau: float) -> Tensor:
    """Return τ²·KL(teacher ‖ student) [B, K]; τ² keeps the gradient's scale independent of the temperature."""
    student, teacher = ((logits / tau).log_softmax(-1) for logits in (student_BKV, teacher_BKV))
    return tau**2 * F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1) * valid_BK


def state_losses(student_BKD: Tensor, teacher_BKD: Tensor, valid_BK: Tensor) -> Tensor:
    """Return the squared distance of the hidden states [B, K], relative to the teacher's squared norm."""
    student, teacher = student_BKD.float(), teacher_BKD.float()
    return (student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp_min(1e-6) * valid_BK


def answer_losses(
    decoder: Decoder,
    hidden_BAD: Tensor,
    targets_BA: Tensor,
    teacher_BKD: Tensor | None,
    *,
    k: int,
    clamp: float,
    tau: float,
    kd: bool,
    match: bool,
) -> dict[str, Tensor]:
    """Return the sum of each loss term for each row [B], not yet divided by a number of tokens or rows."""
    logits = decoder.logits(hidden_BAD)
    losses = token_losses(logits, targets_BA)
    sums = {"ce": losses.sum(1), "first": first_losses(losses, targets_BA, clamp), "k": losses[:, :k].sum(1)}
    if teacher_BKD is not None:
        first = min(k, hidden_BAD.shape[1])
        valid, teacher = targets_BA[:, :first] != IGNORE, teacher_BKD[:, :first]
        if kd:
            teacher_logits = decoder.logits(teacher.to(hidden_BAD.dtype)).detach()
            sums["kd"] = kd_losses(logits[:, :first], teacher_logits, valid, tau).sum(1)
        if match:
            sums["match"] = state_losses(hidden_BAD[:, :first], teacher, valid).sum(1)
    return sums


# ----------------------------------------------------------------------------------------------------
# Answers of frozen models: from latents, and from the text itself.


_ANSWER_BATCH = 64


def context_length(model: FrozenModel) -> int:
    assert model.spec.base is not None
    return model.spec.base.context


def answer_from_latents(
    objective: LatentPrefix,
    name: str,
    z_BMD: torch.Tensor,
    tokens: int,
    pick: Pick | None = None,
    asked: Sequence[str] | None = None,
) -> list[Answer]:
    """Return one model's answers to latents, and to the questions `asked` apart from them; greedy without `pick`."""
    model, answers = objective.frozen[name], dict[int, Answer]()
    tokenizer = model.tokenizer
    assert tokenizer is not None
    questions = [tokenizer.question(one) for one in asked or [""] * len(z_BMD)]
    for length in sorted({len(one) for one in questions}):
        same = torch.tensor([row for row, one in enumerate(questions) if len(one) == length])
        for some in same.split(_ANSWER_BATCH):
            question = torch.tensor([questions[row] for row in some.tolist()], device=z_BMD.device) if length else None
            start = model.start(objective.model.prefix(name, z_BMD[some.to(z_BMD.device)]), question)
            rows = continue_embeddings(
                model.decoder, start, tokens=tokens, vocab=model.vocab, stop=tokenizer.eos_ids, pick=pick
            )
            written = [Answer(tokenizer.decode(row.tokens), row.ended) for row in rows]
            answers |= dict(zip(some.tolist(), written, strict=True))
    return [answers[row] for row in range(len(z_BMD))]


def answer_from_prompts(model: FrozenModel, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
    """Return one model's greedy answers to prompts of tokens."""
    assert model.tokenizer is not None
    rows = greedy_answers(
        model.decoder,
        prompts,
        tokens=tokens,
        vocab=model.vocab,
        stop=model.tokenizer.eos_ids,
        longest=context_length(model),
    )
    return [Answer(model.tokenizer.decode(row.tokens), row.ended) for row in rows]


@torch.no_grad()
def sample_answers(objective: LatentPrefix, text: str, how: Sampling) -> list[Sample]:
    """Return, for each model, `how.count` answers from the latents, each beside an answer from the text."""
    context, asked = objective.separate(text)
    latents, samples = objective.encode([context] * how.count), []
    options: Any = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
    for name, one in objective.frozen.items():
        assert one.tokenizer is not None
        pick = sampler(objective.device, seed=how.seed, **options)
        from_latents = answer_from_latents(objective, name, latents[name], how.tokens, pick, [asked] * how.count)
        room = max(1, min(how.tokens, context_length(one) // 2))
        prompt = text_prompt(one, context, context_length(one) - room, asked=asked)
        rows = generate(
            one.decoder,
            prompt,
            count=how.count,
            tokens=room,
            vocab=one.vocab,
            seed=how.seed,
            stop=one.tokenizer.eos_ids,
            **options,
        )
        from_text, title = (one.tokenizer.decode(row) for row in rows), one.spec.title
        samples += [
            Sample(text, f"{title}, from latents: {latent.text}\n{title}, from the text: {plain}")
            for latent, plain in zip(from_latents, from_text, strict=True)
        ]
    return samples


# What a frozen model reads before it answers, in `stream`.
LATENTS, FROM_TEXT, BUDGET, OTHER = "latents", "text", "first M tokens", "another text's latents"
SOURCES = (LATENTS, FROM_TEXT, BUDGET, OTHER)
ALL_SOURCES = "each of these"
_MAP_ROWS, _MAP_COLUMNS = 64, 96


def _heat_map(z_MD: Tensor) -> tuple[tuple[float, ...], ...]:
    """Return the latents as a matrix that fits a page: neighbouring values are averaged if there are more."""
    M, D = z_MD.shape
    size = min(M, _MAP_ROWS), min(D, _MAP_COLUMNS)
    small = F.adaptive_avg_pool2d(z_MD.float()[None, None], size)[0, 0]
    return tuple(tuple(round(value, 4) for value in row) for row in small.tolist())


_EVALUATION_BATCH = 8  # rows per batch of an evaluation, at least


class LatentPrefix(Objective):
    """Trains a PrefixModel through frozen models; the recipe numbers these from "0"."""

    model: PrefixModel
    data: LatentData
    whole_rows = False  # batches are padded to their longest answer, not to data.seq_len

    def __init__(self, resolved: Resolved, data: LatentData) -> None:
        self.resolved, self.recipe, self.data = resolved, resolved.recipe, data
        self.options = options_of(self.recipe)
        self.dtype = DTYPES[self.recipe.train.precision]
        self.selections: dict[str, Selection] = {}
        self.teachers: dict[str, TeacherStates] = {}

    def identity(self) -> dict[str, str]:
        bases, tokenizers = self.data.bases or {}, self.data.tokenizers or {}
        fingerprints = {f"base {name}": base.fingerprint for name, base in bases.items()}
        return fingerprints | {f"tokenizer {name}": one.fingerprint for name, one in tokenizers.items()}

    # --- building

    def build(self, device: torch.device) -> None:
        """Build the frozen models, and the model that is trained; only the latter is saved and averaged."""
        self.device = device
        self.frozen = {spec.name: self._build_frozen(spec) for spec in self._specs()}
        widths = {name: one.decoder.shape.d_model for name, one in self.frozen.items()}
        rms = {name: one.rms for name, one in self.frozen.items()}
        shape = PrefixShape.of(self.options, 1 + len(self.options.others))
        checkpointing = self.recipe.train.grad_checkpointing
        self.model = PrefixModel(shape, widths, rms, dtype=self.dtype, checkpointing=checkpointing).to(device)
        self.model.initialise(self.recipe.train.seed)

    def _specs(self) -> Iterator[FrozenSpec]:
        for name, (source, section) in frozen_models(self.recipe).items():
            base = None if self.data.bases is None else self.data.bases[name]
            stated = self.resolved.shape if name == "0" else DecoderShape(**section.shape) if section.shape else None
            shape = base.shape if base else stated or self.resolved.shape
            yield FrozenSpec(name, source, base, shape, section.quant == "nf4", section.quant_double)

    def _build_frozen(self, spec: FrozenSpec) -> FrozenModel:
        recipe, rows = self.recipe, self.resolved.batch.micro
        # Measured once in the life of a run: `load_state` restores the choice, so a resumed run computes the same.
        if spec.name not in self.selections:
            requested, length = recipe.model.attention, recipe.data.seq_len
            self.selections[spec.name] = (
                Selection("flash", "its backward can be deterministic")
                if recipe.train.deterministic and requested == AUTO
                else choose_attention(requested, spec.shape, rows, length, self.device.type, self.dtype)
            )
        keys = ("rope_theta", "rope_scaling", "norm_eps", "softcap")
        stated = {key: getattr(recipe.model, key) for key in keys}
        return build_frozen(
            spec,
            None if self.data.tokenizers is None else self.data.tokenizers[spec.name],
            device=self.device,
            dtype=self.dtype,
            backend=self.selections[spec.name].backend,
            checkpointing=recipe.train.grad_checkpointing,
            kernels=recipe.model.kernels,
            model=stated if spec.base is None else {**stated, "softcap": None, **spec.base.model},
        )

    def param_groups(self) -> list[ParamGroup]:
        return role_groups(self.model)

    def compile(self) -> None:
        mode = self.recipe.train.compile_mode
        self.model.compile_blocks(mode)
        for one in self.frozen.values():
            one.decoder.compile_blocks(mode)

    def choices(self) -> list[tuple[str, Any, str]]:
        return [
            ("model.attention", one.backend, f"model {name}: {one.reason}") for name, one in self.selections.items()
        ]

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Load the teachers' states before the warm-up, whose batches need them."""
        self._load_teachers()
        yield

    def _load_teachers(self) -> None:
        """Let each teacher read the rows that the run will see, unless its states are in the cache."""
        pairs = self.data.pairs
        if pairs is None or not needs_teacher(self.options):
            return
        steps = self.resolved.horizon_steps
        samples = None if steps is None else (steps + self.skipped_steps) * self.resolved.batch.global_batch
        with self.uncompiled():
            for i, (name, one) in enumerate(self.frozen.items()):
                self.teachers[name] = load_teacher(one, pairs, i, samples, self.options, self.dtype, self.log)

    # --- training

    def batch(self, samples: np.ndarray) -> Batch:
        pairs = self.data.pairs
        assert pairs is not None
        rows = pairs.index.sequences(samples)
        batch = self._tensors(pairs.train, rows)
        for name, teacher in self.teachers.items():
            batch[f"teacher.{name}"] = teacher.states(rows)
        if self.options.fade_steps:
            # A function of the sample number, so that resuming needs no saved state.
            steps = samples // self.resolved.batch.global_batch
            batch["fade"] = torch.from_numpy(np.maximum(0.0, 1.0 - steps / self.options.fade_steps).astype(np.float32))
        return batch

    def _tensors(self, rows: PairRows, numbers: np.ndarray) -> Batch:
        """Return a batch whose targets are named by the models' numbers in the recipe, not by their positions."""
        kinds = ("targets", "asked", "text")
        names = {f"{kind}.{i}": f"{kind}.{name}" for i, name in enumerate(self.frozen) for kind in kinds}
        return {names.get(key, key): torch.from_numpy(array) for key, array in rows.batch(np.asarray(numbers)).items()}

    def worst_batch(self, micro: int) -> Batch:
        rng, lengths = np.random.default_rng(0), self._lengths()
        batch: dict[str, np.ndarray] = {"bytes": rng.integers(0, PAD, (micro, lengths.bytes), dtype=np.int64)}
        for (name, one), longest in zip(self.frozen.items(), lengths.asked, strict=bool(lengths.asked)):
            batch[f"asked.{name}"] = rng.integers(0, one.decoder.shape.vocab, (micro, longest), dtype=np.int64)
        for (name, one), longest in zip(self.frozen.items(), lengths.answers, strict=True):
            shape = one.decoder.shape
            batch[f"targets.{name}"] = rng.integers(0, shape.vocab, (micro, longest), dtype=np.int64)
            if lengths.tokens:
                batch[f"text.{name}"] = rng.integers(0, shape.vocab, (micro, 128), dtype=np.int64)
            if needs_teacher(self.options):
                size = (micro, self.options.first_tokens, shape.d_model)
                batch[f"teacher.{name}"] = rng.standard_normal(size).astype(np.float32)
        if lengths.words:
            batch["words"] = rng.integers(0, WORDS, (micro, 128), dtype=np.int64)
        if self.options.fade_steps:
            batch["fade"] = np.ones(micro, dtype=np.float32)
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def warmup_batches(self, micro: int) -> list[tuple[int, Batch]]:
        """Add the run's first batch, so that its lengths are compiled before step 1: they are the usual ones, which are
        shorter than those of the largest batch."""
        batches = super().warmup_batches(micro)
        if self.recipe.train.compile and self.data.pairs is not None:
            batches.append((micro, self.batch(np.arange(micro))))
        return batches

    def _lengths(self) -> RowLengths:
        if self.data.pairs is not None:
            return self.data.pairs.train.lengths
        room = self.recipe.data.seq_len - prefix_length(self.options)
        answers = tuple(max(2, room - len(one.begin) - len(one.anchor) + 1) for one in self.frozen.values())
        options = self.options
        words, tokens = options.words_weight > 0, options.tokens_weight > 0
        return RowLengths(options.bytes, options.patch, answers, words, tokens=tokens)

    def weights(self, batch: Batch) -> dict[str, float]:
        # `once` divides a term that every micro-batch repeats, so that it counts once per step.
        weights = {"rows": float(len(batch["bytes"])), "once": 1.0}
        for name in self.frozen:
            valid = batch[f"targets.{name}"] != IGNORE
            weights[f"tokens.{name}"] = float(valid.sum())
            weights[f"places.{name}"] = float(valid[:, : self.options.first_tokens].sum())
        return weights

    def loss(self, batch: Batch) -> dict[str, Term]:
        options, share = self.options, 1.0 / len(self.frozen)
        latents = self.model.latents(batch["bytes"])
        fade = batch.get("fade")
        terms: dict[str, Term] = {}
        for name, one in self.frozen.items():
            targets = batch[f"targets.{name}"]
            prefix = self.model.prefix(name, latents[name])
            hidden = one.states(prefix, targets, batch.get(f"asked.{name}"))
            sums = answer_losses(
                one.decoder,
                hidden,
                targets,
                batch.get(f"teacher.{name}"),
                k=options.first_tokens,
                clamp=options.first_clamp,
                tau=options.tau,
                kd=options.kd_weight > 0,
                match=options.match_weight > 0,
            )
            if self.model.words is not None:
                sums["words"] = word_loss(self.model.words, latents[name], batch["words"])
            if options.tokens_weight:
                sums["tokens"] = token_loss(prefix, one.decoder.embedding.weight, batch[f"text.{name}"])
            terms |= {f"{term}_{name}": self._term(term, name, rows, fade, share) for term, rows in sums.items()}
        if options.scale_weight:
            terms["scale"] = Term(self.model.scale_terms(), "once", options.scale_weight * share)
        return terms

    def _term(self, term: str, name: str, rows_B: Tensor, fade_B: Tensor | None, share: float) -> Term:
        options = self.options
        coefficient, weight = {
            "ce": (1.0, f"tokens.{name}"),
            "first": (options.first_weight, "rows"),
            "k": (options.k_weight, f"places.{name}"),
            "kd": (options.kd_weight, f"places.{name}"),
            "match": (options.match_weight, f"places.{name}"),
            "words": (options.words_weight, "rows"),
            "tokens": (options.tokens_weight, "rows"),
        }[term]
        faded = rows_B if fade_B is None or term in ("ce", "first", "k") else rows_B * fade_B
        return Term(faded.sum(), weight, coefficient * share)

    # --- evaluation

    def decoders(self) -> list[Decoder]:
        return [one.decoder for one in self.frozen.values()]

    def uncompiled(self) -> AbstractContextManager[Any]:
        """Return a context in which nothing is compiled: evaluation has too many different lengths."""
        if not self.recipe.train.compile:
            return nullcontext()
        return torch.compiler.set_stance("force_eager")

    @torch.no_grad()
    def evaluate(self, micro: int) -> dict[str, float | None]:
        """Return the mean NLL per answer token as `loss`, averaged over the models, and metrics of each model.

        `other_nll` is the NLL with the latents of an unrelated text. If it equals `nll`, the latents carry nothing of
        their text; `latent_cosine` near 1 shows the same (mode collapse).
        """
        rows = self.data.held_out
        if rows is None or not len(rows):
            return {"loss": None, "perplexity": None, "latent_cosine": None}
        count, size = min(len(rows), self.recipe.eval.sequences), max(_EVALUATION_BATCH, micro)
        batches = [np.arange(first, min(first + size, count)) for first in range(0, count, size)]
        self.model.eval()
        with self.uncompiled():
            parts = [self.model.latents(self._tensors(rows, some)["bytes"].to(self.device)) for some in batches]
            latents = {name: torch.cat([part[name] for part in parts]) for name in self.frozen}
            scores = self._scores(rows, batches, latents)
            other = unrelated_pairs(rows.pairs[:count])
            unrelated = {} if other is None else {name: z[other] for name, z in latents.items()}
            other_scores = self._scores(rows, batches, unrelated) if unrelated else None
        self.model.train()
        metrics: dict[str, float | None] = {}
        for name, sums in scores.items():
            metrics |= {f"{key}_{name}": value for key, value in sums.metrics().items()}
            metrics[f"other_nll_{name}"] = None if other_scores is None else other_scores[name].metrics()["nll"]
        loss = sum(one.metrics()["nll"] for one in scores.values()) / len(scores)
        cosine = mean_cosine(torch.cat(list(latents.values()), 1))
        return {"loss": loss, "perplexity": perplexity(loss), "latent_cosine": cosine, **metrics}

    def _scores(self, rows: PairRows, batches: list[np.ndarray], latents: dict[str, Tensor]) -> dict[str, Scores]:
        """Return the scores of each model's answers to these rows, given the latents."""
        scores = {name: Scores() for name in self.frozen}
        for some in batches:
            batch = self._tensors(rows, some)
            for name, one in self.frozen.items():
                targets, asked = batch[f"targets.{name}"].to(self.device), batch.get(f"asked.{name}")
                question = None if asked is None else asked.to(self.device)
                prefix = self.model.prefix(name, latents[name][some])
                scores[name] += score(one.decoder, one.states(prefix, targets, question), targets)
        return scores

    @torch.no_grad()
    def encode(self, texts: list[str]) -> dict[str, Tensor]:
        """Return the latents of texts for each model."""
        raw, patch = [cut_bytes(text, self.options.bytes) for text in texts], self.options.patch
        size = -(-max(len(one) for one in raw) // patch) * patch
        return self.model.latents(torch.from_numpy(byte_rows(raw, size)).to(self.device))

    def separate(self, text: str) -> tuple[str, str]:
        """Return what the encoder reads of a text, and the question that the model reads apart from it."""
        text = text if text.endswith("\n") else f"{text}\n"
        return (text, "") if self.options.question_aware else separate(text)

    def select_questions(self, count: int | None) -> None:
        if self.data.held_out is not None and count is not None:
            self.data = replace(self.data, held_out=self.data.held_out.first(count))

    def held_out_pairs(self) -> list[Pair]:
        return [] if self.data.held_out is None else self.data.held_out.pairs

    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        """Sample each model's answers from the latents and from the text; without a prompt, of a validation text."""
        text = prompt or next((pair.text + pair.asked for pair in self.held_out_pairs()), "")
        if not text or self.data.tokenizers is None:
            return []
        if (size := len(text.encode("utf-8", "replace"))) > self.options.bytes:
            self.log(f"the text has {size:,} bytes, and the encoder reads {self.options.bytes:,}: the rest is cut off")
        self.model.eval()
        with self.uncompiled():
            samples = sample_answers(self, text, how)
        self.model.train()
        return samples

    def panels(self) -> list[Panel]:
        if self.data.tokenizers is None:
            return []
        names = tuple(one.spec.title for one in self.frozen.values())
        choices = (Choice("model", "Model", names),) if len(names) > 1 else ()
        sources = Choice("source", "Answer from", (*SOURCES, ALL_SOURCES))
        other = (("other", "Another text, for its latents"),)
        return [Panel("latents", "Answer from latents", TEXT, "A text", choices=(sources, *choices), fields=other)]

    @torch.no_grad()
    def stream(self, ask: Ask, how: Sampling) -> Iterator[Event]:
        """Show the text's latents as a heat map, then the answer of one frozen model from each source that is asked."""
        if not ask.text.strip():
            raise UserError("the text is empty.", fix="Write a text.")
        titles = {one.spec.title: name for name, one in self.frozen.items()}
        name = titles.get(ask.choices.get("model", ""), next(iter(self.frozen)))
        asked, other = ask.choices.get("source", LATENTS), ask.fields.get("other", "")
        sources: tuple[str, ...] = (asked,)
        if asked == ALL_SOURCES:
            sources = SOURCES if other.strip() else SOURCES[:-1]
        if OTHER in sources and not other.strip():
            raise UserError("there is no other text.", fix="Write another text, whose latents the model then reads.")
        separated = [self.separate(text) for text in (ask.text, other) if text.strip()]
        z = self.encode([text for text, _ in separated])[name]
        for number, title in enumerate(("Latents of the text", "Latents of the other text")[: len(separated)]):
            yield HeatMap(f"map {number}", title, _heat_map(z[number]))
        for source in sources:
            yield from self._answer(name, separated[0], z, source, ask, how)

    def _answer(
        self, name: str, separated: tuple[str, str], z_BMD: Tensor, source: str, ask: Ask, how: Sampling
    ) -> Iterator[Event]:
        one, (text, asked) = self.frozen[name], separated
        assert one.tokenizer is not None
        context = context_length(one)
        room = context - max(1, min(how.tokens, context // 2))
        prompt: list[int] | Tensor
        if source in (LATENTS, OTHER):
            ids = one.tokenizer.question(asked)
            question = torch.tensor([ids], device=self.device) if ids else None
            prompt = one.start(self.model.prefix(name, z_BMD[:1] if source == LATENTS else z_BMD[1:2]), question)
        else:
            prompt = text_prompt(one, text, room, z_BMD.shape[1] if source == BUDGET else None, asked)
        yield from stream_tokens(
            one.decoder,
            prompt,
            how,
            section=Section(source, f"From {'' if source == OTHER else 'the '}{source}", one.spec.title),
            vocab=one.vocab,
            stop=one.tokenizer.eos_ids,
            text_of=one.tokenizer.decode_unstripped,
            alternatives=ask.alternatives,
            context=context,
        )

    def evaluate_answers(
        self, *, numbers: bool, count: int | None, tokens: int, where: str, progress: Callable[[int, int], None]
    ) -> AnswerEvaluation:
        from redline.jobs.latent_prefix.evaluate import compare  # imports this module

        return compare(self, count=count, tokens=tokens, numbers=numbers, where=where, on_progress=progress)

    # --- checkpoints

    def state(self) -> dict[str, Any]:
        return {"attention": {name: one.backend for name, one in self.selections.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.selections = {name: Selection(backend, CHOSEN_AT_START) for name, backend in state["attention"].items()}


_USAGE = """from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

wire = AutoModel.from_pretrained("PATH-OF-THIS-FOLDER", trust_remote_code=True).eval()
number, about = next(iter(wire.config.frozen.items()))
print(about["name"], about["fingerprint"])  # the frozen model that this prefix was trained for, and no other
tokenizer = AutoTokenizer.from_pretrained("PATH-OF-THE-FROZEN-MODEL")
frozen = AutoModelForCausalLM.from_pretrained("PATH-OF-THE-FROZEN-MODEL").eval()
latents = wire.encode(["The stone is red. Which colour?\\n"])[number]
print(tokenizer.decode(wire.answer(number, frozen, latents, tokens=32)[0]))
"""


class LatentPrefixRuntime(JobRuntime[LatentData]):
    def complete(self, recipe: Recipe, log: Log) -> Recipe:
        return complete(recipe, log)

    def load_data(
        self, recipe: Recipe, *, for_evaluation: bool = False, progress: ProgressCallback | None = None
    ) -> LatentData:
        return load_data(recipe, for_evaluation=for_evaluation, progress=progress)

    def random_data(self, facts: DataFacts) -> LatentData:
        """Return data for random rows and frozen models with random weights."""
        return LatentData(facts)

    def tokenizer_alone(self, facts: DataFacts, folder: Path, recipe: Recipe) -> LatentData:
        return replace(open_models(recipe), facts=facts)

    def create(self, resolved: Resolved, data: LatentData) -> LatentPrefix:
        return LatentPrefix(resolved, data)

    def export(
        self, recipe: Recipe, tensors: dict[str, Tensor], *, eot: Callable[[], int], vocab_size: int, dtype: str
    ) -> CodeModel:
        data, options = open_models(recipe), options_of(recipe)
        assert data.bases is not None
        assert data.tokenizers is not None
        frozen = {}
        for name, (source, section) in frozen_models(recipe).items():
            base, tokenizer = data.bases[name], data.tokenizers[name]
            embedding = next(tensor for key, tensor in base.tensors() if key == "embedding.weight")
            frozen[name] = {
                "name": source.rstrip("/").rpartition("/")[2] if Path(source).expanduser().exists() else source,
                "fingerprint": base.fingerprint,
                "width": base.shape.d_model,
                "rms": float(embedding.to(DTYPES[recipe.train.precision]).float().square().mean().sqrt()),
                "begin": tokenizer.begin,
                "anchor": tokenizer.anchor,
                "stops": list(tokenizer.eos_ids),
                "vocab": min(tokenizer.vocab_size, base.shape.vocab),
                "quant": section.quant,
            }
        identity = {f"base {name}": base.fingerprint for name, base in data.bases.items()}
        config = {
            "architectures": ["RedlineLatent"],
            "model_type": "redline_latent",
            **{name: getattr(options, name) for name in ("d_z", "layers", "heads", "patch", "slots", "private_slots")},
            "most_bytes": options.bytes,
            "frozen": frozen,
        }
        kind = DTYPES[dtype]
        # The head that predicts words only helps in training.
        held = {name: tensor.to(kind) for name, tensor in tensors.items() if not name.startswith("words.")}
        return CodeModel(config, held, "modeling_redline_latent", _USAGE, identity=identity)

    def preview(self, recipe: Recipe, count: int, progress: ProgressCallback | None, log: Log) -> SamplePreview:
        """Return texts with their training answers, and how much of each text the encoder reads."""
        data = self.load_data(self.complete(recipe, log), progress=progress)
        assert data.pairs is not None
        rows, views = data.pairs.train, []
        for number, row in enumerate(data.pairs.index.sequences(np.arange(min(count, len(rows)))).tolist(), start=1):
            pair = rows.pairs[row]
            read, size = cut_bytes(pair.text, rows.lengths.bytes), len(pair.text.encode("utf-8", "replace"))
            cut = "" if len(read) == size else f", of which the first {len(read):,} are read"
            shown = f"{read.decode('utf-8', 'replace')}{pair.asked}".rstrip()
            text = TokenRun(f"{shown}\n→ ", in_loss=False, special=False)
            answer = TokenRun(pair.answers[0], in_loss=True, special=False)
            views.append(SampleView(f"text {number}: {size:,} bytes{cut}", [text, answer]))
        return SamplePreview(views, data.messages)
