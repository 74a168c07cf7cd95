"""Which tokens block diffusion hides: a function of (seed, sample, global batch) and of nothing else.

Each noised block of each sample has a probability p with which its tokens are hidden. Over a step, that is over the
blocks of all samples of its global batch, these are spread evenly (stratified): each of as many equal parts of the
interval holds exactly one. So the loss of a step sees all noise levels alike, whoever computes which part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from redline.data.index import _GOLDEN, _mix, order_keys, permute
from redline.planning.layout import Layout

# Randomness for different ends, apart from that of the data's order and split.
_LEVEL_GROUP, _OFFSET_GROUP, _HIDDEN_GROUP = 1 << 20, (1 << 20) + 1, (1 << 20) + 2

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Clip:
    """The interval of p."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"p from {self.low} to {self.high} is no interval within 0 and 1")


def noised_blocks(layout: Layout) -> int:
    """How many values of p a sequence has."""
    return sum(segment.blocks for segment in layout.segments if not segment.given)


def levels(seed: int, samples: Int64s, global_batch: int, blocks: int, clip: Clip) -> Float64s:
    """p for each sample number and each of its `blocks` noised blocks [B, blocks].

    The parts of the interval are dealt out anew in each step, and the place within one's part is the same for all.
    """
    steps_B, members_B = np.divmod(np.asarray(samples, dtype=np.int64), global_batch)
    parts = global_batch * blocks
    places_BK = members_B[:, None] * blocks + np.arange(blocks)
    keys_BK = np.broadcast_to(order_keys(seed, steps_B, _LEVEL_GROUP)[:, None], places_BK.shape)
    part_BK = permute(places_BK.ravel(), parts, keys_BK.ravel()).reshape(places_BK.shape)
    # 32 bits, so that part + within is exact; and never 0, so that 1/p is finite wherever p is not fixed at 0.
    within_B = ((order_keys(seed, steps_B, _OFFSET_GROUP) >> np.uint64(32)) + 0.5) / 2.0**32
    u_BK = (part_BK + within_B[:, None]) / parts
    p_BK: Float64s = clip.low + (clip.high - clip.low) * u_BK
    return p_BK


def at_positions(p_BK: Float64s, layout: Layout) -> Float64s:
    """p of each position [B, n]; 0 for what is given, which is never hidden."""
    if p_BK.shape[1] != noised_blocks(layout):
        raise ValueError(f"{p_BK.shape[1]} levels for {noised_blocks(layout)} noised blocks")
    noised = np.array(layout.noised)
    # Given blocks have no level of their own: the noised ones are counted apart.
    begins = np.diff(np.array(layout.block_of), prepend=-1) > 0
    column = np.cumsum(begins & noised) - 1
    return np.where(noised, p_BK[:, np.maximum(column, 0)], 0.0)


def hidden(seed: int, samples: Int64s, layout: Layout, p: Float64s, never: Bools | None = None) -> Bools:
    """Which positions are masked [B, n]; neither given ones nor those of `never` [B, n]."""
    keys_B = order_keys(seed, np.asarray(samples, dtype=np.int64), _HIDDEN_GROUP)
    places_n = np.arange(layout.length, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits_Bn = _mix(keys_B[:, None] + places_n)
    chance_Bn = (bits_Bn >> np.uint64(11)) * 2.0**-53
    masked_Bn: Bools = chance_Bn < at_positions(p, layout)
    return masked_Bn if never is None else masked_Bn & ~never
