"""A supervised run with repeated faults ends with the same weights as an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.runs.events import read_events
from redline.training.checkpoint import newest_valid, read_tensors

SOURCE = Path(__file__).parents[2] / "src"
RECIPE = """
model: {layers: 2, d_model: 64, heads: 2, d_ff: 128, dropout: 0.1}
data: {source: CORPUS, tokenizer: bytes, seq_len: 64, workers: 1}
train: {device: cpu, precision: fp32, compile: false, epochs: null, steps: STEPS, global_batch: 8, ema: 0.9}
eval: {every: 100000, sequences: 4, samples: 0}
checkpoint: {every: EVERY, keep: 3, best: false}
monitor: {log_every: 50}
parallel: {timeout: 5}
"""
LATEST = 0.8  # fraction of the steps; later there are no faults


class Disturbed:
    """`redline train --supervise`, restarted after exit code 75 as SLURM would, and its faults."""

    def __init__(self, recipe: Path, run: Path) -> None:
        self.recipe, self.run, self.process = recipe, run, None  # type: ignore[var-annotated]

    def words(self) -> list[str]:
        begun = (self.run / "lock.json").exists()
        arguments = ["--resume", str(self.run)] if begun else [str(self.recipe), "--run", str(self.run)]
        return [sys.executable, "-m", "redline", "train", *arguments, "--supervise"]

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        log = open(self.run.with_suffix(".log"), "ab")  # noqa: SIM115 — the child's
        self.process = subprocess.Popen(self.words(), env=environment, stdout=log, stderr=log)

    def trainer(self) -> int | None:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = children.read_text().split() if children.exists() else []
        return int(pids[0]) if pids else None

    def tell(self, number: int) -> bool:
        child = self.trainer()
        if child is not None:
            os.kill(child, number)
        return child is not None

    @property
    def reached(self) -> int:
        """Return the last committed step."""
        folder = self.run / "checkpoints"
        names = [path.name for path in folder.glob("step-*")] if folder.is_dir() else []
        return max((int(name[5:]) for name in names if name[5:].isdigit()), default=0)

    # --- the faults; each returns whether it found something to disturb

    def kill(self) -> bool:
        return self.tell(signal.SIGKILL)

    def hang(self) -> bool:
        return self.tell(signal.SIGSTOP)

    def term(self) -> bool:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return True

    def corrupt(self) -> bool:
        newest = newest_valid(self.run / "checkpoints") if (self.run / "checkpoints").is_dir() else None
        if newest is None or not self.kill():
            return False
        file = newest / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        return True

    def full(self) -> bool:
        """Limit the file size, so that the next save fails as on a full disk."""
        child = self.trainer()
        if child is None:
            return False
        import resource

        before = resource.prlimit(child, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        time.sleep(2.0)
        if self.trainer() == child:
            resource.prlimit(child, resource.RLIMIT_FSIZE, before)
        return True


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Callable[[int, int], Path]:
    def write(steps: int, every: int) -> Path:
        path = tmp_path / "toy.yaml"
        text = RECIPE.replace("CORPUS", str(corpus)).replace("EVERY", str(every)).replace("STEPS", str(steps))
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("steps", "every", "between", "faults", "most"),
    [
        pytest.param(400, 25, (0.5, 1.5), ("kill", "corrupt"), 2, id="short", marks=pytest.mark.soak),
        pytest.param(
            220_000,
            200,
            (20.0, 60.0),
            ("kill", "term", "full", "corrupt", "hang"),
            1000,
            id="an hour",
            marks=[pytest.mark.soak, pytest.mark.timeout(5 * 3600)],
        ),
    ],
)
def test_a_supervised_run_ends_with_the_same_weights(
    recipe: Any,
    tmp_path: Path,
    say: Any,
    steps: int,
    every: int,
    between: tuple[float, float],
    faults: tuple[str, ...],
    most: int,
) -> None:
    file, chance = recipe(steps, every), random.Random(0)
    begin = time.monotonic()
    undisturbed = Disturbed(file, tmp_path / "whole")
    undisturbed.start()
    assert undisturbed.process.wait() == 0, (tmp_path / "whole.log").read_text()[-2000:]
    undisturbed = time.monotonic() - begin

    run, done, begin = Disturbed(file, tmp_path / "parts"), [], time.monotonic()
    run.start()
    due, order, reached = time.monotonic() + chance.uniform(*between), list(faults), 0
    try:
        while (code := run.process.poll()) is None or code == 75:
            if code == 75:
                run.start()
            quiet = time.monotonic() < due or len(done) == most
            if not quiet and reached < (now := run.reached) < LATEST * steps:
                fault = order[len(done) % len(order)] if len(done) < len(order) else chance.choice(order)
                if getattr(run, fault)():
                    done.append(fault)
                    reached = now  # inject the next fault after the next commit
                due = time.monotonic() + chance.uniform(*between)
            time.sleep(0.05)
    finally:
        if run.process.poll() is None:
            run.process.kill()
    seconds = time.monotonic() - begin
    assert code == 0, (tmp_path / "parts.log").read_text()[-3000:]
    assert set(faults) <= set(done), "each kind came at least once"
    for stem in ("model", "ema", "optimizer"):
        expected, got = (
            read_tensors(newest_valid(tmp_path / name / "checkpoints"), stem) for name in ("whole", "parts")
        )
        assert expected.keys() == got.keys()
        assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items()), stem
    recoveries = sum(event["type"] == "recovery" for event in read_events(tmp_path / "parts/events.jsonl"))
    kinds = ", ".join(f"{done.count(kind)} {kind}" for kind in faults)
    say(
        f"supervised: {steps} steps, {len(done)} faults ({kinds}), {recoveries} recoveries, 0 differing bits; "
        f"{undisturbed:.0f} s undisturbed, {seconds:.0f} s disturbed: {undisturbed / seconds:.0%} effective"
    )
