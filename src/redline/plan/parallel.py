"""One batch and one model among several GPUs: which numbers of them divide it, and what each has to hold."""

from __future__ import annotations

from dataclasses import replace

from redline.errors import Problem
from redline.plan.memory import MemoryParts
from redline.plan.shapes import DecoderShape

GATHERED_BLOCKS = 2  # at once: the one that runs, and the one that is fetched meanwhile


def undivided(total: int, world: int) -> Problem | None:
    """What to do about a global batch that so many ranks cannot share; None when they can."""
    if total % world == 0:
        return None
    batches = [number for number in (total // world * world, (total // world + 1) * world) if number]
    fewer = next(number for number in range(world, 0, -1) if total % number == 0)
    more = next((number for number in range(world, total + 1) if total % number == 0), None)
    counts = [str(number) for number in (fewer, more) if number is not None]
    fix = f"Use train.global_batch={' or '.join(map(str, batches))}, or {' or '.join(counts)} GPUs."
    return Problem("train.global_batch", f"{total} sequences cannot be shared by {world} GPUs.", fix)


def share_of(parts: MemoryParts, shape: DecoderShape, world: int, *, accumulates: bool = True) -> MemoryParts:
    """What one of `world` ranks holds under fsdp, where `parts` are those of a model that is not shared, with all
    gradients: its rows of weights, averages and moments, and what is gathered while it is used.

    Micro-batches that accumulate add up whole gradients until the last of a step. With one micro-batch a step, each
    block's gradient is scattered when its backward ends: a rank holds its rows, and the whole of what is under way.
    """
    block = 4.0 * shape.layer_matmul_parameters
    root = 4.0 * (shape.parameters - shape.layers * shape.layer_matmul_parameters)
    gathered = min(GATHERED_BLOCKS * block, shape.layers * block) + root
    return replace(
        parts,
        weights=parts.weights / world + gathered,
        gradients=parts.gradients if accumulates else parts.gradients / world + gathered,
        optimizer=parts.optimizer / world,
    )
