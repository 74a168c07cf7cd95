"""Sampling by denoising: block after block, each filled in while the clean ones before it stay in a cache.

A masked position keeps its value once it has one. The network does not see the time, so only the order counts:
`first_hitting` fills one position at a time, each as likely as the others, which is exactly the order in which a
continuous-time process first leaves the mask (arXiv 2409.02908); `ancestral` goes down a grid of times and fills what
leaves the mask between two of them, all from one look. Each row has randomness of its own: what is beside it in a batch
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from redline.kernels.attention import Bound
from redline.models.decoder import Decoder
from redline.models.generate import COLDEST
from redline.models.layers import KVCache
from redline.planning.layout import Layout

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Denoising:
    """How to fill in."""

    sampler: str = "first_hitting"
    steps: int | None = None  # ancestral: times per block; as many as it has positions if not given
    temperature: float = 1.0  # 0: the likeliest token
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True)
class Vocabulary:
    """What the ids mean here."""

    mask: int
    classes: int  # ids below this can be predicted
    end: int | None = None  # after it a segment has nothing more


@dataclass(frozen=True)
class Denoised:
    rows: Tensor  # [B, n] without a mask
    looks: list[int]  # forwards of a noisy block, for each row
    ended: list[bool]  # by itself: there is an `end` in its last segment


@torch.no_grad()
def denoise(
    model: Decoder,
    rows_BN: Tensor,
    layout: Layout,
    vocabulary: Vocabulary,
    seeds: Sequence[int],
    how: Denoising = Denoising(),
    *,
    cached: bool = True,
    told: Callable[[int], None] = lambda _: None,
) -> Denoised:
    """Rows with every mask filled in; `told` hears how many blocks are done.

    Without `cached`, the blocks before are read again for each look: slower, and the same.
    """
    rows, asked = rows_BN.clone(), rows_BN == vocabulary.mask
    chances = [np.random.default_rng(seed) for seed in seeds]
    looks, over = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=bool)
    cache, done, begin = model.new_cache(), 0, 0
    for segment in layout.segments:
        over[:] = False
        for _ in range(segment.blocks):
            block = slice(begin, begin + segment.size)
            if vocabulary.end is not None:
                _close(rows, block, over, vocabulary)
            for hidden in _fillings(rows, block, vocabulary, chances, how):
                seen = cache if cached else _read(model, rows, layout, begin)
                states = model(rows[:, block], Bound(), seen, begin, whole=True, keep=False)
                _fill(model, rows, block, states, hidden, vocabulary, chances, how)
                looks += hidden.any(1)
            if cached and block.stop < layout.length:
                model(rows[:, block], Bound(), cache, begin, whole=True)
            if vocabulary.end is not None and not segment.given:
                over |= ((rows[:, block] == vocabulary.end) & asked[:, block]).any(1).cpu().numpy()
            begin, done = block.stop, done + 1
            told(done)
    return Denoised(rows, looks.tolist(), over.tolist())


def _read(model: Decoder, rows: Tensor, layout: Layout, until: int) -> list[KVCache]:
    """A cache of all clean blocks before a position, made anew."""
    cache, begin = model.new_cache(), 0
    for size in layout.sizes:
        if begin < until:
            model(rows[:, begin : begin + size], Bound(), cache, begin, whole=True)
        begin += size
    return cache


def _close(rows: Tensor, block: slice, over: Bools, vocabulary: Vocabulary) -> None:
    """Of rows whose segment has ended the rest of it is ends."""
    part = rows[:, block]
    closed = torch.from_numpy(over).to(rows.device)[:, None] & (part == vocabulary.mask)
    assert vocabulary.end is not None
    rows[:, block] = part.masked_fill(closed, vocabulary.end)


def _fillings(
    rows: Tensor, block: slice, vocabulary: Vocabulary, chances: list[np.random.Generator], how: Denoising
) -> list[Bools]:
    """For each look, which positions [B, L'] it fills in; looks that fill nothing in any row are left out."""
    masked = (rows[:, block] == vocabulary.mask).cpu().numpy()
    if not masked.any():
        return []
    ranks = [_order(row, chance, how) for row, chance in zip(masked, chances, strict=True)]
    turns = np.stack(ranks)
    return [turns == turn for turn in np.unique(turns[turns >= 0])]


def _order(masked: Bools, chance: np.random.Generator, how: Denoising) -> npt.NDArray[np.int64]:
    """The look at which each position is filled in; -1 where nothing is to be."""
    turns = np.full(len(masked), -1, dtype=np.int64)
    count = int(masked.sum())
    if how.sampler == "first_hitting":
        turns[masked] = chance.permutation(count)
    else:
        # linear schedule: a position leaves the mask at a time that is uniform in [0, 1], the later times first
        steps = how.steps or len(masked)
        turns[masked] = np.minimum((chance.random(count) * steps).astype(np.int64), steps - 1)
    return turns


def _fill(
    model: Decoder,
    rows: Tensor,
    block: slice,
    states_BLD: Tensor,
    hidden: Bools,
    vocabulary: Vocabulary,
    chances: list[np.random.Generator],
    how: Denoising,
) -> None:
    row, place = np.nonzero(hidden)
    where = torch.from_numpy(row).to(rows.device), torch.from_numpy(place).to(rows.device)
    draws = np.concatenate([chances[i].random(count) for i, count in enumerate(hidden.sum(1)) if count])
    logits = model.logits(states_BLD[where])[:, : vocabulary.classes]
    uniform = torch.from_numpy(draws).to(rows.device, torch.float32)
    rows[where[0], where[1] + block.start] = pick(logits, uniform, how)


def pick(logits_NV: Tensor, uniform_N: Tensor, how: Denoising) -> Tensor:
    """One token per row, where its uniform draw falls among the probabilities; temperature 0 is the likeliest."""
    if how.temperature < COLDEST:
        return logits_NV.argmax(-1)
    logits = logits_NV.float() / how.temperature
    ordered, order = logits.softmax(-1).sort(descending=True, stable=True)
    total = ordered.cumsum(-1)
    if how.top_k is not None and how.top_k < ordered.shape[1]:
        ordered, total = ordered[:, : how.top_k], total[:, : how.top_k].contiguous()
    kept = total[:, -1:] if how.top_p is None or how.top_p >= 1.0 else _nucleus(total, how.top_p)
    place = torch.searchsorted(total, uniform_N[:, None] * kept).clamp(max=total.shape[1] - 1)
    return order.gather(1, place)[:, 0]


def _nucleus(total: Tensor, share: float) -> Tensor:
    """Return the mass of the nucleus as the authors of BD3-LM define it (arXiv 2503.09573, their published code).

    Tokens are in it, likeliest first, as long as their cumulative probability is at most `share`; the likeliest is
    always in it. The token that would cross `share` is not, unlike in Holtzman et al. 2020 and `generate.choose`.
    """
    inside = (total <= share * total[:, -1:]).sum(-1, keepdim=True)
    return total.gather(1, (inside - 1).clamp(min=0))
