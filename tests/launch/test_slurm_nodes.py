"""A real SLURM of two nodes, of which one is lost while a job of `redline launch` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redline.runs.events import read_events
from redline.training.checkpoint import committed_steps

STEPS = 1200
RECIPE = f"""
model: {{layers: 2, d_model: 32, heads: 2, d_ff: 64}}
data: {{source: CORPUS, tokenizer: bytes, seq_len: 32, workers: 1}}
train: {{device: cpu, precision: fp32, compile: false, epochs: null, steps: {STEPS}, global_batch: 8, micro_batch: 4}}
eval: {{every: 10000, sequences: 4, samples: 0}}
checkpoint: {{every: 20, best: false}}
monitor: {{log_every: 1}}
parallel: {{timeout: 10}}
"""
# A fake python: a rank that ends by itself when the file `gone` tells it that the other node is lost.
TASK = """#!/usr/bin/env bash
echo "$SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME, restart ${SLURM_RESTART_COUNT:-0}" >>tasks
for ((n = 0; n < 6000; n++)); do
  if [[ ${SLURM_RESTART_COUNT:-0} != 0 ]]; then exit 0; fi
  if [[ -f gone ]]; then exit 1; fi
  sleep 0.1
done
"""


@pytest.mark.parametrize(
    "notices",
    [
        pytest.param(False, id="the other rank waits"),
        pytest.param(True, id="the other rank ends", marks=pytest.mark.soak),
    ],
)
def test_a_job_is_requeued_after_a_node_is_lost(launch_on_two: Any, notices: bool) -> None:
    """srun waits for the lost node until SLURM gives it up, so the script does not begin a hopeless attempt before."""
    from loopback import until

    launch = launch_on_two(8)
    tasks, slurm = launch.replace_python(TASK), launch.slurm
    number = launch.number("quickstart", "train.device=cpu", "--nodes", "2", "--time", "10m")
    log = launch.folder / f"quickstart-{number}.log"
    until(lambda: tasks.exists() and len(tasks.read_text().splitlines()) == 2, 60, lambda: str(slurm.job(number)))
    if notices:
        slurm.hosts[1].kill()  # the network refuses connections to it at once
        (launch.folder / "gone").touch()
    else:
        slurm.hosts[1].lose()  # nobody hears of it
    until(lambda: slurm.job(number).get("Restarts") == "1", 120, lambda: f"{slurm.job(number)} {log.read_text()}")
    assert "restarting from the last checkpoint" not in log.read_text()
    slurm.hosts[1].repair()
    slurm.start_node(1)
    facts = slurm.await_end(number, 120, log)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), log.read_text()
    assert sorted(tasks.read_text().splitlines()) == [
        *("0 of 2 on host0, restart 0", "0 of 2 on host0, restart 1"),
        *("1 of 2 on host1, restart 0", "1 of 2 on host1, restart 1"),
    ]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_run_on_two_nodes_survives_one(launch_on_two: Any, corpus: Path) -> None:
    from loopback import until

    launch = launch_on_two(20)
    (launch.folder / "toy.yaml").write_text(RECIPE.replace("CORPUS", str(corpus)))
    number = launch.number("toy.yaml", "--nodes", "2", "--time", "10m")
    run, log, slurm = launch.folder / "runs" / f"toy-{number}", launch.folder / f"toy-{number}.log", launch.slurm

    def describe() -> str:
        return f"{slurm.job(number)}\n{log.read_text() if log.exists() else 'no log'}"

    until(lambda: run.exists() and len(committed_steps(run / "checkpoints")) > 1, 180, describe)
    slurm.hosts[1].lose()
    until(lambda: slurm.job(number).get("Restarts") == "1", 180, describe)
    kept = max(committed_steps(run / "checkpoints"))
    slurm.hosts[1].repair()
    slurm.start_node(1)
    facts = slurm.await_end(number, 300, log)
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("COMPLETED", "1", "0:0"), log.read_text()
    events = list(read_events(run / "events.jsonl"))
    assert [event["resumed_from"] for event in events if event["type"] == "start"] == [None, kept]
    assert [event["step"] for event in events if event["type"] == "step"] == list(range(1, STEPS + 1))
