"""Evaluation of latent_prefix: the same questions answered under five conditions, reported side by side.

text        the whole text as the prompt: the upper bound
latent      the latents of the text
budget      the first M tokens of the text: a prompt as long as the prefix
no_context  the question without its context (or an empty prompt, if they cannot be separated): the floor
other       the latents of an unrelated text (another article or problem): what the prefix contributes without any
            information about this text, such as the format of an answer
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from redline.errors import UserError
from redline.jobs.latent_prefix.costs import BITS, GROUP, latent_bytes
from redline.jobs.latent_prefix.data import Pair, cut_bytes, unrelated_pairs
from redline.jobs.latent_prefix.encoder import mean_cosine
from redline.jobs.latent_prefix.frozen import FrozenModel, Scores, score
from redline.jobs.latent_prefix.objective import LatentPrefix, answer_from_latents, answer_from_prompts, context_length
from redline.jobs.latent_prefix.teacher import text_prompt
from redline.jobs.objective import Answer
from redline.kernels.cross_entropy import IGNORE
from redline.metrics import exact_match, f1, final_answer, flexible_extract, number_match, strict_match

# ----------------------------------------------------------------------------------------------------
# Latents as bytes: fp16, or int8 or int4 with an fp16 scale for each group of 32 values.


Floats = npt.NDArray[np.float32]


def pack_latents(values: Floats, kind: str) -> bytes:
    """Quantise symmetrically: a group's largest magnitude becomes the largest integer. Scales precede the integers."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if kind == "fp16":
        return flat.astype("<f2").tobytes()
    largest = 2 ** (BITS[kind] - 1) - 1
    groups = np.pad(flat, (0, -len(flat) % GROUP)).reshape(-1, GROUP)
    scales = np.minimum(np.abs(groups).max(1) / largest, np.finfo(np.float16).max).astype("<f2")
    safe = np.where(scales > 0, scales, 1).astype(np.float32)[:, None]
    integers = np.clip(np.rint(groups / safe), -largest, largest).astype(np.int8).reshape(-1)[: len(flat)]
    packed = integers if kind == "int8" else _pack_nibbles(integers)
    return scales.tobytes() + packed.tobytes()


