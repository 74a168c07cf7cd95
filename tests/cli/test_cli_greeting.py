"""`redline` without a verb, and output without a terminal: pipes, CI, a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from redline.runs.events import EventLog


def make(root: Path, name: str, *reason: str) -> Path:
    run = root / "runs" / name
    run.mkdir(parents=True)
    (run / "lock.json").write_text("{}")
    log = EventLog(run / "events.jsonl")
    log.emit("start", resumed_from=None)
    for step in range(2000):  # more than the end of the log that is read
        log.emit("step", step=step, loss=1.0)
    for word in reason:
        log.emit("stop", reason=word)
    log.close()
    return run


def test_without_runs_the_greeting_shows_first_steps(inside: Any) -> None:
    answer = inside()
    assert answer.code == 0
    verbs = [line.split()[1] for line in answer.out.splitlines() if line.startswith("  redline ")]
    assert verbs == ["doctor", "plan", "train", "watch", "report"]
    assert "none in ./runs yet" in answer.out
    assert len(answer.out.splitlines()) <= 15
    assert max(map(len, answer.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("reason", "status", "first"),
    [
        (["steps"], "finished", "redline report one"),
        (["preempted"], "preempted", "redline train --resume one"),
        ([], "crashed", "redline train --resume one"),
    ],
)
def test_next_commands_depend_on_the_newest_run(
    inside: Any, tmp_path: Path, reason: list[str], status: str, first: str
) -> None:
    old = make(tmp_path, "old", "steps")
    os.utime(old / "lock.json", (1, 1))
    make(tmp_path, "one", *reason)
    out = inside().out
    assert f"2 in ./runs, newest: one ({status})" in out
    assert next(line for line in out.splitlines() if line.startswith("  redline")).strip().startswith(first)


def test_a_running_run_can_be_watched(inside: Any, tmp_path: Path) -> None:
    import fcntl

    run = make(tmp_path, "one", "steps")
    with open(run / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        out = inside().out
    assert "one (running)" in out
    assert "redline watch one" in out


def test_a_card_is_named(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.hardware import nvml

    card = nvml.GpuInfo("NVIDIA H200", 150_109_880_320, (9, 0), "580")
    monkeypatch.setattr(nvml, "first_gpu", lambda: card)
    assert "here   NVIDIA H200, 140 GiB" in inside().out
    monkeypatch.setattr(nvml, "first_gpu", lambda: None)
    assert "no NVIDIA GPU" in inside().out


def test_nothing_heavy_is_imported_for_a_greeting(tmp_path: Path) -> None:
    make(tmp_path, "one", "steps")
    program = (
        "import sys\nfrom redline.cli.main import main\nsys.argv = ['redline']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*{'torch', 'numpy', 'matplotlib', 'jinja2'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "one (finished)" in done.stdout
    assert done.stderr.split() == []


@pytest.mark.parametrize("words", [(), ("--help",), ("runs",), ("recipes",), ("plan", "quickstart", "--gpu", "h200")])
def test_piped_output_in_ci_has_no_colour(tmp_path: Path, words: tuple[str, ...]) -> None:
    make(tmp_path, "one", "steps")
    drop = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "PY_COLORS")}
    environment = {**drop, "CI": "1", "GITHUB_ACTIONS": "true", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "redline", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert done.stdout
    assert b"\x1b" not in done.stdout + done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_a_one_line_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "redline"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_runs_as_json_stay_json_when_piped(inside: Any, tmp_path: Path) -> None:
    make(tmp_path, "one", "steps")
    assert [run["name"] for run in json.loads(inside("runs", "--json").out)] == ["one"]
