"""A real SLURM: jobs of `redline launch` that are preempted, cancelled and refused."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from redline.runs.events import read_events

STEPS = 150
RECIPE = f"""
description: a toy
model: {{layers: 2, d_model: 32, heads: 2, d_ff: 64}}
data: {{source: CORPUS, tokenizer: bytes, seq_len: 32, workers: 1}}
train: {{device: cpu, precision: fp32, compile: false, steps: {STEPS}, global_batch: 8, micro_batch: 4}}
eval: {{every: 1000, sequences: 4, samples: 0}}
checkpoint: {{every: 1000}}
monitor: {{log_every: 1}}
"""
# A fake python: a task that reports when it runs, and exits with 75 on a signal.
TASK = """#!/usr/bin/env bash
trap 'echo "$SLURM_PROCID leaves" >>tasks; exit 75' TERM USR1
echo "$REDLINE_DEADLINE $MASTER_ADDR" >deadline
echo "$SLURM_PROCID of $SLURM_NTASKS, restart ${SLURM_RESTART_COUNT:-0}" >>tasks
for ((n = 0; n < ${SLURM_RESTART_COUNT:-600}; n++)); do sleep 0.1; done
"""


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events.jsonl") if event["type"] == kind] if run.exists() else []


def test_a_preempted_run_requeues_resumes_and_finishes(launch: Any, slurm: Any, corpus: Path) -> None:
    """Two ranks of a real run receive SLURM's signal before the time limit."""
    from loopback import until

    (launch.folder / "toy.yaml").write_text(RECIPE.replace("CORPUS", str(corpus)))
    prompt = 'eval.prompt=it\'s $HOME, "you" & `x`'
    number = launch.number("toy.yaml", prompt, "--gpus-per-node", "2", "--time", "10m")
    run, log = launch.folder / "runs" / f"toy-{number}", launch.folder / f"toy-{number}.log"

    def text() -> str:
        return log.read_text() if log.exists() else str(slurm.job(number))

    until(lambda: len(events(run, "step")) >= 3, 120, text)
    slurm.ask("scancel", "--signal=USR1", "--batch", number)
    facts = slurm.await_end(number, 150, log)
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("COMPLETED", "1", "0:0"), text()
    stops, starts = events(run, "stop"), events(run, "start")
    assert [stop["reason"] for stop in stops] == ["preempted", "steps"]
    assert [start["resumed_from"] for start in starts] == [None, stops[0]["step"]]
    assert [step["step"] for step in events(run, "step")] == list(range(1, STEPS + 1)), "none lost, none repeated"
    lock = json.loads((run / "lock.json").read_text())
    assert lock["recipe"]["eval"]["prompt"] == prompt.partition("=")[2]
    assert events(run, "plan")[0]["gpus"] == 2
    assert text().count("requeueing the job") == 1


@pytest.mark.soak
@pytest.mark.parametrize("number_sent", [signal.SIGKILL, signal.SIGSTOP], ids=["lost", "hung"])
def test_a_lost_rank_resumes_where_it_was(launch: Any, slurm: Any, corpus: Path, number_sent: int) -> None:
    """The rank is restarted in the same allocation; the stack of a hung rank is logged first."""
    from loopback import until

    (launch.folder / "toy.yaml").write_text(RECIPE.replace("CORPUS", str(corpus)))
    words = ("train.steps=600", "checkpoint.every=20", "parallel.timeout=4", "--gpus-per-node", "2", "--time", "10m")
    number = launch.number("toy.yaml", *words)
    run, log = launch.folder / "runs" / f"toy-{number}", launch.folder / f"toy-{number}.log"
    until(lambda: len(events(run, "checkpoint")) >= 2, 120, lambda: str(slurm.job(number)))
    os.kill(pid_of("1", number), number_sent)
    facts = slurm.await_end(number, 200, log)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "0"), log.read_text()
    assert len(events(run, "start")) == 2
    assert events(run, "start")[1]["resumed_from"] >= 40
    assert events(run, "recovery")[0]["message"].startswith("the ranks exited with ")
    assert ("most recent call first" in log.read_text()) == (number_sent == signal.SIGSTOP)


def pid_of(rank: str, job: str) -> int:
    """Return the process that trains as this rank: the child of the task's process."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            variables = dict(word.split("=", 1) for word in (folder / "environ").read_text().split("\0") if "=" in word)
        except (OSError, UnicodeDecodeError):
            continue
        if "REDLINE_PULSE" in variables and (variables.get("RANK"), variables.get("SLURM_JOB_ID")) == (rank, job):
            return int(folder.name)
    raise AssertionError(f"no rank {rank} of job {job}")


@pytest.fixture
def tasks(launch: Any) -> Path:
    """Make a venv with a fake python, and return the file to which its tasks write."""
    return Path(launch.replace_python(TASK))


def test_a_run_resumes_after_a_more_urgent_job(launch: Any, slurm: Any, tasks: Path) -> None:
    from loopback import until

    number = launch.number("quickstart", "train.device=cpu", "--gpus-per-node", "2", "--time", "10m")
    until(lambda: tasks.exists() and len(tasks.read_text().splitlines()) == 2, 30, lambda: str(slurm.job(number)))
    slurm.ask("sbatch", "--partition=urgent", "--ntasks=2", "--output=/dev/null", "--wrap=true")
    facts = slurm.await_end(number, 60, launch.folder / f"quickstart-{number}.log")
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1")
    assert sorted(tasks.read_text().splitlines()) == [
        *("0 leaves", "0 of 2, restart 0", "0 of 2, restart 1"),
        *("1 leaves", "1 of 2, restart 0", "1 of 2, restart 1"),
    ]


def test_a_cancelled_job_is_not_requeued(launch: Any, slurm: Any, tasks: Path) -> None:
    from loopback import until

    number = launch.number("quickstart", "train.device=cpu", "--time", "10m")
    until(tasks.exists, 30, lambda: str(slurm.job(number)))
    deadline, address = (launch.folder / "deadline").read_text().split()
    assert 500 < int(deadline) - time.time() <= 570, "ten minutes less half of one"
    assert address == "localhost"
    slurm.ask("scancel", number)
    facts = slurm.await_end(number, 60, launch.folder / f"quickstart-{number}.log")
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0")


def test_slurms_message_for_a_wrong_partition(launch: Any) -> None:
    done = launch("quickstart", "train.device=cpu", "--partition", "nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith("redline: sbatch: SLURM refuses the job: invalid partition specified: nowhere")
    assert "Traceback" not in done.stderr


def test_slurms_message_for_too_many_gpus(launch: Any) -> None:
    done = launch("quickstart", "--gpus-per-node", "8")
    assert done.returncode == 1
    assert "Invalid generic resource (gres) specification" in done.stderr


def test_sbatch_reads_the_options_as_meant(launch: Any, slurm: Any, tasks: Path) -> None:
    """sbatch has its own rules for quotes in #SBATCH lines."""
    number = launch.number("quickstart", "train.device=cpu", "--time", "1-02:00:00", "--sbatch=--comment='a b'")
    facts = slurm.ask("scontrol", "show", "job", number)
    slurm.ask("scancel", number)
    assert f"WorkDir={launch.folder}\n" in facts
    assert f"StdOut={launch.folder}/quickstart-{number}.log\n" in facts
    assert "TimeLimit=1-02:00:00" in facts
    assert "Comment=a b" in facts
    assert not (os.path.lexists(launch.folder / "a")), "nothing was split"
