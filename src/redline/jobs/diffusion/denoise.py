"""Sampling: denoise one block after the other, while the keys and values of the finished blocks stay in a cache.

A position keeps its token once it is unmasked. The network has no time conditioning, so only the order matters in which
positions are unmasked. `first_hitting` unmasks one position per forward pass, in uniformly random order, which is
exactly the order in which the continuous-time process leaves the mask (arXiv 2409.02908). `ancestral` follows a grid of
times and unmasks all positions between two of them from one forward pass: fewer passes, at the price of an
approximation. Each row has its own random generator, so a sample does not depend on the other rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from redline.kernels.attention import Bound
from redline.models.decoder import Decoder, KVCache
from redline.models.generate import MIN_TEMPERATURE
from redline.planning.layout import Layout

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class SamplerOptions:
    """How masks are replaced by tokens."""

    sampler: str = "first_hitting"
    steps: int | None = None  # ancestral: forward passes per block; default: the positions of a block
    temperature: float = 1.0  # 0: the likeliest token
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True)
class Vocabulary:
    """The ids that have a special meaning to diffusion."""

    mask: int
    classes: int  # ids below this can be predicted; the mask cannot (SUBS: its logit is -inf)
    end: int | None = None  # ends a segment: everything after it in the segment is this id, too


@dataclass(frozen=True)
class Denoised:
    """The result of `denoise`."""

    rows: Tensor  # [B, n], without masks
    forwards: list[int]  # forward passes of a noisy block per row (the NFE, without those that fill the cache)
    ended: list[bool]  # whether the last segment contains `end`


@dataclass(frozen=True)
class Pass:
    """What one forward pass unmasked in one row, or what was filled after its segment's end (without a pass)."""

    row: int
    places: list[int]
    tokens: list[int]
    probabilities: list[float]  # of the tokens, under the model itself; empty for those that were filled


def denoise(
    model: Decoder,
    rows_BN: Tensor,
    layout: Layout,
    vocabulary: Vocabulary,
    seeds: Sequence[int],
    options: SamplerOptions = SamplerOptions(),
    *,
    shift: bool = False,
    cached: bool = True,
) -> Denoised:
    """Replace every mask in the rows.

    With `shift`, a token is predicted from the state at the position before it: within a block that of the noisy
    block, for the first token of a block that of the last clean token, which sees what is finished only. Without
    `cached` the finished blocks are read again for each forward pass: slower, with the same result.
    """
    passes = denoising(model, rows_BN, layout, vocabulary, seeds, options, shift=shift, cached=cached, report=False)
    while True:
        try:
            next(passes)
        except StopIteration as end:
            found: Denoised = end.value
            return found


@torch.no_grad()
def denoising(
    model: Decoder,
    rows_BN: Tensor,
    layout: Layout,
    vocabulary: Vocabulary,
    seeds: Sequence[int],
    options: SamplerOptions = SamplerOptions(),
    *,
    shift: bool = False,
    cached: bool = True,
    report: bool = True,
) -> Generator[Pass, None, Denoised]:
    """Do what `denoise` does; with `report`, yield what each pass unmasked in each row."""
    rows, masked_at_first = rows_BN.clone(), rows_BN == vocabulary.mask
    generators = [np.random.default_rng(seed) for seed in seeds]
    forwards, ended = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=bool)
    cache, begin = model.new_cache(), 0
    before: Tensor | None = None  # the state of the last clean token
    for segment in layout.segments:
        ended[:] = False
        for _ in range(segment.blocks):
            block = slice(begin, begin + segment.size)
            if vocabulary.end is not None:
                filled = _fill_ended_rows(rows, block, ended, vocabulary)
                yield from _passes(filled, block, rows, None) if report else ()
            for unmasked in _unmask_schedule(rows, block, vocabulary, generators, options):
                seen = cache
                if not cached:
                    seen, before = _clean_cache(model, rows, layout, begin)
                states = model(rows[:, block], Bound(), seen, begin, bidirectional=True, update_cache=False)
                if shift:
                    states = torch.cat((states[:, :1] if before is None else before, states[:, :-1]), 1)
                chances = _unmask(model, rows, block, states, unmasked, vocabulary, generators, options)
                forwards += unmasked.any(1)
                yield from _passes(unmasked, block, rows, chances()) if report else ()
            if cached and block.stop < layout.length:
                # One more pass over the finished block: the cache must hold the keys and values of clean tokens.
                before = model(rows[:, block], Bound(), cache, begin, bidirectional=True)[:, -1:]
            if vocabulary.end is not None and not segment.given:
                written = (rows[:, block] == vocabulary.end) & masked_at_first[:, block]
                ended |= written.any(1).cpu().numpy()
            begin = block.stop
    return Denoised(rows, forwards.tolist(), ended.tolist())


def _passes(changed: Bools, block: slice, rows: Tensor, chances: list[float] | None) -> Iterator[Pass]:
    """Yield the changes of each row. `chances` are those of all changed positions, row after row."""
    at = 0
    for row, columns in enumerate(changed):
        places = (np.flatnonzero(columns) + block.start).tolist()
        if places:
            tokens = rows[row, places].tolist()
            yield Pass(row, places, tokens, [] if chances is None else chances[at : at + len(places)])
        at += len(places)


