"""`redline runs prune` deletes old checkpoints and nothing else."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from redline.training.checkpoint import (
    Snapshot,
    commit,
    committed_steps,
    plan_prune,
    prune,
    read_state,
    read_tensors,
    step_name,
)


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Path:
    """A finished run with checkpoints at 1, 2, 3 and 6; its best is at 2."""
    path = tmp_path / "runs/mine"
    shutil.copytree((home / "runs/latest").resolve(), path)
    folder = path / "checkpoints"
    tensors, state = read_tensors(folder / step_name(6), "model"), read_state(folder / step_name(6))
    shutil.rmtree(folder)
    for step in (1, 2, 3, 6):
        commit(folder, Snapshot(step, {"model": tensors}, {**state, "step": step, "best": {"step": 2, "loss": 1.0}}))
    return path


def steps(run: Path) -> list[int]:
    return committed_steps(run / "checkpoints")


def damage(run: Path, step: int) -> None:
    (run / "checkpoints" / step_name(step) / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("words", "left"),
    [((), [2, 6]), (("--keep", "best"), [2, 6]), (("--keep", "last"), [6]), (("--keep", "2"), [2, 3, 6])],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_kept_checkpoints(run: Path, inside: Any, words: tuple[str, ...], left: list[int]) -> None:
    answer = inside("runs", "prune", "--yes", *words)
    assert answer.code == 0, answer.err
    assert steps(run) == left
    assert inside("eval", "mine", "--sequences", "1").code == 0
    assert "freed 0 B" in inside("runs", "prune", *words).out, "nothing is left, and nothing asked"


def test_a_dry_run_removes_nothing(run: Path, inside: Any) -> None:
    row = json.loads(inside("runs", "prune", "--dry-run", "--json").out)
    assert steps(run) == [1, 2, 3, 6]
    assert row["dry_run"]
    (mine,) = row["runs"]
    assert [entry["step"] for entry in mine["removed"]] == [1, 3]
    assert mine["kept"] == [2, 6]
    before = json.loads(inside("runs", "--json").out)[0]["disk_bytes"]
    done = json.loads(inside("runs", "prune", "--yes", "--json").out)
    assert not done["dry_run"]
    assert done["runs"][0]["removed"] == mine["removed"]
    after = json.loads(inside("runs", "--json").out)[0]["disk_bytes"]
    assert before - after == done["bytes"] == row["bytes"] > 100_000


def test_the_newest_valid_checkpoint_is_always_kept(run: Path) -> None:
    """A damaged checkpoint cannot be used, so the newest one before it is kept."""
    damage(run, 6)
    assert prune(run, "last").kept == [3, 6]
    assert steps(run) == [3, 6]


def test_without_a_valid_checkpoint_all_are_kept(run: Path) -> None:
    for step in (1, 2, 3, 6):
        damage(run, step)
    assert prune(run, "last").removed == {}
    assert steps(run) == [1, 2, 3, 6]


def test_a_running_run_is_left_alone(run: Path, inside: Any) -> None:
    with open(run / ".lock", "a+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        answer = inside("runs", "prune", "--keep", "last")
    assert answer.code == 0
    assert "runs/mine" in answer.out
    assert "running" in answer.out
    assert steps(run) == [1, 2, 3, 6]


def test_a_run_that_starts_meanwhile_is_left_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.training import checkpoint as module

    monkeypatch.setattr(module, "is_locked", lambda run: False)  # the look came too early
    with open(run / ".lock", "a+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        reason = prune(run, "last").reason
    assert reason is not None
    assert "using this directory" in reason
    assert steps(run) == [1, 2, 3, 6]


def test_a_failed_run_is_left_alone(run: Path) -> None:
    with open(run / "events.jsonl", "a") as log:
        log.write('{"type":"stop","time":0,"reason":"nonfinite","step":6}\n')
    assert plan_prune(run, "last").reason
    assert prune(run, "last").removed == {}
    assert steps(run) == [1, 2, 3, 6]


def test_leftovers_of_interrupted_saves_are_removed(run: Path, inside: Any) -> None:
    inside("runs", "prune", "--yes")
    rest = run / "checkpoints/.writing-step-00000009-77"
    rest.mkdir()
    (rest / "model.safetensors").write_bytes(bytes(2048))
    answer = inside("runs", "prune", "--yes")
    assert "freed 2.0 KiB" in answer.out
    assert not rest.exists()


def test_prune_asks_for_confirmation(run: Path, inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert inside("runs", "prune").code == 2, "standard output is no terminal: nobody sees the question"
    assert steps(run) == [1, 2, 3, 6]
    monkeypatch.setattr("redline.cli.runs._is_interactive", lambda: True)
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    answer = inside("runs", "prune")
    assert answer.code == 0
    assert "[y/N]" in answer.out + answer.err
    assert steps(run) == [1, 2, 3, 6]
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert inside("runs", "prune").code == 0
    assert steps(run) == [2, 6]
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert inside("runs", "prune", "--keep", "last", "--yes").code == 0
    assert steps(run) == [6]


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_without_a_terminal_nothing_is_deleted(run: Path, inside: Any, words: tuple[str, ...]) -> None:
    answer = inside("runs", "prune", *words)
    assert answer.code == 2
    assert steps(run) == [1, 2, 3, 6]
    assert "--yes" in answer.message
    if words:
        shown = json.loads(answer.out)
        assert shown["dry_run"]
        assert [entry["step"] for entry in shown["runs"][0]["removed"]] == [1, 3]
    else:
        assert "would free" in answer.out
        assert "1, 3" in answer.out


def test_json_asks_for_yes_on_a_terminal_too(run: Path, inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert inside("runs", "prune", "--json").code == 2
    assert steps(run) == [1, 2, 3, 6]


def test_mistakes(run: Path, inside: Any) -> None:
    answer = inside("runs", "prune", "--keep", "some")
    assert answer.code == 2
    assert "--keep: 'some' is not best, last or a number of checkpoints." in answer.message
    assert inside("runs", "prune", "--keep", "0").code == 2
    assert inside("runs", "prone").code == 2
    assert steps(run) == [1, 2, 3, 6]


def test_nothing_to_do(inside: Any) -> None:
    assert inside("runs", "prune").out == "freed 0 B\n"
    assert inside("runs", "-h").code == 0
    assert "--keep" in inside("runs", "prune", "--help").out
