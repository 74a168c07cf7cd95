"""latent_prefix: latents of a text that frozen models answer from, trained through them."""

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

from redline.data.read_stats import ProgressCallback
from redline.fields import AUTO
from redline.jobs.decoder_objective import CHOSEN_AT_START, role_groups
from redline.jobs.latent_prefix.costs import WORDS, WireShape, slots_read, taught
from redline.jobs.latent_prefix.data import (
    PAD,
    LatentData,
    Lengths,
    Pair,
    Rows,
    byte_rows,
    complete,
    cut_bytes,
    load_data,
    open_models,
    options_of,
    strangers,
    wanted,
)
from redline.jobs.latent_prefix.encoder import Wire, cosine, word_loss
from redline.jobs.latent_prefix.frozen import Frozen, Scores, Spec, build_frozen, choose_attention, score
from redline.jobs.latent_prefix.teacher import TeacherStates, read_all, text_prompt
from redline.jobs.objective import (
    Answer,
    AnswerReport,
    Batch,
    JobRuntime,
    Log,
    Objective,
    ParamGroup,
    Sample,
    Sampling,
    Term,
)
from redline.jobs.preview import SamplePreview, SampleView, TokenRun
from redline.kernels.attention import Selection
from redline.kernels.cross_entropy import IGNORE
from redline.kernels.matmul import DTYPES
from redline.metrics import perplexity
from redline.models.decoder import Decoder
from redline.models.generate import answer_each, generate, write_after
from redline.planning.shapes import DecoderShape
from redline.recipe.resolve import DataFacts, Resolved
from redline.recipe.schema import Recipe

# ----------------------------------------------------------------------------------------------------
# What a latent prefix is trained by: every term comes from one pass over the answer.
#
# ce        −log p of the answer's tokens, its end included
# first     of its first token, × clamp(first / mean of the answer, 1, 8) without a gradient, example by example
# k         of its first K tokens
# kd        τ²·KL(teacher ‖ student) at those K places; the teacher is the same model, reading the text itself
# match     ‖student − teacher‖² / ‖teacher‖², of the last states at those places


def token_losses(logits_BAV: Tensor, targets_BA: Tensor) -> Tensor:
    """−log p [B, A]; 0 where there is no target."""
    losses = F.cross_entropy(logits_BAV.flatten(0, 1), targets_BA.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view(targets_BA.shape)


def first_losses(losses_BA: Tensor, targets_BA: Tensor, clamp: float) -> Tensor:
    """[B]; each counts more where the first token is worse than the answer as a whole."""
    mean = losses_BA.sum(1) / (targets_BA != IGNORE).sum(1).clamp_min(1)
    first = losses_BA[:, 0]
    return first * (first / mean.clamp_min(1e-6)).detach().clamp(1.0, clamp)


def distances(student_BKV: Tensor, teacher_BKV: Tensor, there_BK: Tensor, tau: float) -> Tensor:
    """τ²·KL [B, K]."""
    ours, theirs = ((logits / tau).log_softmax(-1) for logits in (student_BKV, teacher_BKV))
    return tau**2 * F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1) * there_BK


def mismatches(student_BKD: Tensor, teacher_BKD: Tensor, there_BK: Tensor) -> Tensor:
    """[B, K], relative to the teacher's size."""
    ours, theirs = student_BKD.float(), teacher_BKD.float()
    return (ours - theirs).square().sum(-1) / theirs.square().sum(-1).clamp_min(1e-6) * there_BK


