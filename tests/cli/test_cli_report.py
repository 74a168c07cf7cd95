"""`redline report` from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any


def test_the_report_of_one_run_starts_with_a_verdict(home: Path, inside: Any, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert inside("report", "--out", str(out), cwd=home).out == f"{out}\n"
    page = out.read_text()
    data = json.loads(inside("report", "latest", "--json", cwd=home).out)
    assert data["verdict"].startswith("Reached validation loss ")
    assert page.index('<p class="verdict">') < page.index("<dl") < page.index("Planned and measured")
    assert data["repeat"]["commands"][-1].startswith("redline train toy.yaml")
    assert {moment["kind"] for moment in data["timeline"]} >= {"begin", "evaluation", "checkpoint", "stop"}


def test_the_repeated_recipe_is_the_run_again(home: Path, inside: Any, tmp_path: Path) -> None:
    """The page's own recipe, saved under the name that its command asks for, trains to the same loss."""
    import yaml

    data = json.loads(inside("report", "latest", "--json", cwd=home).out)
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(data["recipe"], sort_keys=False))
    command = data["repeat"]["commands"][-1].split()
    assert inside(*command[1:], "--run", "again").code == 0
    again = json.loads(inside("report", "again", "--json").out)
    assert again["headline"]["val_loss"] == data["headline"]["val_loss"]


def test_several_runs_are_compared(home: Path, inside: Any, tmp_path: Path) -> None:
    run = next(path for path in (home / "runs").iterdir() if not path.is_symlink())
    for name in ("one", "two"):
        shutil.copytree(run, tmp_path / "runs" / name)
    lock = tmp_path / "runs" / "two" / "lock.json"
    changed = json.loads(lock.read_text())
    changed["recipe"]["train"]["clip"] = 0.5
    lock.write_text(json.dumps(changed))
    assert inside("report", "one", "two").out == "runs/comparison.html\n"
    assert "are even" in (tmp_path / "runs" / "comparison.html").read_text()
    data = json.loads(inside("report", "one", "two", "--json").out)
    assert [row["key"] for row in data["recipe_differences"]] == ["train.clip"]
    assert [run["name"] for run in data["runs"]] == ["one", "two"]
    assert inside("report", "one", "one").out == "runs/one/report.html\n", "a run is not compared with itself"
    answer = inside("report", "one", "thre")
    assert answer.code == 2
    assert "There is no such run" in answer.message


def test_what_does_not_go_together_and_what_is_one(home: Path, inside: Any, tmp_path: Path) -> None:
    refused = inside("report", "latest", "--json", "--out", "page.html", cwd=home)
    assert refused.code == 2
    assert "--json writes no page" in refused.message
    twice = inside("report", "latest", "latest", "--out", str(tmp_path / "page.html"), cwd=home)
    assert twice.code == 0
    assert "more than once" in twice.err
