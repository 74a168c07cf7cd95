"""How a global batch is divided: micro-batch × accumulation × world size / context = global batch.

The `context` ranks that split every sequence among them read the same rows, so they count as one. The recipe may state
any two of micro-batch, accumulation and global batch; if it states all three, they must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from redline.errors import Problem


def indivisible_batch(total: int, world: int) -> Problem | None:
    """Return the problem if `world` ranks cannot divide the global batch evenly, with numbers that would work."""
    if total % world == 0:
        return None
    batches = [number for number in (total // world * world, (total // world + 1) * world) if number]
    fewer = next(number for number in range(world, 0, -1) if total % number == 0)
    more = next((number for number in range(world, total + 1) if total % number == 0), None)
    counts = [str(number) for number in (fewer, more) if number is not None]
    fix = f"Use train.global_batch={' or '.join(map(str, batches))}, or {' or '.join(counts)} GPUs."
    return Problem("train.global_batch", f"{total} sequences cannot be shared by {world} GPUs.", fix)


# preset → (share of the GPU's memory that a plan may use, factor on the global batch)
PRESETS = {
    "conservative": (0.45, 0.5),
    "recommended": (0.65, 1.0),
    "aggressive": (0.80, 1.5),
    "extreme": (0.92, 2.0),
}


@dataclass(frozen=True)
class BatchPlan:
    micro: int
    accumulation: int
    world: int = 1
    context: int = 1  # ranks that split each sequence

    @property
    def data_ranks(self) -> int:
        """The number of groups of ranks that read different rows."""
        return self.world // self.context

    @property
    def global_batch(self) -> int:
        return self.micro * self.accumulation * self.data_ranks

    def to_json(self) -> list[int]:
        """Return the arguments of this class."""
        return [self.micro, self.accumulation, self.world, *([self.context] if self.context > 1 else [])]

    def halved(self) -> BatchPlan | None:
        """Return the same global batch in smaller micro-batches, or None if the micro-batch is 1 already.

        The size is divided by its smallest prime factor, so that accumulation stays a whole number.
        """
        if self.micro == 1:
            return None
        parts = next(n for n in range(2, self.micro + 1) if self.micro % n == 0)
        return replace(self, micro=self.micro // parts, accumulation=self.accumulation * parts)


def solve_batch(
    global_batch: int | None, micro: int | None, accumulation: int | None, world: int = 1
) -> BatchPlan | Problem | None:
    """Return the batch that the recipe determines, a problem if it contradicts itself, None if the plan may choose."""
    if global_batch and micro and accumulation and micro * accumulation * world != global_batch:
        return Problem(
            "train.global_batch",
            f"{global_batch} is not micro_batch {micro} × accumulation {accumulation} × {world} GPU(s)"
            f" = {micro * accumulation * world}.",
            "Give any two of the three.",
        )
    if micro and accumulation:
        return BatchPlan(micro, accumulation, world)
    part = micro or accumulation
    if global_batch and part and global_batch % world:
        return indivisible_batch(global_batch, world)
    if global_batch and part:
        if global_batch % (part * world):
            name = "micro_batch" if micro else "accumulation"
            return Problem(
                f"train.{name}",
                f"{part} × {world} GPU(s) does not divide train.global_batch {global_batch}.",
                f"Use a divisor of {global_batch // world}.",
            )
        other = global_batch // (part * world)
        return BatchPlan(part, other, world) if micro else BatchPlan(other, part, world)
    return None


def _divisors(number: int) -> list[int]:
    """Return the divisors, largest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, reverse=True)


def round_to_divisible(share: float) -> int:
    """Round to a whole number with many divisors, so that the plan can choose among many micro-batches.

    Only the four leading bits are kept; all others become zero.
    """
    unit = 1 << max(0, math.floor(math.log2(max(1.0, share))) - 3)
    return max(1, round(share / unit)) * unit


def largest_micro_batch(
    global_batch: int, world: int, fits: Callable[[int], bool], cap: int | None = None
) -> BatchPlan:
    """Return the batch with the largest micro-batch that divides a rank's share and fits.

    If none fits, the micro-batch is 1: the estimate may be wrong, and the dry run before step 1 reports a real failure.
    """
    share = global_batch // world
    micro = next((m for m in _divisors(share) if (cap is None or m <= cap) and fits(m)), 1)
    return BatchPlan(micro, share // micro, world)
