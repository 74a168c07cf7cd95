"""Context parallelism: which positions of a row each rank computes, what this needs of memory and of the links.

`parallel.context: N` splits each sequence over N ranks. A rank computes its positions of every layer, and needs the
keys and values of all positions for attention. Without torch; the exchange itself is in kernels/context.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redline.errors import Problem
from redline.planning.shapes import DecoderShape

BACKENDS = ("gather", "ring")


@dataclass(frozen=True)
class Split:
    """The division of a row over `ranks`; `copies` are the lengths of its parts, each of which is divided by itself.

    Each copy is cut into 2·ranks chunks of equal length, and rank r computes chunks r and 2·ranks − 1 − r. A causal
    query sees the keys before it, so chunk c costs about c + ½: every such pair costs the same, where one chunk each
    would leave the last rank with almost twice the mean. The two copies of block diffusion (noisy and clean) are causal
    over blocks, each by itself.
    """

    copies: tuple[int, ...]
    ranks: int

    @property
    def length(self) -> int:
        """The positions of a whole row."""
        return sum(self.copies)

    @property
    def share(self) -> int:
        """The positions that a rank computes."""
        return self.length // self.ranks

    def chunks(self, rank: int) -> list[tuple[int, int]]:
        """Return (first, end) of the runs of positions that a rank computes, in the order in which it holds them."""
        found, start = [], 0
        for length in self.copies:
            size = length // (2 * self.ranks)
            found += [(start + c * size, start + (c + 1) * size) for c in (rank, 2 * self.ranks - 1 - rank)]
            start += length
        return found

    def positions(self, rank: int) -> list[int]:
        """Return the positions that a rank computes, in the order in which it holds them."""
        return [position for first, end in self.chunks(rank) for position in range(first, end)]


# ----------------------------------------------------------------------------------------------------
# What is refused.


def indivisible_sequence(size: int, copies: Sequence[int], whole: str) -> Problem | None:
    """Return the problem if sequences cannot be split over `size` ranks.

    `copies` are the lengths that must be divisible, and `whole` is why the job needs whole sequences ("" if it does
    not).
    """
    if size == 1:
        return None
    if whole:
        return Problem("parallel.context", f"{size} is not possible: {whole}.", "Use parallel.context=1.")
    uneven = next((length for length in copies if length % (2 * size)), None)
    if uneven is None:
        return None
    what = f"{size} ranks cannot share a sequence of {uneven:,} positions: each takes two of {2 * size} equal chunks."
    lengths = [n for n in (uneven // (2 * size) * 2 * size, -(-uneven // (2 * size)) * 2 * size) if n]
    fewer = next(n for n in range(size, 0, -1) if n == 1 or all(length % (2 * n) == 0 for length in copies))
    key = "data.seq_len" if len(copies) == 1 else "a length"
    fix = f"Use parallel.context={fewer}, or {key} of {' or '.join(f'{n:,}' for n in dict.fromkeys(lengths))}."
    return Problem("parallel.context", what, fix)


def indivisible_world(size: int, world: int) -> Problem | None:
    """Return the problem if `world` ranks cannot form groups of `size`."""
    if world % size == 0:
        return None
    fewer = next(n for n in range(min(size, world), 0, -1) if world % n == 0)
    what = f"{size} does not divide {world} GPU{'s' if world > 1 else ''}: every sequence is split over {size} of them."
    fix = f"Use --gpus {-(-world // size) * size}, or parallel.context={fewer}."
    return Problem("parallel.context", what, fix)


# ----------------------------------------------------------------------------------------------------
# What it costs.


def message_bytes(shape: DecoderShape, tokens: float, bytes_per_value: int) -> float:
    """Return the bytes of the keys and values of `tokens` positions in one layer."""
    return 2.0 * shape.d_kv * tokens * bytes_per_value


def kept_bytes(shape: DecoderShape, tokens: float, size: int, bytes_per_value: int, checkpointing: str) -> float:
    """Return what a rank holds of the keys and values of the other ranks, at the peak.

    `tokens` are the positions of a whole micro-batch. Attention keeps the gathered keys and values of every layer for
    its backward pass, unless they are gathered again for it. One layer's gradients of them exist at a time.
    """
    foreign = message_bytes(shape, tokens, bytes_per_value) * (size - 1) / size
    layers = 1 if checkpointing == "full" else shape.layers
    return (layers + 1) * foreign
