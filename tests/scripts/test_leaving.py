"""scripts/leaving.py counts how runs of several ranks end, and goes on where it was interrupted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import leaving

ENDED = {"code": 0, "words": [], "seconds": 1.0}


def test_missing_runs_are_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, seen = tmp_path / "out.json", []

    def run(ranks: int, how: tuple[str, ...], text: Path, folder: Path) -> dict[str, Any]:
        seen.append(how)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return ENDED

    monkeypatch.setattr(leaving, "one_run", run)
    with pytest.raises(KeyboardInterrupt):
        leaving.count(2, 1, out, modes={"a": (2, ("a",)), "b": (4, ("b",))})
    assert leaving.count(2, 1, out, modes={"a": (2, ("a",)), "b": (4, ("b",))}) == 0
    counts = json.loads(out.read_text())["modes"]
    assert {mode: (entry["ranks"], entry["runs"]) for mode, entry in counts.items()} == {"a": (2, 2), "b": (4, 2)}
    assert leaving.count(2, 1, out, modes={"a": (2, ("a",))}) == 0
    assert len(seen) <= 6, "nothing is run twice, except what was interrupted"


@pytest.mark.parametrize("program", ["import os; os.abort()", "print('terminate called')", "pass"])
def test_a_run_that_ends_out_of_order_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(leaving.sys, "executable", str(python))
    ended = leaving.one_run(2, (), tmp_path / "text", tmp_path / "run")
    assert bool(ended["code"] or ended["words"]) == (program != "pass")
    monkeypatch.undo()
    monkeypatch.setattr(leaving, "one_run", lambda *_: ended)
    assert leaving.count(1, 1, tmp_path / "out.json", modes={"a": (2, ())}) == (program != "pass")
