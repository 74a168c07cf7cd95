"""A benchmark's result as three files: JSON, a Markdown page and an SVG picture; and whether its commit is known."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.pages import markdown
from benchmarks.pictures import draw
from redline.bench import record
from redline.cache import write_atomically
from redline.errors import UsageError

# Results that were measured in a tree with uncommitted changes before that was refused. The docs quote them and say so.
# Nothing can be added to such a file unnoticed, because the digest is that of the whole file (decision 0027).
KNOWN_DIRTY = {
    "gsm8k-hdp-h200-20261116.json": "97ff65a1d823c22c",
    "latent-problems-h200-20261116.json": "ef58976a5b1fab8f",
    "latent-squad-h200-20261116.json": "9bb029033c1bc3dc",
    "memory-hdp-h200-20261116.json": "bd59abf8807e60ff",
    "plan-h200-20261115.json": "9d260ebb0f959841",
    "plan-small-h200-20261118.json": "2637e4098325ca45",
    "prepare-cpu-20261115.json": "7f2436ccafb16986",
    "race-h200-20261118.json": "4aa1d7bbca05d0be",
    "steps-normuon-h200-20261116.json": "a694add122d76b85",
    "throughput-bd3lm-fp8-h200-20261116.json": "6f05b41862cf647b",
    "which-fp8-h200-20261118.json": "3b8a0d85d9a7ebc9",
}


class Record(record.Record):
    siblings = (".md", ".svg")

    def save(self) -> None:
        super().save()
        if self.out is not None:
            picture = self.out.with_suffix(".svg")
            page = markdown(self.result(), picture.name if picture.exists() else None)
            write_atomically(self.out.with_suffix(".md"), page)

    def finish(self) -> list[Path]:
        if self.out is not None and (svg := draw(self.result())) is not None:
            write_atomically(self.out.with_suffix(".svg"), svg)
        return super().finish()


def read_result(path: Path, *, allow_dirty: bool = False) -> Any:
    """Read a result; raise a UsageError if it was measured in a tree with uncommitted changes."""
    content = path.read_bytes()
    result = json.loads(content)
    if not allow_dirty and hashlib.sha256(content).hexdigest()[:16] != KNOWN_DIRTY.get(path.name):
        refuse_dirty(result, path)
    return result


def refuse_dirty(result: Any, path: Path | None) -> None:
    """Raise a UsageError if rows of the result were measured in a tree with uncommitted changes.

    The commit of such a row does not say which code was measured, so nobody can repeat it.
    """
    if rows := dirty_rows(result):
        what = f"{'; '.join(rows[:3])}{' …' if len(rows) > 3 else ''}: measured in a tree with uncommitted changes."
        fix = "Commit the code and measure again, or add --allow-dirty, which marks what is made of it."
        raise UsageError(what, where=str(path), fix=fix)


def dirty_rows(result: Any) -> list[str]:
    """Return the names of the rows that were measured with uncommitted changes; "its run" if the result has no rows."""
    if not isinstance(result, dict):
        return []
    own = _git(result) or _git(result.get("lock"))
    rows = result.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return ["its run"] if _is_dirty(own) else []
    sources = ((row, _git(row.get("lock")) or _git(row.get("from")) or own) for row in rows)
    return [str(row.get("name") or row.get("case")) for row, git in sources if _is_dirty(git)]


def _git(holder: Any) -> Any:
    return holder.get("git") if isinstance(holder, dict) else None


def _is_dirty(git: Any) -> bool:
    return isinstance(git, dict) and bool(git.get("dirty"))
