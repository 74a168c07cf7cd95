"""The result of a benchmark: its rows, and the machine, versions and commit they were measured with."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from redline.cache import write_atomically
from redline.errors import UsageError
from redline.hardware.machine import Machine
from redline.recipe.lock import git_state, versions

Row = dict[str, Any]


@dataclass
class Record:
    """A result that grows row by row. With `out`, each row is written to that file as soon as it is measured."""

    benchmark: str
    machine: Machine
    about: dict[str, Any] = field(default_factory=dict)  # what all rows have in common
    out: Path | None = None
    rows: list[Row] = field(default_factory=list)
    conclude: Callable[[list[Row]], dict[str, Any]] | None = None  # what follows from all rows together

    siblings: ClassVar[tuple[str, ...]] = ()  # suffixes of further files that `finish` writes beside `out`

    def add(self, row: Row) -> None:
        """Replace the row of the same name, or append."""
        names = [known.get("name") for known in self.rows]
        if row["name"] in names:
            self.rows[names.index(row["name"])] = row
        else:
            self.rows.append(row)
        self.save()

    def continue_from(self, earlier: dict[str, Any]) -> None:
        """Take over the rows of an earlier call; rows of another day, commit or version are marked with `from`."""
        now = self.result()
        source = {key: earlier.get(key) for key in ("date", "versions", "git")}
        same = all(now[key] == value for key, value in source.items())
        self.rows = [row if same or "from" in row else row | {"from": source} for row in earlier["rows"]]

    def save(self) -> None:
        """Write the rows measured so far: a benchmark that is killed keeps them."""
        if self.out is not None:
            write_atomically(self.out, json.dumps(self.result(), indent=1, ensure_ascii=False) + "\n")

    def finish(self) -> list[Path]:
        """Write the final result, and return the files that exist now."""
        self.save()
        return [path for path in output_files(self.out, self.siblings) if path.exists()] if self.out else []

    def result(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "date": time.strftime("%Y-%m-%d"),
            **self.about,
            "machine": self.machine.facts(),
            "versions": {**versions(), **_peer_versions()},
            "git": git_state(),
            "rows": self.rows,
            **(self.conclude(self.rows) if self.conclude else {}),
        }


def output_files(out: Path, siblings: tuple[str, ...]) -> list[Path]:
    return [out, *map(out.with_suffix, siblings)]


def check_out(out: Path | None, *, may_exist: bool = False, siblings: tuple[str, ...] = ()) -> None:
    """Refuse an `--out` that cannot be written, or would overwrite a file, before minutes are spent on measuring.

    `may_exist`: the benchmark continues an earlier result.
    """
    if out is None or out.is_dir():
        return
    if out.suffix != ".json":
        fix = "Name an existing folder, or FILE.json."
        raise UsageError("is neither a folder nor a file name that ends in .json.", where=str(out), fix=fix)
    if not out.absolute().parent.is_dir():
        raise UsageError(
            "this folder does not exist.", where=str(out.parent), fix="Create it, or choose another --out."
        )
    taken = [path for path in output_files(out, siblings) if path.exists()]
    if taken and not (may_exist and out.exists()):
        raise UsageError("exists already.", where=str(taken[0]), fix="Choose another --out, or remove the file.")


def file_for(
    out: Path | None, benchmark: str, machine: Machine, *, may_exist: bool = False, siblings: tuple[str, ...] = ()
) -> Path | None:
    """Return the JSON file to write: `out` itself, or BENCHMARK-CARD-DATE.json in the folder `out`."""
    if out is not None and out.is_dir():
        if machine.device == "cpu":
            card = "cpu"
        else:
            card = machine.spec.name if machine.spec else re.sub(r"[^a-z0-9]+", "-", machine.name.lower()).strip("-")
        out = out / f"{benchmark}-{card}-{time.strftime('%Y%m%d')}.json"
    check_out(out, may_exist=may_exist, siblings=siblings)
    return out


def read_earlier(
    out: Path | None, benchmark: str, machine: Machine, row_keys: tuple[str, ...] = ("name",)
) -> dict[str, Any] | None:
    """Return the earlier result in `out`, if there is one; refuse one of another benchmark or machine."""
    if out is None or not out.exists():
        return None
    try:
        result = json.loads(out.read_text(encoding="utf-8"))
        rows, name = result["rows"], result["machine"]["name"]
        complete = isinstance(rows, list) and all(key in row for row in rows for key in row_keys)
        usable = complete and result["benchmark"] == benchmark
    except (OSError, ValueError, KeyError, TypeError):
        usable, name = False, ""
    if not usable:
        fix = "Choose another --out, or remove the file."
        raise UsageError(f"exists already, and is not a result of {benchmark}.", where=str(out), fix=fix)
    if name != machine.name:
        what = f"was measured on {name}; this machine is {machine.name}."
        raise UsageError(what, where=str(out), fix="Choose another --out.")
    return dict(result)


def _peer_versions() -> dict[str, str]:
    try:
        return {"transformers": metadata.version("transformers")}
    except metadata.PackageNotFoundError:
        return {}
