"""Tables on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_WIDEST = 1000


def print_whole(table: Table) -> None:
    """All of it: where a terminal is narrower its lines break, and no column is lost."""
    from rich.console import Console

    whole = Console(width=_WIDEST).measure(table).maximum
    Console(width=max(whole, Console().width)).print(table)
