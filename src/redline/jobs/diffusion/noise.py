"""The forward process of block diffusion: which tokens are masked, as a function of (seed, sample, global batch) alone.

Each noised block of each sample has a mask probability p. Over a step, that is over all blocks of its global batch, the
values of p are stratified: the interval is cut into as many equal parts as there are blocks, and each part holds one p.
This is the antithetic sampling of MDLM (arXiv 2406.07524) and BD3-LM (arXiv 2503.09573): every step sees all
noise levels equally, so the loss of a step varies less than with independent draws. Since nothing depends on the rank
or the micro-batch, a resumed run and a run with another world size mask the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from redline.data.index import _GOLDEN, _mix, order_keys, permute
from redline.planning.layout import Layout

# Separate random streams, which also differ from those of the data order and of the held-out split.
_LEVEL_GROUP, _OFFSET_GROUP, _MASK_GROUP = 1 << 20, (1 << 20) + 1, (1 << 20) + 2

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Clip:
    """The interval that mask probabilities are drawn from: BD3-LM's clipped noise schedule."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"[{self.low}, {self.high}] is not an interval within [0, 1]")


def noised_blocks(layout: Layout) -> int:
    """Return how many mask probabilities a sequence has: one per block that is ever masked."""
    return sum(segment.blocks for segment in layout.segments if not segment.given)


def mask_probabilities(seed: int, samples: Int64s, global_batch: int, blocks: int, clip: Clip) -> Float64s:
    """Return p [B, blocks] for these sample numbers, each of which has `blocks` noised blocks.

    A permutation drawn anew for each step assigns the parts of the interval to the blocks of the global batch. The
    offset within a part is one draw per step, shared by all blocks.
    """
    steps_B, members_B = np.divmod(np.asarray(samples, dtype=np.int64), global_batch)
    parts = global_batch * blocks
    slots_BK = members_B[:, None] * blocks + np.arange(blocks)
    keys_BK = np.broadcast_to(order_keys(seed, steps_B, _LEVEL_GROUP)[:, None], slots_BK.shape)
    part_BK = permute(slots_BK.ravel(), parts, keys_BK.ravel()).reshape(slots_BK.shape)
    # 32 bits, so that part + offset is exact in float64. Never 0, so that 1/p is finite if the interval begins at 0.
    offset_B = ((order_keys(seed, steps_B, _OFFSET_GROUP) >> np.uint64(32)) + 0.5) / 2.0**32
    u_BK = (part_BK + offset_B[:, None]) / parts
    p_BK: Float64s = clip.low + (clip.high - clip.low) * u_BK
    return p_BK


def expand_to_positions(p_BK: Float64s, layout: Layout) -> Float64s:
    """Return the p of each position [B, n]; 0 in given segments, which are never masked."""
    if p_BK.shape[1] != noised_blocks(layout):
        raise ValueError(f"{p_BK.shape[1]} mask probabilities for {noised_blocks(layout)} noised blocks")
    noised = np.array(layout.noised)
    # Given blocks have no column in p, so count the noised blocks only.
    begins = np.diff(np.array(layout.block_of), prepend=-1) > 0
    column = np.cumsum(begins & noised) - 1
    return np.where(noised, p_BK[:, np.maximum(column, 0)], 0.0)


def masked_positions(
    seed: int, samples: Int64s, layout: Layout, p_BK: Float64s, never_masked: Bools | None = None
) -> Bools:
    """Return which positions are masked [B, n]; never those of given segments nor those in `never_masked` [B, n]."""
    keys_B = order_keys(seed, np.asarray(samples, dtype=np.int64), _MASK_GROUP)
    steps_n = np.arange(layout.length, dtype=np.uint64) * np.uint64(_GOLDEN)
    bits_Bn = _mix(keys_B[:, None] + steps_n)
    chance_Bn = (bits_Bn >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1) with the 53 bits of a float64
    masked_Bn: Bools = chance_Bn < expand_to_positions(p_BK, layout)
    return masked_Bn if never_masked is None else masked_Bn & ~never_masked
