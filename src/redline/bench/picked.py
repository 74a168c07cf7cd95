"""Some of a benchmark's contenders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from redline.errors import UsageError


class Named(Protocol):
    @property
    def name(self) -> str: ...


Contender = TypeVar("Contender", bound=Named)


def picked(contenders: Sequence[Contender], only: str | None) -> tuple[Contender, ...]:
    """Those whose name is one of the words, or has it in it where none is; all without words."""
    words = None if only is None else [word.strip() for word in only.split(",") if word.strip()]
    if words is None:
        return tuple(contenders)
    names = "; ".join(one.name for one in contenders)
    for word in words or [""]:
        if not word or not any(word in one.name for one in contenders):
            raise UsageError(f"{word!r} is in no name of the list.", where="--only", fix=f"There are: {names}.")
    whole = {one.name for one in contenders}
    return tuple(
        one for one in contenders if any(word == one.name if word in whole else word in one.name for word in words)
    )