def unpack_latents(packed: bytes, shape: tuple[int, ...], kind: str) -> Floats:
    count = int(np.prod(shape))
    if len(packed) != latent_bytes(count, kind):
        raise ValueError(f"{len(packed)} bytes are not {count} values in {kind}")
    if kind == "fp16":
        return np.frombuffer(packed, dtype="<f2").astype(np.float32).reshape(shape)
    groups = -(-count // GROUP)
    scales = np.frombuffer(packed, dtype="<f2", count=groups).astype(np.float32)
    rest = np.frombuffer(packed, dtype=np.int8, offset=2 * groups)
    integers = rest if kind == "int8" else _unpack_nibbles(rest, count)
    values: Floats = (integers.astype(np.float32) * np.repeat(scales, GROUP)[:count]).reshape(shape)
    return values


def _pack_nibbles(integers: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    pairs = np.pad(integers, (0, len(integers) % 2)).reshape(-1, 2).astype(np.uint8) & 15
    return (pairs[:, 0] | (pairs[:, 1] << 4)).astype(np.uint8)


def _unpack_nibbles(packed: npt.NDArray[np.int8], count: int) -> npt.NDArray[np.int8]:
    raw = packed.view(np.uint8)
    both = np.stack((raw & 15, raw >> 4), 1).reshape(-1)[:count].astype(np.int8)
    signed: npt.NDArray[np.int8] = np.where(both > 7, both - 16, both).astype(np.int8)
    return signed


# ----------------------------------------------------------------------------------------------------
# The size of a text in bytes, compared with the size of its latents.


def text_bytes(text: str) -> dict[str, int]:
    raw = text.encode("utf-8")
    return {"utf8": len(raw), "gzip": len(gzip.compress(raw, compresslevel=9, mtime=0))}


def size_against_text(latents: float, text: float) -> str:
    """Say which is smaller, in words: with usual settings it is the text, and a report must not hide that."""
    if latents > text:
        return f"{latents / text:.1f}× larger than the text"
    return f"{text / latents:.1f}× smaller than the text"


CONDITIONS = ("text", "latent", "budget", "no_context", "other")
QUANTISED = ("int8", "int4")
_BATCH = 32

OnProgress = Callable[[int, int], None]
Score = Callable[[Sequence[str], Sequence[str]], float]

_LM_EVAL: dict[str, Score] = {"strict_match": strict_match, "flexible_extract": flexible_extract}
_COLUMNS = {
    "exact_match": "EM",
    "strict_match": "strict",
    "flexible_extract": "flexible",
    "f1": "F1",
    "nll": "NLL/token",
    "first_top1": "top-1",
    "first_top5": "top-5",
}


def _width(title: str) -> int:
    return max(7, len(title) + 1)


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: metrics of each model under each condition, and sizes of texts and latents."""

    models: dict[str, dict[str, Any]]  # by number: title, conditions, prompt tokens, prefix length
    latent_sizes: dict[str, Any]  # sizes in bytes of text and latents, averaged over the questions
    latent_cosine: float | None
    questions: int
    seconds: float

    def result(self) -> dict[str, Any]:
        return {
            "questions": self.questions,
            "latent_cosine": self.latent_cosine,
            "models": self.models,
            "wire": self.latent_sizes,
            "answers_per_s": self.questions * len(CONDITIONS) * len(self.models) / self.seconds,
        }

    def lines(self) -> list[str]:
        """Return the tables and figures as lines of text."""
        lines = []
        for number, model in self.models.items():
            lines.append(f"model {number}: {model['title']}")
            measured = {key for metrics in model["conditions"].values() for key in metrics}
            columns = {key: title for key, title in _COLUMNS.items() if key in measured}
            lines.append(f"  {'':12s} " + " ".join(f"{title:>{_width(title)}s}" for title in columns.values()))
            for name, metrics in model["conditions"].items():
                values = {
                    title: float("nan") if metrics[key] is None else metrics[key] for key, title in columns.items()
                }
                cells = " ".join(f"{value:{_width(title)}.3f}" for title, value in values.items())
                lines.append(f"  {name:12s} {cells}")
            tokens, prefix = model["prompt_tokens"], model["prefix"]
            lines.append(f"  text {tokens:.0f} tokens, prefix {prefix}: {tokens / prefix:.2f}× compression")
        shown = "unknown" if self.latent_cosine is None else f"{self.latent_cosine:.3f} (1 is mode collapse)"
        lines.append(f"mean cosine of latents of different texts: {shown}")
        sizes = self.latent_sizes
        unread = f"; {sizes['unread']:.0f} bytes more were not read" if sizes["unread"] >= 0.5 else ""
        lines.append(f"text: {sizes['utf8']:.0f} bytes, gzip {sizes['gzip']:.0f}{unread}")
        lines += [
            f"latents in {kind}: {sizes[kind]} bytes, {size_against_text(sizes[kind], sizes['utf8'])}" for kind in BITS
        ]
        return lines


@torch.no_grad()
def compare(
    objective: LatentPrefix,
    *,
    count: int | None,
    tokens: int,
    where: str,
    numbers: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> Comparison:
    """Answer the first `count` validation pairs with each model under each condition.

    Answers are greedy and have at most `tokens` tokens. With `numbers` an answer matches by its number, else by its
    words.
    """
    objective.select_questions(count)
    pairs = objective.held_out_pairs()
    if not pairs:
        fix = "Use --data FILE, or train with data.val_fraction above 0."
        raise UserError("the run has no validation pairs to answer.", where=where, fix=fix)
    if numbers and all(final_answer(answer) is None for pair in pairs for answer in pair.answers):
        what = f"none of the {len(pairs)} reference answers contains a number, and gsm8k compares numbers only."
        raise UserError(what, where="--answers", fix="Use --answers match or f1.")
    started = time.monotonic()
    objective.model.eval()
    latents = _latents(objective, pairs)
    models: dict[str, dict[str, Any]] = {}
    for name, one in objective.frozen.items():
        models[name] = _evaluate_model(objective, one, pairs, latents[name], tokens, numbers)
        on_progress(len(models) * len(pairs), len(objective.frozen) * len(pairs))
    full = [pair.text.encode("utf-8", "replace") for pair in pairs]
    # Compare with the part of a text that the encoder reads: the latents do not stand for the rest.
    read = [cut_bytes(pair.text, objective.options.bytes) for pair in pairs]
    sizes = [text_bytes(one.decode("utf-8")) for one in read]
    slots = _all_slots(latents, objective.options.private_slots)
    packed = {kind: len(pack_latents(slots, kind)) for kind in BITS}
    text = {key: float(np.mean([one[key] for one in sizes])) for key in ("utf8", "gzip")}
    text["unread"] = float(np.mean([len(whole) - len(part) for whole, part in zip(full, read, strict=True)]))
    latent_sizes = {**text, **packed, "larger_than_text": {kind: size > text["utf8"] for kind, size in packed.items()}}
    cosine = mean_cosine(torch.cat(list(latents.values()), 1))
    return Comparison(models, latent_sizes, cosine, len(pairs), max(1e-9, time.monotonic() - started))


def _all_slots(latents: dict[str, Tensor], private: int) -> npt.NDArray[np.float32]:
    """Return all latents of the first text: the shared slots once, and the private slots of each model."""
    first, *others = (z[0].float().cpu().numpy() for z in latents.values())
    return np.concatenate([first, *(z[len(z) - private :] for z in others)])


def _latents(objective: LatentPrefix, pairs: Sequence[Pair]) -> dict[str, Tensor]:
    parts = [
        objective.encode([pair.text for pair in pairs[first : first + _BATCH]])
        for first in range(0, len(pairs), _BATCH)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _evaluate_model(
    objective: LatentPrefix, model: FrozenModel, pairs: Sequence[Pair], z: Tensor, tokens: int, numbers: bool
) -> dict[str, Any]:
    tokenizer, slots, room = model.tokenizer, z.shape[1], context_length(model) - tokens - 1
    assert tokenizer is not None
    references = [tokenizer.answer(pair.answers[0]) for pair in pairs]
    asked = [pair.asked for pair in pairs]
    questions = [tokenizer.question(one) for one in asked]
    prompts = {
        "text": [text_prompt(model, pair.text, room, asked=pair.asked) for pair in pairs],
        "budget": [text_prompt(model, pair.text, room, slots, pair.asked) for pair in pairs],
        "no_context": [text_prompt(model, pair.question, room) for pair in pairs],
    }
    other = unrelated_pairs(pairs)
    latents = {"latent": z} | ({"other": z[other]} if other else {})
    latents |= {kind: _quantise(z, kind) for kind in QUANTISED}
    conditions: dict[str, dict[str, float | None]] = {}
    for name in (*CONDITIONS, *QUANTISED):
        if name in prompts:
            answers = answer_from_prompts(model, prompts[name], tokens)
            scores = _score_prompts(model, prompts[name], references)
        elif name in latents:
            answers = answer_from_latents(objective, model.name, latents[name], tokens, asked=asked)
            scores = _score_latents(objective, model, latents[name], references, questions)
        else:  # "other", where all pairs have the same text
            continue
        label = f"latent {name}" if name in QUANTISED else name
        conditions[label] = {**_answer_metrics(answers, pairs, numbers), **scores.metrics()}
    text_tokens = float(np.mean([tokenizer.count(pair.text) for pair in pairs]))
    return {"title": model.spec.title, "conditions": conditions, "prompt_tokens": text_tokens, "prefix": slots}


def _quantise(z_BMD: Tensor, kind: str) -> Tensor:
    """Return the latents as a receiver gets them: packed into bytes and unpacked."""
    rows = z_BMD.float().cpu().numpy()
    restored = np.stack([unpack_latents(pack_latents(row, kind), row.shape, kind) for row in rows])
    return torch.from_numpy(restored).to(z_BMD.device)


def _answer_metrics(answers: Sequence[Answer], pairs: Sequence[Pair], numbers: bool) -> dict[str, float]:
    texts, right = [one.text for one in answers], [pair.answers for pair in pairs]
    if not numbers:
        return {"exact_match": exact_match(texts, right), "f1": f1(texts, right)}
    return {
        "exact_match": number_match(texts, right),
        **{name: _best_of_each(score, texts, right) for name, score in _LM_EVAL.items()},
        "f1": f1(texts, right),
    }


def _best_of_each(score: Score, texts: Sequence[str], right: Sequence[Sequence[str]]) -> float:
    """Return the mean over texts of the best score that any of a text's references gives."""
    return float(np.mean([max(score([text], [one]) for one in some) for text, some in zip(texts, right, strict=True)]))


def _score_prompts(model: FrozenModel, prompts: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> Scores:
    scores = Scores()
    for row, hidden in model.text_states(prompts, references):
        scores += score(model.decoder, hidden[None], torch.tensor([references[row]], device=model.device))
    return scores


def _score_latents(
    objective: LatentPrefix,
    model: FrozenModel,
    z: Tensor,
    references: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]],
) -> Scores:
    scores = Scores()
    for first in range(0, len(references), _BATCH):
        last = first + _BATCH
        targets = _padded(references[first:last], model.device)
        asked = _padded(questions[first:last], model.device) if any(questions) else None
        prefix = objective.model.prefix(model.name, z[first:last])
        scores += score(model.decoder, model.states(prefix, targets, asked), targets)
    return scores


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    padded = torch.full((len(rows), max(len(row) for row in rows)), IGNORE, device=device)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, device=device)
    return padded
