"""What a preparation tells of itself while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Progress(NamedTuple):
    stage: str  # "training the tokenizer", "preparing NAME", …
    done: int  # bytes of the source's files, read so far
    total: int | None  # of all of them; None when unknown
    tokens: int  # written so far


ProgressCallback = Callable[[Progress], None]
