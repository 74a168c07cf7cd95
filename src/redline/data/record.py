"""A problem and its solution: what is asked, how to go about it, the steps, and the number that they end with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    question: str
    plan: str  # sub-questions, one a line; empty where the source has none
    execution: str  # steps, one a line
    answer: str  # a number, as text

    @property
    def key(self) -> int:
        """64 bits that stand for what is asked; not for how it is answered."""
        return int.from_bytes(hashlib.blake2b(self.question.encode(), digest_size=8).digest(), "little")
