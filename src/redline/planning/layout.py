"""The layout of a sequence for block diffusion: its segments, and the blocks of positions that are denoised together.

Block diffusion (BD3-LM, arXiv 2503.09573) computes a noisy and a clean copy of a sequence side by side. A noisy block
attends to itself and to the clean blocks before it; a clean block attends to the clean blocks up to itself. A segment
that is never noised therefore needs no noisy copy, and a sequence of a single block needs no clean copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Segment:
    name: str
    length: int
    block: int  # number of positions that are denoised together
    given: bool = False  # part of the input that is never noised; it is one block
    weight: float = 1.0  # factor on this segment's part of the loss

    @property
    def blocks(self) -> int:
        return 1 if self.given else self.length // self.block

    @property
    def size(self) -> int:
        """The number of positions in each of its blocks."""
        return self.length if self.given else self.block


@dataclass(frozen=True)
class Layout:
    segments: tuple[Segment, ...]

    @cached_property
    def length(self) -> int:
        return sum(segment.length for segment in self.segments)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first position of each segment."""
        return tuple(accumulate((segment.length for segment in self.segments[:-1]), initial=0))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The size of each block, in order."""
        return tuple(segment.size for segment in self.segments for _ in range(segment.blocks))

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """The index of the block of each position."""
        return tuple(block for block, size in enumerate(self.sizes) for _ in range(size))

    @cached_property
    def noised(self) -> tuple[bool, ...]:
        """For each position, whether it is ever masked."""
        return tuple(not segment.given for segment in self.segments for _ in range(segment.length))

    @cached_property
    def noisy(self) -> tuple[int, ...]:
        """The positions in the noisy copy."""
        return tuple(position for position, noised in enumerate(self.noised) if noised)

    @cached_property
    def clean(self) -> tuple[int, ...]:
        """The positions in the clean copy, which follows the noisy one."""
        return tuple(range(self.length)) if self._copied else ()

    @property
    def denoised(self) -> int:
        """The number of positions that are ever masked."""
        return sum(segment.length for segment in self.segments if not segment.given)

    @property
    def read(self) -> int:
        """The number of positions that the model computes for one sequence."""
        return self.denoised + (self.length if self._copied else 0)

    @cached_property
    def pairs(self) -> int:
        """The number of (query, key) pairs that the mask allows."""
        return sum(
            _pairs(start, segment) * ((not segment.given) + self._copied)
            for start, segment in zip(self.starts, self.segments, strict=True)
        )

    @property
    def _copied(self) -> bool:
        """Whether the clean copy is needed: a noisy block attends to the blocks before it."""
        return sum(segment.blocks for segment in self.segments) > 1


def _pairs(start: int, segment: Segment) -> int:
    """Return the (query, key) pairs of one copy: Σ over blocks of size · (positions up to the block's end)."""
    size, blocks = segment.size, segment.blocks
    return size * (blocks * start + size * blocks * (blocks + 1) // 2)


def uniform(length: int, block: int) -> Layout:
    """Return the layout of a text in one segment of equal blocks."""
    return Layout((Segment("text", length, block),))


_MOST_STAGES = 6  # every stage has a mask of its own, for which a compiled model is compiled again


def growing_layouts(final: Layout) -> list[Layout]:
    """Return layouts of the same sequence whose blocks grow from one position to those of `final`, the last of them.

    The sizes grow by about the same factor from one layout to the next: 1, 2, 4, 8, 16 for blocks of 16.
    """
    largest = max((segment.block for segment in final.segments if not segment.given), default=1)
    count = min(_MOST_STAGES, max(1, math.ceil(math.log2(largest)) + 1))
    return [
        Layout(tuple(_with_smaller_blocks(segment, stage / (count - 1)) for segment in final.segments))
        for stage in range(count - 1)
    ] + [final]


def _with_smaller_blocks(segment: Segment, share: float) -> Segment:
    """Return the segment with the divisor of its blocks that is nearest to block^share, by its logarithm."""
    if segment.given:
        return segment
    divisors = [size for size in range(1, segment.block + 1) if segment.block % size == 0]
    wanted = share * math.log(segment.block)
    return replace(segment, block=min(divisors, key=lambda size: abs(math.log(size) - wanted)))
