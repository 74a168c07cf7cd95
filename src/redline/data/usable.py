"""The rows of a source that can be used, and what became of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redline.data.chat import RowTally
from redline.errors import UserError

T = TypeVar("T")
Fields = Mapping[str, Any]  # of a row


class UnusableError(Exception):
    """Why a row cannot be used."""


@dataclass(frozen=True)
class RowReport:
    """What became of a source's rows."""

    source: str
    rows: int
    bad: int = 0
    reasons: dict[str, int] = field(default_factory=dict)  # why rows are bad
    examples: list[str] = field(default_factory=list)  # where the first of them stand

    def line(self) -> str:
        """For people."""
        told = f"{self.source}: {self.rows:,} rows"
        if not self.bad:
            return told
        why = ", ".join(f"{count:,} × {reason}" for reason, count in self.reasons.items())
        return f"{told}, of which {self.bad:,} cannot be used: {why}; the first is {self.examples[0]}"


def usable(
    source: str, rows: Callable[[RowTally], Iterable[tuple[str, Fields]]], read: Callable[[Fields], T], fix: str
) -> tuple[list[T], RowReport]:
    """Every usable row, in an order that never changes. More than half unusable, or nothing at all, is refused."""
    tally, found = RowTally(source), []
    for place, row in rows(tally):
        try:
            found.append(read(row))
        except UnusableError as reason:
            tally.bad_row(place, str(reason), fix)
    tally.refuse_mostly_bad()
    if not found:
        raise UserError("there is no row in it.", where=source, fix=fix)
    counts = tally.counts()
    return found, RowReport(source, tally.rows, counts["bad_rows"], counts["bad_rows_by_reason"], tally.examples)
