"""Micro-batch × accumulation × world = global batch. Any two give the third; three must agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from redline.errors import Problem

# ----------------------------------------------------------------------------------------------------
# One batch and one model among several GPUs: which numbers of them divide it, and what each has to hold.


def indivisible_batch(total: int, world: int) -> Problem | None:
    """What to do about a global batch that so many ranks cannot share; None when they can."""
    if total % world == 0:
        return None
    batches = [number for number in (total // world * world, (total // world + 1) * world) if number]
    fewer = next(number for number in range(world, 0, -1) if total % number == 0)
    more = next((number for number in range(world, total + 1) if total % number == 0), None)
    counts = [str(number) for number in (fewer, more) if number is not None]
    fix = f"Use train.global_batch={' or '.join(map(str, batches))}, or {' or '.join(counts)} GPUs."
    return Problem("train.global_batch", f"{total} sequences cannot be shared by {world} GPUs.", fix)


# name → (share of the memory, factor on the global batch), as in the H200 guide
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

    @property
    def global_batch(self) -> int:
        return self.micro * self.accumulation * self.world

    def halved(self) -> BatchPlan | None:
        """The same global batch in micro-batches of half the size, or of the next that divides it; 1 has none."""
        if self.micro == 1:
            return None
        parts = next(n for n in range(2, self.micro + 1) if self.micro % n == 0)
        return BatchPlan(self.micro // parts, self.accumulation * parts, self.world)


def solve_batch(
    global_batch: int | None, micro: int | None, accumulation: int | None, world: int = 1
) -> BatchPlan | Problem | None:
    """The batch when the recipe settles it, what is wrong when it contradicts itself, None when the plan may choose."""
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
    """Largest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, reverse=True)


def round_to_divisible(share: float) -> int:
    """A whole number near it that has divisors of many sizes: no more than four of its bits count."""
    unit = 1 << max(0, math.floor(math.log2(max(1.0, share))) - 3)
    return max(1, round(share / unit)) * unit


def largest_micro_batch(
    global_batch: int, world: int, fits: Callable[[int], bool], cap: int | None = None
) -> BatchPlan:
    """The largest divisor of a rank's share that fits; 1 when nothing does (the warm-up then says what happens)."""
    share = global_batch // world
    micro = next((m for m in _divisors(share) if (cap is None or m <= cap) and fits(m)), 1)
    return BatchPlan(micro, share // micro, world)
