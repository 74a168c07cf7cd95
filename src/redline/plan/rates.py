"""How much of a peak real kernels reach. Measured on an H200: benchmarks/results/rates-h200-20261115.json.

On another card these shares are a prior, not a measurement; `redline plan --probe` measures.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

# Mean share of the dense bf16 peak over a layer's matmuls (forward, dgrad, wgrad), by model width.
MATMUL_SHARE = {256: 0.52, 384: 0.61, 512: 0.60, 768: 0.66, 1024: 0.64, 1536: 0.67, 2048: 0.67}
# The share of its own peak that fp8 reaches, over bf16's: energy-h200-20261115.json, long sums exact. Beyond the width
# that was for (1024) the share grew no more: plan-fused-h200-20261116.json.
FP8_OF_BF16, MOST_FP8_SHARE = 0.89, 0.57
# Casts take of what fp8 saves, the more the narrower a layer is, and the fewer tokens it sees at once:
# plan-small-h200-20261118.json, and the fp8 rows of the other plan files. This much at a width of 1024 and 16k tokens.
FP8_LOST = 0.12
BEST_MATMUL_SHARE = {"bf16": 0.775, "fp8": 0.66, "fp16": 0.775, "fp32": 0.77}  # the fastest single one
COPY_SHARE = 0.88  # of the memory's rated bandwidth


@dataclass(frozen=True)
class AttentionRate:
    """Time of a causal pass and its backward = passes over its tensors + FLOPs at a share of the peak."""

    share: float
    passes: float


# By mask and head dimension. Blocks were timed at 64 alone; the other is as much slower than causal attention.
ATTENTION = {
    "causal": {64: AttentionRate(0.394, 31.0), 128: AttentionRate(0.50, 26.0)},  # cuDNN
    # flash by documents, its copies included: throughput-350m-packed-h200-20261116.json
    "documents": {64: AttentionRate(0.371, 58.0), 128: AttentionRate(0.42, 57.0)},
    # flex, or cuDNN with a mask: throughput-bd3lm-h200-20261116.json
    "blocks": {64: AttentionRate(0.394, 88.0), 128: AttentionRate(0.50, 74.0)},
}
LAUNCH_SECONDS = 6e-6  # the host needs this long to start a kernel


def matmul_share(width: int, precision: str = "bf16") -> float:
    """Linear between the measured widths, flat beyond them; fp8 was measured at two."""
    share = _share_of_bf16(width)
    return min(FP8_OF_BF16 * share, MOST_FP8_SHARE) if precision == "fp8" else share


def fp8_lost(micro_tokens: int, width: int) -> float:
    """The part of fp8's saving that a layer of this size does not see."""
    return min(1.0, FP8_LOST * (1024 / width) ** 3 * (16_384 / micro_tokens) ** 0.5)


def _share_of_bf16(width: int) -> float:
    widths = sorted(MATMUL_SHARE)
    if width <= widths[0]:
        return MATMUL_SHARE[widths[0]] * max(width / widths[0], 0.1)
    if width >= widths[-1]:
        return MATMUL_SHARE[widths[-1]]
    low, high = list(pairwise(widths))[bisect_left(widths, width) - 1]
    part = (width - low) / (high - low)
    return MATMUL_SHARE[low] * (1 - part) + MATMUL_SHARE[high] * part


def attention_rate(head_dim: int, mask: str = "causal") -> AttentionRate:
    return ATTENTION[mask][128 if head_dim >= 96 else 64]
