"""Which positions of a sequence are denoised together: its segments, and the blocks they are cut into.

Block diffusion reads a noisy and a clean copy of a sequence side by side. A noisy block sees itself and the clean
blocks before it; a clean block sees the clean ones up to itself. So what is never noised needs no noisy copy, and where
all is one block nobody reads the clean copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Segment:
    name: str
    length: int
    block: int  # positions that are denoised together
    given: bool = False  # never noised: one block
    weight: float = 1.0  # of its part of the loss

    @property
    def blocks(self) -> int:
        return 1 if self.given else self.length // self.block

    @property
    def size(self) -> int:
        """Of its blocks."""
        return self.length if self.given else self.block


@dataclass(frozen=True)
class Layout:
    segments: tuple[Segment, ...]

    @cached_property
    def length(self) -> int:
        return sum(segment.length for segment in self.segments)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each segment begins."""
        return tuple(accumulate((segment.length for segment in self.segments[:-1]), initial=0))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of all blocks, in order."""
        return tuple(segment.size for segment in self.segments for _ in range(segment.blocks))

    @cached_property
    def block_of(self) -> tuple[int, ...]:
        """The block of each position."""
        return tuple(block for block, size in enumerate(self.sizes) for _ in range(size))

    @cached_property
    def noised(self) -> tuple[bool, ...]:
        """Of each position, whether it is ever hidden."""
        return tuple(not segment.given for segment in self.segments for _ in range(segment.length))

    @cached_property
    def noisy(self) -> tuple[int, ...]:
        """Positions of the noisy copy."""
        return tuple(place for place, hidden in enumerate(self.noised) if hidden)

    @cached_property
    def clean(self) -> tuple[int, ...]:
        """Positions of the clean copy, which follows the noisy one."""
        return tuple(range(self.length)) if self._copied else ()

    @property
    def denoised(self) -> int:
        """How many positions are ever hidden."""
        return sum(segment.length for segment in self.segments if not segment.given)

    @property
    def read(self) -> int:
        """Positions that the model reads for one sequence."""
        return self.denoised + (self.length if self._copied else 0)

    @cached_property
    def pairs(self) -> int:
        """Of queries and keys that see each other."""
        return sum(
            _pairs(start, segment) * ((not segment.given) + self._copied)
            for start, segment in zip(self.starts, self.segments, strict=True)
        )

    @property
    def _copied(self) -> bool:
        """Whether anybody reads the clean copy."""
        return sum(segment.blocks for segment in self.segments) > 1


def _pairs(start: int, segment: Segment) -> int:
    """Σ over blocks of size · (positions up to the block's end): what one copy of a segment sees."""
    size, blocks = segment.size, segment.blocks
    return size * (blocks * start + size * blocks * (blocks + 1) // 2)


def uniform(length: int, block: int) -> Layout:
    """A text of one segment."""
    return Layout((Segment("text", length, block),))
