"""A latent prefix examined: the same questions answered from the text, from latents, and from less.

text        the whole text in front of the question: what the latents are to stand for
latent      their latents
budget      the first M tokens of the text: as long a prompt as the prefix
no_context  the question without its context (or nothing, where it cannot be told apart)
other       the latents of a text of another group (article, problem): what the prefix teaches without saying
            anything about this one
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
from redline.jobs.latent_prefix.costs import BITS, GROUP, wire_bytes
from redline.jobs.latent_prefix.data import Pair, cut_bytes, strangers
from redline.jobs.latent_prefix.encoder import cosine
from redline.jobs.latent_prefix.frozen import Frozen, Scores, score
from redline.jobs.latent_prefix.objective import LatentPrefix, context_of, from_latents, from_prompts
from redline.jobs.latent_prefix.teacher import text_prompt
from redline.jobs.objective import Answer
from redline.kernels.cross_entropy import IGNORE
from redline.metrics import exact_match, f1, final_answer, flexible_extract, number_match, strict_match

# ----------------------------------------------------------------------------------------------------
# Latents as bytes: half precision, or whole numbers of 8 or 4 bits with an fp16 scale for each group of 32.


Floats = npt.NDArray[np.float32]


def to_wire(values: Floats, kind: str) -> bytes:
    """Symmetric: a group's largest magnitude becomes the largest number. Scales come first, then the numbers."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if kind == "fp16":
        return flat.astype("<f2").tobytes()
    most = 2 ** (BITS[kind] - 1) - 1
    groups = np.pad(flat, (0, -len(flat) % GROUP)).reshape(-1, GROUP)
    scales = np.minimum(np.abs(groups).max(1) / most, np.finfo(np.float16).max).astype("<f2")
    safe = np.where(scales > 0, scales, 1).astype(np.float32)[:, None]
    numbers = np.clip(np.rint(groups / safe), -most, most).astype(np.int8).reshape(-1)[: len(flat)]
    packed = numbers if kind == "int8" else _nibbles(numbers)
    return scales.tobytes() + packed.tobytes()


