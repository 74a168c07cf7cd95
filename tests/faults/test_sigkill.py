"""R1: a run that is killed repeatedly loses no committed checkpoint and resumes bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.runs.events import read_events
from redline.training.checkpoint import newest_valid, step_name

STEPS = 40
OPTIONS = (f"train.steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=2", "train.ema=0.9", "model.dropout=0.1")


def curve(run: Path) -> list[tuple[Any, ...]]:
    keys = ("step", "tokens", "loss", "lr", "grad_norm")
    return [tuple(e[k] for k in keys) for e in read_events(run / "events.jsonl") if e["type"] == "step"]


def reported(run: Path) -> int:
    """Return the newest step that the raw log reports as committed, ignoring a torn last line."""
    newest = 0
    if (run / "events.jsonl").exists():
        for line in (run / "events.jsonl").read_text().splitlines():
            if '"type":"checkpoint"' in line and line.endswith("}"):
                newest = max(newest, json.loads(line)["step"])
    return newest


class Killer:
    """Kills so many attempts at random instants, mostly while they train and save."""

    def __init__(self, fork: Callable[..., Any], attempt: Callable[..., Any], most: int) -> None:
        self.fork, self.attempt, self.rng, self.most = fork, attempt, random.Random(most), most
        self.kills = self.lost = self.damaged = 0

    def train(self, run: Path) -> None:
        """Train until the run has ended by itself."""
        while not self._one(run):
            self.kills += 1
            damage: list[str] = []
            newest = newest_valid(run / "checkpoints", damage.append)
            self.lost += (int(newest.name[5:]) if newest else 0) < reported(run)
            self.damaged += len(damage)

    def _one(self, run: Path) -> bool:
        def action(child: Any) -> int:
            trainer = self.attempt(run, *OPTIONS, prepare=lambda _: child.say_ready())
            return int(trainer.outcome.exit_code)

        child = self.fork(action)
        if self.kills < self.most:  # a slow machine reaches the end only if it is not killed any more
            if self.rng.random() < 0.85:
                child.await_ready()
            time.sleep(self.rng.uniform(0, 0.12))
            child.send(signal.SIGKILL)
        code = child.wait()
        assert code in (0, -signal.SIGKILL), code
        return bool(code == 0)


@pytest.mark.parametrize("kills", [100, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_sigkill_loses_nothing(fork: Any, attempt: Any, tensors_of: Any, tmp_path: Path, say: Any, kills: int) -> None:
    assert fork(lambda _: attempt(tmp_path / "whole", *OPTIONS).outcome.exit_code).wait() == 0
    expected = tensors_of(tmp_path / "whole/checkpoints" / step_name(STEPS))
    killer, runs = Killer(fork, attempt, kills), 0
    while killer.kills < kills:
        run, runs = tmp_path / "run", runs + 1
        killer.train(run)
        assert curve(run) == curve(tmp_path / "whole")
        got = tensors_of(run / "checkpoints" / step_name(STEPS))
        assert expected.keys() == got.keys()
        assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
        shutil.rmtree(run)
    say(f"R1: {killer.kills} kills in {runs} runs, {killer.lost} commits lost, {killer.damaged} left damage")
    assert len(curve(tmp_path / "whole")) == STEPS
    assert killer.lost == killer.damaged == 0
