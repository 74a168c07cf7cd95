"""Random draws for generated data, which are the same on every machine and with every version of Python."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
Range = tuple[int, int]


class Chance:
    """A random generator that gives the same numbers for a key on every machine and with every version of Python."""

    def __init__(self, *key: object) -> None:
        self._key, self._pool = repr(key).encode(), 0

    def below(self, n: int) -> int:
        """Draw from range(n)."""
        if self._pool < 1 << 64:  # too few bits are left for a uniform draw
            self._key = hashlib.blake2b(self._key).digest()
            self._pool = int.from_bytes(self._key, "little")
        self._pool, drawn = divmod(self._pool, n)
        return drawn

    def of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def between(self, bounds: Range) -> int:
        return bounds[0] + self.below(bounds[1] - bounds[0] + 1)
