"""What a benchmark found, with all that it depends on: the machine, the versions, the code."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from redline.cache import write_atomically
from redline.hardware.machine import Machine
from redline.recipe.lock import git_state, versions

Row = dict[str, Any]


@dataclass
class Record:
    """Grows by a row at a time; when it has a file, every row is safe there at once."""

    benchmark: str
    machine: Machine
    about: dict[str, Any] = field(default_factory=dict)  # what all rows have in common
    out: Path | None = None
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        if self.out is not None:
            write_atomically(self.out, json.dumps(self.result(), indent=1, ensure_ascii=False) + "\n")

    def result(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "date": time.strftime("%Y-%m-%d"),
            **self.about,
            "machine": self.machine.facts(),
            "versions": {**versions(), **_peers()},
            "git": git_state(),
            "rows": self.rows,
        }


def _peers() -> dict[str, str]:
    try:
        return {"transformers": metadata.version("transformers")}
    except metadata.PackageNotFoundError:
        return {}
