"""What is due to be measured on a GPU: in order, within a time limit, and only of code that is committed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_todo
from benchmarks.gpu_todo import DONE, TASKS, run, table

ROOT = Path(__file__).parents[2]
CLEAN = {"commit": "c0ffee", "dirty": False}
# Writes down its name and exits as the variable FAILS says.
SUITE = 'echo "$2" >>"$1/order"; echo "${FAILS:-0}" >"$1/$2.exit"'


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of results, beside a suite that does nothing."""
    suite = tmp_path / "benchmarks/suite.sh"
    suite.parent.mkdir()
    suite.write_text(SUITE)
    monkeypatch.setattr(gpu_todo, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_todo, "git_state", lambda: dict(CLEAN))
    monkeypatch.delenv("TOKENS", raising=False)
    return tmp_path / "out"


def order(out: Path) -> list[str]:
    return (out / "order").read_text().split()


def names(*, without_data: bool = True) -> list[str]:
    return [task.name for task in TASKS if not (without_data and task.needs)]


def test_tasks_run_in_order_and_only_once(out: Path) -> None:
    assert run(out, 60, only="startup,tests") == 0
    assert order(out) == ["tests", "startup"]
    assert run(out, 60) == 0
    assert order(out) == ["tests", "startup", *(name for name in names() if name not in ("tests", "startup"))]
    assert run(out, 60) == 0
    assert len(order(out)) == len(names())


def test_another_commit_starts_anew(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(out, 60, only="tests")
    monkeypatch.setattr(gpu_todo, "git_state", lambda: {"commit": "decaf", "dirty": False})
    run(out, 60, only="tests")
    assert order(out) == ["tests", "tests"]


def test_what_does_not_fit_into_the_time_is_left_for_the_next_call(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    least = min(task.seconds for task in TASKS)
    assert run(out, (least + 5) / 60) == 0
    done = set(order(out))
    assert done
    assert all(task.seconds <= least + 5 for task in TASKS if task.name in done)
    assert "skipped tests" in capsys.readouterr().out


def test_a_failure_is_the_exit_code(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "3")
    assert run(out, 60, only="muon") == 1
    assert json.loads((out / DONE).read_text())["tasks"]["muon"]["exit"] == 1


@pytest.mark.parametrize("state", [{"commit": "c0ffee", "dirty": True}, {"commit": None, "dirty": None}])
def test_code_that_was_not_committed_is_not_measured(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: dict[str, Any]
) -> None:
    monkeypatch.setattr(gpu_todo, "git_state", lambda: state)
    assert run(out, 60) == 2
    assert "committed" in capsys.readouterr().err
    assert not out.exists()


def test_every_task_is_a_part_of_the_suite() -> None:
    suite = (ROOT / "benchmarks/suite.sh").read_text()
    assert {task.name for task in TASKS} <= set(re.findall(r"^    ([a-z0-9]+)\)", suite, re.MULTILINE))


def test_the_page_has_the_tasks() -> None:
    assert table() in (ROOT / "docs/gpu-todo.md").read_text()
