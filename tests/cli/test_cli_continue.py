"""redline train --continue: start a run or resume it, with words that every launcher can pass on."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from redline.errors import EXIT_DONE, EXIT_USAGE, UsageError
from redline.launch.start import Target, read_target, restart_warning
from redline.runs.events import read_events
from redline.vocabulary import STOP_REQUEST_FILE
from several import Fork, free_port, rank_environment, rank_logs

PAGE = (Path(__file__).parents[2] / "docs" / "launchers.md").read_text(encoding="utf-8")
TORCHRUN = [shlex.split(line) for line in re.findall(r"torchrun (--[^'\n]*)", PAGE)]


def starts(run: Path) -> list[dict[str, Any]]:
    return [e for e in read_events(run / "events.jsonl") if e["type"] == "start"]


def test_continue_starts_then_resumes_then_reports_finished(inside: Any, recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("train", recipe, "eval.samples=0", "--run", str(run), "--continue")
    assert inside(*words).code == EXIT_DONE
    before = (run / "events.jsonl").read_bytes()
    again = inside(*words)
    assert (again.code, (run / "events.jsonl").read_bytes()) == (EXIT_DONE, before)
    assert "finished" in again.message
    assert inside(*words, "train.steps=8").code == EXIT_DONE
    assert [start["resumed_from"] for start in starts(run)] == [None, 6]
    assert inside("train", "--resume", str(run), "train.steps=9").code == EXIT_DONE
    assert inside(*words, "train.steps=8").code == EXIT_DONE
    assert len(starts(run)) == 3, "repeating a command does not take back what --resume has changed"
    assert inside("train", "--run", str(run), "--continue", "train.steps=10").code == EXIT_DONE, "no recipe is needed"
    assert starts(run)[-1]["resumed_from"] == 9


def test_keys_that_a_resume_may_not_change_are_refused(inside: Any, recipe: str, tmp_path: Path) -> None:
    """A value written in another form, or left to the plan, does not count as a change."""
    run = tmp_path / "run"
    words = ("eval.samples=0", "train.warmup_steps=auto", "train.global_batch=0.008k", f"run={run}", "continue=yes")
    assert inside("train", recipe, *words).code == EXIT_DONE
    assert inside("train", recipe, *words).code == EXIT_DONE
    for other in ((recipe, *words, "model.layers=3"), ("pretrain-350m", *words)):
        refused = inside("train", *other)
        assert refused.code == EXIT_USAGE
        assert str(run) in refused.message
    assert len(starts(run)) == 1


def test_a_run_that_was_killed_before_its_first_event_goes_on(inside: Any, recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("train", recipe, "eval.samples=0", "train.warmup_steps=auto", f"run={run}", "continue=1")
    assert inside(*words).code == EXIT_DONE
    (run / "events.jsonl").write_text("")
    assert inside(*words).code == EXIT_DONE
    assert [start["resumed_from"] for start in starts(run)] == [6]


def test_a_run_without_a_log_accepts_resumable_keys(inside: Any, recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("train", recipe, "eval.samples=0", "--run", str(run), "--continue")
    assert inside(*words).code == EXIT_DONE
    (run / "events.jsonl").unlink()
    assert inside(*words, "train.steps=8").code == EXIT_DONE
    assert read_events(run / "events.jsonl")[-1]["step"] == 8


def test_a_finished_run_under_supervision_has_nothing_to_do(inside: Any, recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("train", recipe, "eval.samples=0", "--run", str(run), "--continue")
    assert inside(*words).code == EXIT_DONE
    command = [sys.executable, "-m", "redline", *words, "--supervise"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == EXIT_DONE, done.stderr
    assert len(starts(run)) == 1


def test_a_folder_with_data_is_refused_as_a_run(inside: Any, recipe: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("some text\n" * 100)
    refused = inside("train", recipe, "data.source=notes", "--run", "notes")
    assert refused.code == EXIT_USAGE
    assert sorted(path.name for path in (tmp_path / "notes").iterdir()) == ["a.txt"]


@pytest.mark.parametrize(
    ("words", "options", "environment", "target"),
    [
        (["r", "run=d", "continue=true", "a=1"], Target(), {}, Target(Path("d"), None, True)),
        (["r", "a=1"], Target(), {"REDLINE_RUN": "d", "REDLINE_CONTINUE": "1"}, Target(Path("d"), None, True)),
        (["r", "run=e", "a=1"], Target(), {"REDLINE_RUN": "d"}, Target(Path("e"))),
        (["r", "a=1", "continue=no"], Target(Path("e")), {"REDLINE_CONTINUE": "1"}, Target(Path("e"))),
        (["r", "a=1"], Target(), {"REDLINE_RUN": "", "REDLINE_CONTINUE": "0"}, Target()),
        (["r", "resume=x", "a=1"], Target(), {"REDLINE_RUN": "d", "REDLINE_CONTINUE": "1"}, Target(None, "x")),
    ],
)
def test_the_spellings(words: list[str], options: Target, environment: dict[str, str], target: Target) -> None:
    assert read_target(words, options, environment) == (target, ["r", "a=1"])


@pytest.mark.parametrize(
    ("words", "options", "sweep"),
    [
        (["continue=true"], Target(), False),
        (["run=d", "continue=perhaps"], Target(), False),
        (["run="], Target(), False),
        (["run=d", "run=e"], Target(), False),
        (["run=d"], Target(Path("e")), False),
        (["resume=x"], Target(Path("d"), None, True), False),
        ([], Target(Path("d"), None, True), True),
    ],
)
def test_contradicting_options_are_refused(words: list[str], options: Target, sweep: bool) -> None:
    with pytest.raises(UsageError):
        read_target(words, options, {}, sweep=sweep)


def test_a_restart_without_a_directory_is_refused(inside: Any, recipe: str, tmp_path: Path) -> None:
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "RANK": "0"}
    with pytest.raises(UsageError):
        restart_warning(Target(), restarted)
    first = restarted | {"TORCHELASTIC_RESTART_COUNT": "0"}
    assert "continue=true" in (restart_warning(Target(), first) or "")
    assert restart_warning(Target(Path("d"), None, True), first) is None
    assert restart_warning(Target(), {"RANK": "0"}) is None
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # which `inside` takes back
    assert inside("train", recipe).code == EXIT_USAGE
    assert not (tmp_path / "runs").exists()


def test_rank_0_decides_for_all(world: Any, tmp_path: Path, no_pictures: None) -> None:
    """This includes a rank that checked before the lock existed, while other ranks are still being restarted."""
    run, port = tmp_path / "run", free_port()
    words = ["quickstart", *world.tiny, f"data.source={world.corpus}", f"run={run}", "continue=true"]

    def train(steps: int, *, late: bool) -> int:
        from redline.cli.main import app
        from redline.launch import start as running

        if late:
            running.LOCK = "not-seen-yet"
            running.refuse_run = lambda path: None  # type: ignore[assignment]
        return int(app(["train", *words, f"train.steps={steps}"], standalone_mode=False) or 0)

    assert ended(Fork(lambda: train(2, late=False), {}, tmp_path / "rank-0.log")) == EXIT_DONE, rank_logs(tmp_path, [0])
    forks = [
        Fork(lambda r=rank: train(4, late=r == 1), rank_environment(rank, 2, port), tmp_path / f"rank-{rank}.log")
        for rank in range(2)
    ]
    assert [ended(fork) for fork in forks] == [EXIT_DONE, EXIT_DONE], rank_logs(tmp_path, range(2))
    assert [start["resumed_from"] for start in starts(run)] == [None, 2]


def ended(fork: Fork, timeout: float = 90.0) -> int:
    deadline = time.monotonic() + timeout
    while fork.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    fork.end()
    return int(fork.code or 0)


@pytest.mark.parametrize("words", TORCHRUN, ids=range(len(TORCHRUN)))
def test_torchrun_passes_the_documented_words_on(words: list[str]) -> None:
    """torchrun would parse --run itself, as an abbreviation of --run-path."""
    parsed = parse_args(words)
    assert (parsed.module, parsed.training_script, parsed.training_script_args[0]) == (True, "redline", "train")
    target, rest = read_target(parsed.training_script_args[1:], Target(), {})
    assert target == Target(Path("runs/long"), None, True)
    assert rest == ["pretrain-350m", "data.source=./tokens"]


def test_the_documented_kubernetes_job(inside: Any, recipe: str, tmp_path: Path) -> None:
    """What a pod runs starts a run, and resumes it in the pod that replaces it."""
    line = next(line for line in PAGE.splitlines() if line.startswith("$ redline launch") and "--to k8s" in line)
    words = shlex.split(line)[2:]
    answer = inside(*words[: words.index("--out")])
    assert answer.code == EXIT_DONE, answer.err
    *_, job = yaml.safe_load_all(answer.out)
    container = job["spec"]["template"]["spec"]["containers"][0]
    run = tmp_path / "run"
    places = {
        "pretrain-350m": recipe,
        "data.source=/data/tokens": "eval.samples=0",
        "/data/runs/pretrain-350m": str(run),
    }
    args = [places.get(word, word) for word in container["args"]]
    several = [args.pop(args.index(option)) for option in ("--supervise", "--gpus", "8", "--nodes", "2")]
    assert len(several) == 5, "the rest is the command of one process"
    for steps in (2, 4):
        assert inside(*args, f"train.steps={steps}").code == EXIT_DONE
    assert [start["resumed_from"] for start in starts(run)] == [None, 2]


def test_ranks_that_torchrun_restarts_resume_the_run(world: Any, tmp_path: Path) -> None:
    """Run the documented command with a small model: rank 1 is killed, and torchrun restarts both ranks."""
    run = tmp_path / "run"
    small = ["quickstart", *world.tiny, f"data.source={world.corpus}", "train.steps=100k", "checkpoint.every=20"]
    words = []
    for word in TORCHRUN[0]:
        words += {"pretrain-350m": small, "data.source=./tokens": [], "run=runs/long": [f"run={run}"], "4": ["2"]}.get(
            word, [word]
        )
    log = tmp_path / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words], stdout=file, stderr=file, env=environment
        )
    try:
        wait_for(lambda: any((run / "checkpoints").glob("step-*")), process, log)
        os.kill(rank_1(process.pid), signal.SIGKILL)
        wait_for(lambda: len(starts(run)) == 2, process, log)
        (run / STOP_REQUEST_FILE).touch()
        assert process.wait(90) == 0, log.read_text()
    finally:
        process.terminate()  # torchrun ends its ranks
        process.wait(60)
    first, second = starts(run)
    assert (first["resumed_from"], second["resumed_from"] >= 20) == (None, True)
    assert first["run_id"] == second["run_id"]


def wait_for(done: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def rank_1(parent: int) -> int:
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError("torchrun has no rank 1")