def answer_terms(
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
    """Each term for each row [B], not yet divided by anything."""
    logits = decoder.logits(hidden_BAD)
    losses = token_losses(logits, targets_BA)
    found = {"ce": losses.sum(1), "first": first_losses(losses, targets_BA, clamp), "k": losses[:, :k].sum(1)}
    if teacher_BKD is not None:
        places = min(k, hidden_BAD.shape[1])
        there, teacher = targets_BA[:, :places] != IGNORE, teacher_BKD[:, :places]
        if kd:
            aim = decoder.logits(teacher.to(hidden_BAD.dtype)).detach()
            found["kd"] = distances(logits[:, :places], aim, there, tau).sum(1)
        if match:
            found["match"] = mismatches(hidden_BAD[:, :places], teacher, there).sum(1)
    return found


# ----------------------------------------------------------------------------------------------------
# Answers of frozen models: from latents, and from the text itself.


_PROMPTS_AT_ONCE = 64


def context_of(model: Frozen) -> int:
    assert model.spec.base is not None
    return model.spec.base.context


def from_latents(job: LatentPrefix, name: str, z_BMD: torch.Tensor, tokens: int, **how: Any) -> list[Answer]:
    """The likeliest answer to each, unless `how` says otherwise."""
    one, found = job.frozen[name], []
    assert one.reader is not None
    for some in z_BMD.split(_PROMPTS_AT_ONCE):
        start = one.start(job.model.prefix(name, some))
        made = write_after(one.decoder, start, tokens=tokens, vocab=one.vocab, stop=one.reader.eos_ids, **how)
        found += [Answer(one.reader.decode(row.tokens), row.ended) for row in made]
    return found


def from_prompts(model: Frozen, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
    assert model.reader is not None
    made = answer_each(
        model.decoder,
        prompts,
        tokens=tokens,
        vocab=model.vocab,
        stop=model.reader.eos_ids,
        longest=context_of(model),
    )
    return [Answer(model.reader.decode(row.tokens), row.ended) for row in made]


@torch.no_grad()
def written(job: LatentPrefix, text: str, how: Sampling) -> list[Sample]:
    """For each model `how.count` answers from latents, each beside one from the text."""
    latents, found = job.encoded([text] * how.count), []
    options = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p}
    for name, one in job.frozen.items():
        assert one.reader is not None
        generator = torch.Generator(device=job.device).manual_seed(how.seed)
        said = from_latents(job, name, latents[name], how.tokens, generator=generator, **options)
        room = max(1, min(how.tokens, context_of(one) // 2))
        prompt = text_prompt(one, text, context_of(one) - room)
        read = generate(
            one.decoder,
            prompt,
            count=how.count,
            tokens=room,
            vocab=one.vocab,
            seed=how.seed,
            stop=one.reader.eos_ids,
            **options,  # type: ignore[arg-type]
        )
        found += [
            Sample(text, f"{one.spec.title}, from latents: {latent.text}\n{one.spec.title}, from the text: {plain}")
            for latent, plain in zip(said, (one.reader.decode(row) for row in read), strict=True)
        ]
    return found


_AT_ONCE = 8  # rows of an evaluation, at least: each is also read with another's latents


class LatentPrefix(Objective):
    model: Wire
    data: LatentData
    whole_rows = False  # a batch ends with its longest answer

    def __init__(self, resolved: Resolved, data: LatentData) -> None:
        self.resolved, self.recipe, self.data = resolved, resolved.recipe, data
        self.options = options_of(self.recipe)
        self.dtype = DTYPES[self.recipe.train.precision]
        self.selections: dict[str, Selection] = {}
        self.teachers: dict[str, TeacherStates] = {}

    def identity(self) -> dict[str, str]:
        bases, readers = self.data.bases or {}, self.data.readers or {}
        named = {f"base {name}": base.fingerprint for name, base in bases.items()}
        return named | {f"tokenizer {name}": reader.fingerprint for name, reader in readers.items()}

    # --- building

    def build(self, device: torch.device) -> None:
        """The frozen models are no part of what is trained, saved or averaged."""
        self.device = device
        self.frozen = {spec.name: self._frozen(spec) for spec in self._specs()}
        widths = {name: one.decoder.shape.d_model for name, one in self.frozen.items()}
        rms = {name: one.rms for name, one in self.frozen.items()}
        shape, again = WireShape.of(self.options, 1 + len(self.options.others)), self.recipe.train.grad_checkpointing
        self.model = Wire(shape, widths, rms, dtype=self.dtype, checkpointing=again).to(device)
        self.model.initialise(self.recipe.train.seed)

    def _specs(self) -> Iterator[Spec]:
        for name, (source, kept) in wanted(self.recipe).items():
            base = None if self.data.bases is None else self.data.bases[name]
            stated = self.resolved.shape if name == "0" else DecoderShape(**kept.shape) if kept.shape else None
            shape = base.shape if base else stated or self.resolved.shape
            yield Spec(name, source, base, shape, kept.quant == "nf4", kept.quant_double)

    def _frozen(self, spec: Spec) -> Frozen:
        recipe, rows = self.recipe, self.resolved.batch.micro
        if spec.name not in self.selections:  # measured once in a run's life
            asked, length = recipe.model.attention, recipe.data.seq_len
            self.selections[spec.name] = (
                Selection("flash", "its backward can be deterministic")
                if recipe.train.deterministic and asked == AUTO
                else choose_attention(asked, spec.shape, rows, length, self.device.type, self.dtype)
            )
        keys = ("rope_theta", "rope_scaling", "norm_eps", "softcap")
        own = {key: getattr(recipe.model, key) for key in keys}
        return build_frozen(
            spec,
            None if self.data.readers is None else self.data.readers[spec.name],
            device=self.device,
            dtype=self.dtype,
            backend=self.selections[spec.name].backend,
            checkpointing=recipe.train.grad_checkpointing,
            kernels=recipe.model.kernels,
            model=own if spec.base is None else {**own, "softcap": None, **spec.base.model},
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
        self._teach()
        yield

    def _teach(self) -> None:
        """Before the first step the teachers read what the run will see of the data, unless they have already."""
        pairs = self.data.pairs
        if pairs is None or not taught(self.options):
            return
        steps = self.resolved.horizon_steps
        seen = None if steps is None else (steps + self.skipped_steps) * self.resolved.batch.global_batch
        with self.uncompiled():
            for place, (name, one) in enumerate(self.frozen.items()):
                self.teachers[name] = read_all(one, pairs, place, seen, self.options, self.dtype, self.log)

    # --- training

    def batch(self, samples: np.ndarray) -> Batch:
        pairs = self.data.pairs
        assert pairs is not None
        rows = pairs.index.sequences(samples)
        found = self._tensors(pairs.train, rows)
        for name, states in self.teachers.items():
            found[f"teacher.{name}"] = states.take(rows)
        if self.options.fade_steps:
            steps = samples // self.resolved.batch.global_batch
            found["fade"] = torch.from_numpy(np.maximum(0.0, 1.0 - steps / self.options.fade_steps).astype(np.float32))
        return found

    def _tensors(self, rows: Rows, numbers: np.ndarray) -> Batch:
        """With the targets under the models' own numbers."""
        taken = rows.take(np.asarray(numbers))
        places = {f"targets.{place}": f"targets.{name}" for place, name in enumerate(self.frozen)}
        return {places.get(key, key): torch.from_numpy(array) for key, array in taken.items()}

    def worst_batch(self, micro: int) -> Batch:
        chance, lengths = np.random.default_rng(0), self._lengths()
        batch: dict[str, np.ndarray] = {"bytes": chance.integers(0, PAD, (micro, lengths.bytes), dtype=np.int64)}
        for (name, one), longest in zip(self.frozen.items(), lengths.answers, strict=True):
            shape = one.decoder.shape
            batch[f"targets.{name}"] = chance.integers(0, shape.vocab, (micro, longest), dtype=np.int64)
            if taught(self.options):
                size = (micro, self.options.first_tokens, shape.d_model)
                batch[f"teacher.{name}"] = chance.standard_normal(size).astype(np.float32)
        if lengths.words:
            batch["words"] = chance.integers(0, WORDS, (micro, 128), dtype=np.int64)
        if self.options.fade_steps:
            batch["fade"] = np.ones(micro, dtype=np.float32)
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def warmup_batches(self, micro: int) -> list[tuple[int, Batch]]:
        """The run's first batch too: most are as long, and shorter than the longest; each length is compiled."""
        found = super().warmup_batches(micro)
        usual = self.recipe.train.compile and self.data.pairs is not None
        return [*found, (micro, self.batch(np.arange(micro)))] if usual else found

    def _lengths(self) -> Lengths:
        if self.data.pairs is not None:
            return self.data.pairs.train.lengths
        room = self.recipe.data.seq_len - slots_read(self.options)
        rooms = tuple(max(2, room - len(one.begin) - len(one.anchor) + 1) for one in self.frozen.values())
        return Lengths(self.options.bytes, self.options.patch, rooms, self.options.words_weight > 0)

    def weights(self, batch: Batch) -> dict[str, float]:
        found = {"rows": float(len(batch["bytes"])), "once": 1.0}  # what needs no data counts once in a step
        for name in self.frozen:
            there = batch[f"targets.{name}"] != IGNORE
            found[f"tokens.{name}"] = float(there.sum())
            found[f"places.{name}"] = float(there[:, : self.options.first_tokens].sum())
        return found

    def loss(self, batch: Batch) -> dict[str, Term]:
        options, share = self.options, 1.0 / len(self.frozen)
        latents = self.model.latents(batch["bytes"])
        fade = batch.get("fade")
        found: dict[str, Term] = {}
        for name, one in self.frozen.items():
            targets = batch[f"targets.{name}"]
            hidden = one.states(self.model.prefix(name, latents[name]), targets)
            rows = answer_terms(
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
                rows["words"] = word_loss(self.model.words, latents[name], batch["words"])
            found |= {f"{term}_{name}": self._term(term, name, sums, fade, share) for term, sums in rows.items()}
        if options.scale_weight:
            found["scale"] = Term(self.model.scale_terms(), "once", options.scale_weight * share)
        return found

    def _term(self, term: str, name: str, rows_B: Tensor, fade_B: Tensor | None, share: float) -> Term:
        options = self.options
        coefficient, weight = {
            "ce": (1.0, f"tokens.{name}"),
            "first": (options.first_weight, "rows"),
            "k": (options.k_weight, f"places.{name}"),
            "kd": (options.kd_weight, f"places.{name}"),
            "match": (options.match_weight, f"places.{name}"),
            "words": (options.words_weight, "rows"),
        }[term]
        faded = rows_B if fade_B is None or term in ("ce", "first", "k") else rows_B * fade_B
        return Term(faded.sum(), weight, coefficient * share)

    # --- looking

    def uncompiled(self) -> AbstractContextManager[Any]:
        """Evaluation meets too many lengths to compile for."""
        if not self.recipe.train.compile:
            return nullcontext()
        return torch.compiler.set_stance("force_eager")

    @torch.no_grad()
    def evaluate(self, micro: int) -> dict[str, float | None]:
        """`loss` is the answers' −log p per token, averaged over the models; `other` the same with the latents of a
        text of another group: where the two are equal, nothing came over the wire."""
        rows = self.data.held_out
        if rows is None or not len(rows):
            return {"loss": None, "perplexity": None, "latent_cosine": None}
        count, size = min(len(rows), self.recipe.eval.sequences), max(_AT_ONCE, micro)
        batches = [np.arange(first, min(first + size, count)) for first in range(0, count, size)]
        self.model.eval()
        with self.uncompiled():
            made = [self.model.latents(self._tensors(rows, some)["bytes"].to(self.device)) for some in batches]
            latents = {name: torch.cat([part[name] for part in made]) for name in self.frozen}
            scores = self._scores(rows, batches, latents)
            other = strangers(rows.pairs[:count])
            others = None if other is None else self._scores(rows, batches, {n: z[other] for n, z in latents.items()})
        self.model.train()
        found: dict[str, float | None] = {}
        for name, sums in scores.items():
            found |= {f"{key}_{name}": value for key, value in sums.figures().items()}
            found[f"other_nll_{name}"] = None if others is None else others[name].figures()["nll"]
        loss = sum(one.figures()["nll"] for one in scores.values()) / len(scores)
        meter = cosine([torch.cat(list(latents.values()), 1).float()])
        return {"loss": loss, "perplexity": perplexity(loss), "latent_cosine": meter, **found}

    def _scores(self, rows: Rows, batches: list[np.ndarray], latents: dict[str, Tensor]) -> dict[str, Scores]:
        """Of each model's answers to these rows, from such latents."""
        found = {name: Scores() for name in self.frozen}
        for some in batches:
            batch = self._tensors(rows, some)
            for name, one in self.frozen.items():
                targets, prefix = batch[f"targets.{name}"].to(self.device), self.model.prefix(name, latents[name][some])
                found[name] += score(one.decoder, one.states(prefix, targets), targets)
        return found

    @torch.no_grad()
    def encoded(self, texts: list[str]) -> dict[str, Tensor]:
        """The latents of texts, for each model."""
        raw, patch = [cut_bytes(text, self.options.bytes) for text in texts], self.options.patch
        size = -(-max(len(one) for one in raw) // patch) * patch
        return self.model.latents(torch.from_numpy(byte_rows(raw, size)).to(self.device))

    def select_questions(self, count: int | None) -> None:
        if self.data.held_out is not None and count is not None:
            self.data = replace(self.data, held_out=self.data.held_out.first(count))

    def examples(self) -> list[Pair]:
        """What is held out."""
        return [] if self.data.held_out is None else self.data.held_out.pairs

    def sample(self, prompt: str, how: Sampling) -> list[Sample]:
        """The answers of each model, from the latents and from the text; without a prompt, to a text that is held
        out."""
        text = prompt or next((pair.text for pair in self.examples()), "")
        if not text or self.data.readers is None:
            return []
        if (size := len(text.encode("utf-8", "replace"))) > self.options.bytes:
            self.log(f"the text has {size:,} bytes, and latents stand for {self.options.bytes:,}: the rest is left out")
        self.model.eval()
        with self.uncompiled():
            found = written(self, text if text.endswith("\n") else f"{text}\n", how)
        self.model.train()
        return found

    def answer_report(
        self, *, numbers: bool, count: int | None, tokens: int, where: str, progress: Callable[[int, int], None]
    ) -> AnswerReport:
        from redline.jobs.latent_prefix.evaluate import compare  # imports this module

        return compare(self, count=count, tokens=tokens, numbers=numbers, where=where, told=progress)

    # --- what survives a restart

    def state(self) -> dict[str, Any]:
        return {"attention": {name: one.backend for name, one in self.selections.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        self.selections = {name: Selection(backend, CHOSEN_AT_START) for name, backend in state["attention"].items()}


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

    def preview(self, recipe: Recipe, count: int, progress: ProgressCallback | None, log: Log) -> SamplePreview:
        """Return texts with the answers that are learnt, and how much of each text the encoder reads."""
        data = self.load_data(self.complete(recipe, log), progress=progress)
        assert data.pairs is not None
        rows, views = data.pairs.train, []
        for number, row in enumerate(data.pairs.index.sequences(np.arange(min(count, len(rows)))).tolist(), start=1):
            pair = rows.pairs[row]
            read, size = cut_bytes(pair.text, rows.lengths.bytes), len(pair.text.encode("utf-8", "replace"))
            cut = "" if len(read) == size else f", of which the first {len(read):,} are read"
            text = TokenRun(read.decode("utf-8", "replace").rstrip() + "\n→ ", learnt=False, special=False)
            answer = TokenRun(pair.answers[0], learnt=True, special=False)
            views.append(SampleView(f"text {number}: {size:,} bytes{cut}", [text, answer]))
        return SamplePreview(views, data.messages)