def _clean_cache(model: Decoder, rows: Tensor, layout: Layout, until: int) -> tuple[list[KVCache], Tensor | None]:
    """Return a new cache of all clean blocks before position `until`, and the state of the last token in them."""
    cache, begin, last = model.new_cache(), 0, None
    for size in layout.sizes:
        if begin < until:
            last = model(rows[:, begin : begin + size], Bound(), cache, begin, bidirectional=True)[:, -1:]
        begin += size
    return cache, last


def _fill_ended_rows(rows: Tensor, block: slice, ended: Bools, vocabulary: Vocabulary) -> Bools:
    """Fill the block with `end` in the rows whose segment has ended, which saves their forward passes.

    Return which positions were filled.
    """
    assert vocabulary.end is not None
    tokens = rows[:, block]
    fill = torch.from_numpy(ended).to(rows.device)[:, None] & (tokens == vocabulary.mask)
    rows[:, block] = tokens.masked_fill(fill, vocabulary.end)
    found: Bools = fill.cpu().numpy()
    return found


def _unmask_schedule(
    rows: Tensor,
    block: slice,
    vocabulary: Vocabulary,
    generators: list[np.random.Generator],
    options: SamplerOptions,
) -> list[Bools]:
    """Return, for each forward pass, which positions [B, L'] it unmasks; passes that unmask nothing are left out."""
    masked = (rows[:, block] == vocabulary.mask).cpu().numpy()
    if not masked.any():
        return []
    steps = np.stack([_unmask_steps(row, rng, options) for row, rng in zip(masked, generators, strict=True)])
    return [steps == step for step in np.unique(steps[steps >= 0])]


def _unmask_steps(masked: Bools, generator: np.random.Generator, options: SamplerOptions) -> npt.NDArray[np.int64]:
    """Return the sampler step at which each position is unmasked; -1 where it is not masked."""
    steps = np.full(len(masked), -1, dtype=np.int64)
    count = int(masked.sum())
    if options.sampler == "first_hitting":
        # With p = t every masked position is equally likely to leave the mask next, whatever the time: the order is a
        # uniform permutation, and the times t <- t * u^(1/n) need not be drawn since the network does not see them.
        steps[masked] = generator.permutation(count)
    else:
        # Linear schedule: the time at which a position leaves the mask is uniform in [0, 1], so the grid interval that
        # it falls into can be drawn directly.
        number = options.steps or len(masked)
        steps[masked] = np.minimum((generator.random(count) * number).astype(np.int64), number - 1)
    return steps


def _unmask(
    model: Decoder,
    rows: Tensor,
    block: slice,
    states_BLD: Tensor,
    unmasked: Bools,
    vocabulary: Vocabulary,
    generators: list[np.random.Generator],
    options: SamplerOptions,
) -> Callable[[], list[float]]:
    """Sample a token at each of these positions, and write it into the rows.

    Return a function that computes the tokens' probabilities under the model itself.
    """
    row, column = np.nonzero(unmasked)
    where = torch.from_numpy(row).to(rows.device), torch.from_numpy(column).to(rows.device)
    draws = np.concatenate([generators[i].random(count) for i, count in enumerate(unmasked.sum(1)) if count])
    logits = model.logits(states_BLD[where])[:, : vocabulary.classes]
    uniform = torch.from_numpy(draws).to(rows.device, torch.float32)
    chosen = sample_tokens(logits, uniform, options)
    rows[where[0], where[1] + block.start] = chosen
    return lambda: logits.float().softmax(-1).gather(1, chosen[:, None])[:, 0].tolist()


def sample_tokens(logits_NV: Tensor, uniform_N: Tensor, options: SamplerOptions) -> Tensor:
    """Sample one token per row by inverting its cumulative distribution at a uniform draw; argmax at temperature 0."""
    if options.temperature < MIN_TEMPERATURE:
        return logits_NV.argmax(-1)
    logits = logits_NV.float() / options.temperature
    ordered, order = logits.softmax(-1).sort(descending=True, stable=True)
    total = ordered.cumsum(-1)
    if options.top_k is not None and options.top_k < ordered.shape[1]:
        ordered, total = ordered[:, : options.top_k], total[:, : options.top_k].contiguous()
    mass = total[:, -1:] if options.top_p is None or options.top_p >= 1.0 else _nucleus_mass(total, options.top_p)
    chosen = torch.searchsorted(total, uniform_N[:, None] * mass).clamp(max=total.shape[1] - 1)
    return order.gather(1, chosen)[:, 0]


def _nucleus_mass(total: Tensor, share: float) -> Tensor:
    """Return the mass of the nucleus as the authors of BD3-LM define it (arXiv 2503.09573, their published code).

    It holds the likeliest tokens as long as their cumulative probability is at most `share`, and always the likeliest.
    Unlike in Holtzman et al. 2020 and in `generate.choose`, the token that would cross `share` is left out.
    """
    inside = (total <= share * total[:, -1:]).sum(-1, keepdim=True)
    return total.gather(1, (inside - 1).clamp(min=0))
