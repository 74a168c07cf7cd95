"""Systems other than Linux, which these tests only imitate: `macos/` and `windows/` change what Python sees.

No test ran on a Mac or under Windows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline.hardware import host
from redline.training import control

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

EVERY_MODULE = """
import importlib, os, pkgutil, sys
import redline
assert sys.platform == "darwin" and not os.path.exists("/proc/self") and not hasattr(os, "sched_getaffinity")
for module in pkgutil.walk_packages(redline.__path__, "redline."):
    # Triton is not for macOS; the modeling files are copied into exports, and transformers imports them there
    if not module.name.endswith("__main__") and ".triton" not in module.name and ".modeling" not in module.name:
        importlib.import_module(module.name)
        print(module.name)
"""


def on(system: str, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in an imitation of another system; so do the processes that it starts."""
    paths = [str(HERE / system), str(ROOT / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


# --- macOS


def test_every_module_is_imported_on_macos(tmp_path: Path) -> None:
    done = on("macos", "-c", EVERY_MODULE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"redline.training.trainer", "redline.data.stream", "redline.launch.slurm"} <= {*done.stdout.split()}


def test_the_imitation_lacks_what_macos_lacks(tmp_path: Path) -> None:
    checks = "import ctypes, os\nassert not hasattr(os, 'posix_fadvise')\n"
    checks += "for call in (lambda: open('/proc/meminfo'), lambda: ctypes.CDLL('libc.so.6')):\n"
    checks += "    try:\n        call()\n    except OSError:\n        print('absent')\n"
    assert on("macos", "-c", checks, cwd=tmp_path).stdout.split() == ["absent"] * 2


@pytest.mark.parametrize(
    "options", [["--supervise"], pytest.param(["--gpus", "2"], marks=pytest.mark.soak)], ids=" ".join
)
def test_a_run_trains_on_macos(options: list[str], tiny: tuple[str, ...], corpus: Path, tmp_path: Path) -> None:
    words = [*tiny, "train.steps=5", f"data.source={corpus}", "--run", "run", *options]
    done = on("macos", "-m", "redline", "train", "quickstart", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["type"] == "step"] == [1, 2, 3, 4, 5]
    assert events[-1]["reason"] == "steps"
    assert (tmp_path / "run/report.html").is_file()


def test_a_process_runs_until_it_ends(tmp_path: Path) -> None:
    """By /proc and by `ps`. A zombie has ended: its parent has not read its exit code yet."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    for root in (host.ROOT, tmp_path):  # the second has no proc/, as on macOS
        assert host.process_exists(child.pid)
        assert host.process_runs(child.pid, root)
    assert host.list_processes()[child.pid][0] == os.getpid()
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    for root in (host.ROOT, tmp_path):
        assert not host.process_runs(child.pid, root)
    child.wait()
    assert not host.process_exists(child.pid)


def test_the_processes_of_an_attempt_are_found_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.launch import processes

    table = {1: (0, "launchd"), 10: (1, "torchrun"), 11: (10, "python -m redline train"), 12: (11, "cc"),
             20: (1, "python -m redline train"), 30: (1, "another program")}  # fmt: skip
    monkeypatch.setattr(processes, "has_proc", lambda: False)
    monkeypatch.setattr(processes, "list_processes", lambda: table)
    attempt: Any = SimpleNamespace(process=SimpleNamespace(pid=10))
    assert processes.Processes._own_pids(attempt, [11, 20, 30]) == {10, 11, 12, 20}


def test_a_moved_directory_is_found_by_the_call_of_macos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def answer(descriptor: int, command: int, buffer: bytes) -> bytes:
        asked.append((descriptor, command))
        return os.fsencode(tmp_path).ljust(len(buffer), b"\0")

    monkeypatch.setattr(control.fcntl, "F_GETPATH", 50, raising=False)
    monkeypatch.setattr(control.fcntl, "fcntl", answer)
    assert control._path_of(7) == tmp_path
    assert asked == [(7, 50)]


# --- Windows


REFUSAL = "redline does not run on Windows itself; it runs on Linux, and so under WSL 2. Install WSL 2 (`wsl --install`"


@pytest.mark.parametrize("words", [["--help"], ["train"], ["plan", "pretrain-350m", "--gpu", "h100"], ["nonsense"]])
def test_a_command_is_refused_on_windows(words: list[str], tmp_path: Path) -> None:
    done = on("windows", "-m", "redline", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"redline: {REFUSAL}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_the_library_is_refused_on_windows(tmp_path: Path) -> None:
    program = "import redline\nfor name in ('train', 'plan', 'Callback'):\n    try:\n        getattr(redline, name)\n"
    program += "    except redline.UserError as error:\n        print(error.exit_code, error)\n"
    done = on("windows", "-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"2 {REFUSAL}") == 3


def test_the_installed_command_asks_for_the_system_first(installed: Any, tmp_path: Path) -> None:
    done = installed.redline("--help", cwd=tmp_path, PYTHONPATH=str(HERE / "windows"))
    assert (done.returncode, done.stderr.startswith(f"redline: {REFUSAL}")) == (2, True)
