"""What a benchmark found, with all that it depends on: the machine, the versions, the code."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from redline.bench.markdown import markdown
from redline.bench.place import BESIDE
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
    conclude: Callable[[list[Row]], dict[str, Any]] | None = None  # what follows from the rows taken together

    def add(self, row: Row) -> None:
        """In the place of the row that has its name, else as the last."""
        names = [known.get("name") for known in self.rows]
        if row["name"] in names:
            self.rows[names.index(row["name"])] = row
        else:
            self.rows.append(row)
        self.save()

    def go_on_from(self, earlier: dict[str, Any]) -> None:
        """Take over the rows of an earlier call; each that is of another day or other code says so."""
        now = self.result()
        source = {key: earlier.get(key) for key in ("date", "versions", "git")}
        same = all(now[key] == value for key, value in source.items())
        self.rows = [row if same or "from" in row else row | {"from": source} for row in earlier["rows"]]

    def save(self) -> None:
        """The JSON, and the same as a page beside it."""
        if self.out is not None:
            result = self.result()
            write_atomically(self.out, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
            write_atomically(self.out.with_suffix(".md"), markdown(result, self.picture))

    def finish(self) -> None:
        """With the last row comes the picture, if there is something to draw."""
        if self.out is not None:
            from redline.bench.pictures import draw

            if (svg := draw(self.result())) is not None:
                write_atomically(self.out.with_suffix(".svg"), svg)
        self.save()

    def files(self) -> list[Path]:
        """What was written."""
        return [path for path in map(self.out.with_suffix, (".json", *BESIDE)) if path.exists()] if self.out else []

    @property
    def picture(self) -> str | None:
        """Its file, once it is there."""
        drawn = self.out.with_suffix(".svg") if self.out else None
        return drawn.name if drawn and drawn.exists() else None

    def result(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "date": time.strftime("%Y-%m-%d"),
            **self.about,
            "machine": self.machine.facts(),
            "versions": {**versions(), **_peers()},
            "git": git_state(),
            "rows": self.rows,
            **(self.conclude(self.rows) if self.conclude else {}),
        }


def _peers() -> dict[str, str]:
    try:
        return {"transformers": metadata.version("transformers")}
    except metadata.PackageNotFoundError:
        return {}
