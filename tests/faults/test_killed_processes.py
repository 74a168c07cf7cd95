"""SIGKILL for ranks, torchrun and the supervisor of one run, in turn: no commit is lost, and none of them hangs.

The figures are written to `.kills-MODE.json` after each kill, so that an interrupted test goes on with the next one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from redline.errors import EXIT_PREEMPTED
from redline.recipe.lock import git_state, versions
from redline.runs.events import read_events
from redline.training.checkpoint import committed_steps, newest_valid

ROOT = Path(__file__).parents[2]
KILLS, TIMEOUT = 50, 20
STARTUP_S = 60  # to import torch three times on a busy machine, and to pause before a restart
RECIPE = f"""
model: {{layers: 2, d_model: 32, heads: 2, d_ff: 64}}
data: {{source: CORPUS, tokenizer: bytes, seq_len: 32, workers: 1}}
train: {{device: cpu, precision: fp32, compile: false, epochs: null, steps: 10000000, global_batch: 8, micro_batch: 4}}
eval: {{every: 10000000, sequences: 4, samples: 0}}
checkpoint: {{every: 25, keep: 2, best: false}}
monitor: {{log_every: 25}}
parallel: {{mode: MODE, timeout: {TIMEOUT}}}
"""
VICTIMS = ("rank 0", "rank 1", "torchrun", "supervisor")


class Run:
    """A supervised run of two ranks. Its processes have a mark in their environment."""

    def __init__(self, folder: Path, corpus: Path, mode: str) -> None:
        self.recipe, self.path, self.log = folder / "toy.yaml", folder / "run", folder / "log"
        self.recipe.write_text(RECIPE.replace("CORPUS", str(corpus)).replace("MODE", mode))
        self.mark = f"REDLINE_KILLS={folder}".encode()

    def start(self) -> None:
        words = [str(self.recipe), "--run", str(self.path), "--continue", "--gpus", "2", "--supervise"]
        name, _, value = self.mark.decode().partition("=")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", name: value}
        with open(self.log, "ab") as log:
            command = [sys.executable, "-m", "redline", "train", *words]
            self.supervisor = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def processes(self) -> dict[str, int]:
        """Return the process id of each victim that is alive; other processes under their own number."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if self.mark not in variables or (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    continue
                ranks = [word.partition(b"=")[2].decode() for word in variables if word.startswith(b"RANK=")]
                command = (folder / "cmdline").read_bytes()
                name = f"rank {ranks[0]}" if ranks else "torchrun" if b"torch.distributed.run" in command else ""
                name = "supervisor" if int(folder.name) == self.supervisor.pid else name
                found[name or folder.name] = int(folder.name)
        return found

    @property
    def committed(self) -> int:
        return max(committed_steps(self.path / "checkpoints"), default=0) if self.path.exists() else 0

    def wait(self, condition: Callable[[], bool], limit: float) -> float:
        """Return after how many seconds the condition holds. Time in which this process was stopped does not count."""
        passed, last = 0.0, time.monotonic()
        while not condition():
            assert passed < limit, f"after {passed:.0f} s: {self.processes()}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.02)
            now = time.monotonic()
            passed, last = passed + min(now - last, 0.5), now
        return passed

    def end(self) -> None:
        for pid in self.processes().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def summary(mode: str, done: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what `benchmarks/results/` keeps of the kills."""
    seconds = {victim: sorted(kill["seconds"] for kill in done if kill["victim"] == victim) for victim in VICTIMS}
    return {
        "benchmark": "kills",
        "test": "tests/faults/test_killed_processes.py",
        "mode": mode,
        "machine": f"{os.cpu_count()} CPU cores, two gloo ranks",
        "versions": versions(),
        "git": git_state(),
        "parallel_timeout_s": TIMEOUT,
        "kills": len(done),
        "commits_lost": sum(kill["lost"] for kill in done),
        "seconds_until_training_again": {
            victim: {"count": len(some), "min": some[0], "median": round(statistics.median(some), 1), "max": some[-1]}
            for victim, some in seconds.items()
            if some
        },
        "each": done,
    }


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_ranks_and_their_launchers_are_killed_at_random(tmp_path: Path, corpus: Path, mode: str, say: Any) -> None:
    state = ROOT / f".kills-{mode}.json"
    done = json.loads(state.read_text())["each"] if state.exists() else []
    done = [] if len(done) >= KILLS else done
    chance, run = random.Random(len(done)), Run(tmp_path, corpus, mode)
    run.start()
    try:
        while len(done) < KILLS:
            reached = run.committed
            run.wait(lambda: run.committed > reached and len(run.processes()) >= len(VICTIMS), TIMEOUT + STARTUP_S)  # noqa: B023
            run.wait(lambda until=time.monotonic() + chance.uniform(0, 1): time.monotonic() > until, 10)  # type: ignore[misc]
            victim = chance.choice(VICTIMS)
            starts = len(read_events(run.path / "events.jsonl").of_type("start"))
            before = run.committed
            os.kill(run.processes()[victim], signal.SIGKILL)
            ended = 0.0
            if victim == "supervisor":  # its ranks notice, save and leave; then somebody types the command again
                run.supervisor.wait()
                ended = run.wait(lambda: not run.processes(), TIMEOUT)
                run.start()
            resumed = ended + run.wait(
                lambda: len(read_events(run.path / "events.jsonl").of_type("start")) > starts,  # noqa: B023
                TIMEOUT + STARTUP_S,
            )
            start = read_events(run.path / "events.jsonl").of_type("start")[-1]
            done.append(
                {"victim": victim, "seconds": round(resumed, 1), "lost": max(0, before - start["resumed_from"])}
            )
            state.write_text(json.dumps(summary(mode, done), indent=1) + "\n")
            assert not done[-1]["lost"], done[-1]
        run.wait(lambda: len(run.processes()) >= len(VICTIMS), STARTUP_S)
        run.supervisor.send_signal(signal.SIGTERM)
        assert run.supervisor.wait(TIMEOUT + STARTUP_S) == EXIT_PREEMPTED
    finally:
        run.end()
    newest = newest_valid(run.path / "checkpoints")
    assert newest is not None
    assert int(newest.name[5:]) == run.committed, "the last commit is whole"
    kinds = ", ".join(f"{sum(kill['victim'] == kind for kill in done)} {kind}" for kind in VICTIMS)
    seconds = sorted(kill["seconds"] for kill in done)
    say(
        f"{len(done)} kills ({kinds}): 0 commits lost; training again after {seconds[len(seconds) // 2]} s (median), "
        f"{seconds[-1]} s (longest), parallel.timeout {TIMEOUT} s"
    )