def from_wire(sent: bytes, shape: tuple[int, ...], kind: str) -> Floats:
    count = int(np.prod(shape))
    if len(sent) != wire_bytes(count, kind):
        raise ValueError(f"{len(sent)} bytes are not {count} values in {kind}")
    if kind == "fp16":
        return np.frombuffer(sent, dtype="<f2").astype(np.float32).reshape(shape)
    groups = -(-count // GROUP)
    scales = np.frombuffer(sent, dtype="<f2", count=groups).astype(np.float32)
    rest = np.frombuffer(sent, dtype=np.int8, offset=2 * groups)
    numbers = rest if kind == "int8" else _from_nibbles(rest, count)
    values: Floats = (numbers.astype(np.float32) * np.repeat(scales, GROUP)[:count]).reshape(shape)
    return values


def _nibbles(numbers: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    pairs = np.pad(numbers, (0, len(numbers) % 2)).reshape(-1, 2).astype(np.uint8) & 15
    return (pairs[:, 0] | (pairs[:, 1] << 4)).astype(np.uint8)


def _from_nibbles(packed: npt.NDArray[np.int8], count: int) -> npt.NDArray[np.int8]:
    raw = packed.view(np.uint8)
    both = np.stack((raw & 15, raw >> 4), 1).reshape(-1)[:count].astype(np.int8)
    signed: npt.NDArray[np.int8] = np.where(both > 7, both - 16, both).astype(np.int8)
    return signed


# ----------------------------------------------------------------------------------------------------
# How many bytes a text takes, and how that compares with its latents.


def text_bytes(text: str) -> dict[str, int]:
    raw = text.encode("utf-8")
    return {"utf8": len(raw), "gzip": len(gzip.compress(raw, compresslevel=9, mtime=0))}


def verdict(wire: float, text: float) -> str:
    """In words, which is shorter."""
    if wire > text:
        return f"the wire is {wire / text:.1f}× larger than the text"
    return f"the wire is {text / wire:.1f}× smaller than the text"


CONDITIONS = ("text", "latent", "budget", "no_context", "other")
QUANTISED = ("int8", "int4")
_AT_ONCE = 32

Told = Callable[[int, int], None]
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
    models: dict[str, dict[str, Any]]  # number → title, conditions, prompt tokens
    wire: dict[str, Any]
    latent_cosine: float | None
    questions: int
    seconds: float

    def result(self) -> dict[str, Any]:
        return {
            "questions": self.questions,
            "latent_cosine": self.latent_cosine,
            "models": self.models,
            "wire": self.wire,
            "answers_per_s": self.questions * len(CONDITIONS) * len(self.models) / self.seconds,
        }

    def lines(self) -> list[str]:
        """For people."""
        told = []
        for number, one in self.models.items():
            told.append(f"model {number}: {one['title']}")
            measured = {key for found in one["conditions"].values() for key in found}
            columns = {key: title for key, title in _COLUMNS.items() if key in measured}
            told.append(f"  {'':12s} " + " ".join(f"{title:>{_width(title)}s}" for title in columns.values()))
            for name, found in one["conditions"].items():
                figures = {title: float("nan") if found[key] is None else found[key] for key, title in columns.items()}
                cells = " ".join(f"{figure:{_width(title)}.3f}" for title, figure in figures.items())
                told.append(f"  {name:12s} {cells}")
            ratio = one["prompt_tokens"] / one["prefix"]
            told.append(f"  prompt {one['prompt_tokens']:.0f} tokens, prefix {one['prefix']}: {ratio:.2f}× as many")
        shown = "unknown" if self.latent_cosine is None else f"{self.latent_cosine:.3f} (1 is collapse)"
        told.append(f"cosine between latents of different texts {shown}")
        wire = self.wire
        unread = f"; {wire['unread']:.0f} more were cut off unread" if wire["unread"] >= 0.5 else ""
        told.append(f"text {wire['utf8']:.0f} bytes, gzip {wire['gzip']:.0f}{unread}")
        told += [f"wire {kind} {wire[kind]} bytes: {verdict(wire[kind], wire['utf8'])}" for kind in BITS]
        return told


@torch.no_grad()
def compare(
    objective: LatentPrefix,
    *,
    count: int | None,
    tokens: int,
    where: str,
    numbers: bool = False,
    told: Told = lambda done, total: None,
) -> Comparison:
    """The first `count` of what is held out, by each model and in each condition; greedy, of at most `tokens`. With
    `numbers` an answer matches by its number, else by its words."""
    objective.select_questions(count)
    pairs = objective.examples()
    if not pairs:
        fix = "Give some: --data FILE, or train with data.val_fraction above 0."
        raise UserError("nothing is held out: there is nothing to answer.", where=where, fix=fix)
    if numbers and all(final_answer(answer) is None for pair in pairs for answer in pair.answers):
        what = f"none of {len(pairs)} reference answers has a number, and gsm8k compares nothing else."
        raise UserError(what, where="--answers", fix="Use --answers match or f1.")
    begun = time.monotonic()
    objective.model.eval()
    latents = _latents(objective, pairs)
    models: dict[str, dict[str, Any]] = {}
    for name, one in objective.frozen.items():
        models[name] = _examined(objective, one, pairs, latents[name], tokens, numbers)
        told(len(models) * len(pairs), len(objective.frozen) * len(pairs))
    whole = [pair.text.encode("utf-8", "replace") for pair in pairs]
    read = [cut_bytes(pair.text, objective.options.bytes) for pair in pairs]  # what the wire stands for
    sizes = [text_bytes(one.decode("utf-8")) for one in read]
    slots = _all_slots(latents, objective.options.private_slots)
    sent = {kind: len(to_wire(slots, kind)) for kind in BITS}
    text = {key: float(np.mean([one[key] for one in sizes])) for key in ("utf8", "gzip")}
    text["unread"] = float(np.mean([len(all_) - len(some) for all_, some in zip(whole, read, strict=True)]))
    wire = {**text, **sent, "larger_than_text": {kind: size > text["utf8"] for kind, size in sent.items()}}
    meter = cosine([torch.cat(list(latents.values()), 1).float()])
    return Comparison(models, wire, meter, len(pairs), max(1e-9, time.monotonic() - begun))


def _all_slots(latents: dict[str, Tensor], private: int) -> npt.NDArray[np.float32]:
    """One text's: those that all models read, and each one's own."""
    first, *others = (z[0].float().cpu().numpy() for z in latents.values())
    return np.concatenate([first, *(z[len(z) - private :] for z in others)])


def _latents(objective: LatentPrefix, pairs: Sequence[Pair]) -> dict[str, Tensor]:
    parts = [
        objective.encoded([pair.text for pair in pairs[first : first + _AT_ONCE]])
        for first in range(0, len(pairs), _AT_ONCE)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _examined(
    job: LatentPrefix, one: Frozen, pairs: Sequence[Pair], z: Tensor, tokens: int, numbers: bool
) -> dict[str, Any]:
    reader, slots, room = one.reader, z.shape[1], context_of(one) - tokens - 1
    assert reader is not None
    answers = [reader.answer(pair.answers[0]) for pair in pairs]
    prompts = {
        "text": [text_prompt(one, pair.text, room) for pair in pairs],
        "budget": [text_prompt(one, pair.text, room, slots) for pair in pairs],
        "no_context": [text_prompt(one, pair.question, room) for pair in pairs],
    }
    other = strangers(pairs)
    sent = {"latent": z} | ({"other": z[other]} if other else {}) | {kind: _sent(z, kind) for kind in QUANTISED}
    found: dict[str, dict[str, float | None]] = {}
    for name in (*CONDITIONS, *QUANTISED):
        if name in prompts:
            said, scores = from_prompts(one, prompts[name], tokens), _of_prompts(one, prompts[name], answers)
        elif name not in sent:  # there is but one text
            continue
        else:
            said = from_latents(job, one.name, sent[name], tokens)
            scores = _of_latents(job, one, sent[name], answers)
        shown = f"latent {name}" if name in QUANTISED else name
        found[shown] = {**_marks(said, pairs, numbers), **scores.figures()}
    whole = float(np.mean([reader.count(pair.text) for pair in pairs]))
    return {"title": one.spec.title, "conditions": found, "prompt_tokens": whole, "prefix": slots}


def _sent(z_BMD: Tensor, kind: str) -> Tensor:
    """As they arrive: written as bytes, and read again."""
    raw = z_BMD.float().cpu().numpy()
    return torch.from_numpy(np.stack([from_wire(to_wire(one, kind), one.shape, kind) for one in raw])).to(z_BMD.device)


def _marks(said: Sequence[Answer], pairs: Sequence[Pair], numbers: bool) -> dict[str, float]:
    texts, right = [one.text for one in said], [pair.answers for pair in pairs]
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


def _of_prompts(one: Frozen, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Scores:
    found = Scores()
    for row, hidden in one.text_states(prompts, answers):
        found += score(one.decoder, hidden[None], torch.tensor([answers[row]], device=one.device))
    return found


def _of_latents(job: LatentPrefix, one: Frozen, z: Tensor, answers: Sequence[Sequence[int]]) -> Scores:
    found = Scores()
    for first in range(0, len(answers), _AT_ONCE):
        some = answers[first : first + _AT_ONCE]
        targets = torch.full((len(some), max(len(row) for row in some)), IGNORE, device=one.device)
        for place, row in enumerate(some):
            targets[place, : len(row)] = torch.tensor(row, device=one.device)
        prefix = job.model.prefix(one.name, z[first : first + len(some)])
        found += score(one.decoder, one.states(prefix, targets), targets)
    return found
