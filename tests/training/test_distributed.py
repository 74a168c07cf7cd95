"""Any number of ranks trains the same model, with DDP and with FSDP."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetuning import Tuning
from latents import Latents, other_base, write_rows
from redline.runs.events import read_events
from redline.training.checkpoint import newest_valid, read_state, read_tensors, verify
from several import Several

STEPS = 5
TEXT = ("data.pack=true", "train.global_batch=8", "train.micro_batch=2", "train.lr=3e-3", f"train.steps={STEPS}")
JOBS: dict[str, tuple[str, ...]] = {
    "text": TEXT,
    "blocks": (*TEXT[1:], "objective=block_diffusion", "block_diffusion.block_size=8", "data.pack=false"),
    "plans": (
        *(*TEXT[1:], "objective=hierarchical_diffusion", "hierarchical_diffusion.question=160", "data.pack=false"),
        *("hierarchical_diffusion.plan=96", "hierarchical_diffusion.execution=128", "data.seq_len=384"),
        "data.source=problems:easy:30",
    ),
    "latents": ("train.global_batch=8", "train.micro_batch=2", f"train.steps={STEPS}"),
    "tuned": ("train.global_batch=4", "train.micro_batch=1", f"train.steps={STEPS}", "model.lora.dropout=0"),
}

Curve = list[tuple[int, float, float]]


def curve(run: Path) -> Curve:
    steps = [e for e in read_events(run / "events.jsonl") if e["type"] == "step"]
    return [(e["step"], e["loss"], e["grad_norm"]) for e in steps]


def losses(run: Path) -> list[float]:
    return [loss for _, loss, _ in curve(run)]


@pytest.mark.parametrize("job", JOBS)
def test_the_number_of_ranks_does_not_change_the_curve(
    several: Several, job: str, tiny_base: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1, 2 and 4 ranks have the same losses within 1e-5."""
    if job == "tuned":
        Tuning(several.world, tiny_base, answers, tmp_path)
    if job == "latents":
        bases = [tiny_base, other_base(tmp_path / "other")]
        Latents(several.world, bases, write_rows(tmp_path / "rows.jsonl"), tmp_path)
    alone = losses(several.run(tmp_path / "1", 1, *JOBS[job]))
    assert len(alone) == STEPS
    for size in (2, 4):
        if job == "latents":  # all ranks run the teachers at the same time
            monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / f"cache-{size}"))
        run = several.run(tmp_path / str(size), size, *JOBS[job])
        assert losses(run) == pytest.approx(alone, abs=1e-5), size


MODES: dict[str, tuple[int, tuple[str, ...]]] = {
    "ddp": (4, ("parallel.mode=ddp",)),
    "rows": (2, ("parallel.mode=fsdp", "parallel.accumulate=sharded")),
    "whole": (4, ("parallel.mode=fsdp", "parallel.accumulate=whole")),
    "groups": (4, ("parallel.mode=hsdp", "parallel.shard_size=2", "parallel.accumulate=sharded")),
    "groups, whole": (4, ("parallel.mode=hsdp", "parallel.shard_size=2", "parallel.accumulate=whole")),
}


@pytest.mark.parametrize("job", JOBS)
def test_every_mode_trains_every_job_to_the_same_curve(
    several: Several, job: str, tiny_base: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradient norms of copies, shards and groups of shards are those of one process within 1e-5."""
    if job == "tuned":
        Tuning(several.world, tiny_base, answers, tmp_path)
    if job == "latents":
        bases = [tiny_base, other_base(tmp_path / "other")]
        Latents(several.world, bases, write_rows(tmp_path / "rows.jsonl"), tmp_path)
    options = (*JOBS[job], *(() if job == "tuned" else ("train.micro_batch=1",)), "train.steps=3")
    alone = np.array(curve(several.run(tmp_path / "1", 1, *options)))
    for mode, (size, how) in MODES.items():
        if job == "latents":
            monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / f"cache-{mode}"))
        found = np.array(curve(several.run(tmp_path / mode, size, *options, *how)))
        assert found == pytest.approx(alone, rel=1e-5, abs=1e-5), mode


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
def test_fsdp_ddp_and_one_process_learn_the_same(several: Several, tmp_path: Path, optimizer: str) -> None:
    """Compares weights, averages and losses, with accumulation, of a model whose rows are not divisible by 3."""
    options = (*TEXT, f"train.optimizer={optimizer}", "train.ema=0.9", "train.global_batch=12", "train.micro_batch=2")
    several.run(tmp_path / "one", 1, *options)
    several.run(tmp_path / "copies", 3, *options, "parallel.mode=ddp")
    several.run(tmp_path / "shares", 3, *options, "parallel.mode=fsdp")
    whole = tmp_path / "one/checkpoints" / f"step-{STEPS:08d}"
    for other in ("copies", "shares"):
        assert np.array(curve(tmp_path / other)) == pytest.approx(np.array(curve(tmp_path / "one")), abs=2e-5), other
        found = tmp_path / other / "checkpoints" / f"step-{STEPS:08d}"
        for stem in ("model", "ema", "optimizer"):
            expected, got = read_tensors(whole, stem), read_tensors(found, stem)
            assert expected.keys() == got.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(got[name], tensor, rtol=2e-4, atol=2e-5, msg=f"{other}/{stem}/{name}")


@pytest.mark.parametrize("mode", MODES)
def test_restarts_with_as_many_ranks_are_bitwise(several: Several, tmp_path: Path, mode: str) -> None:
    size, how = MODES[mode]
    options = (*TEXT, *how, "train.micro_batch=1", "model.dropout=0.1", "train.ema=0.9")
    several.run(tmp_path / "whole", size, *options)
    several.run(tmp_path / "parts", size, *options, prepare=lambda t: stop_at(t, 3))
    assert read_state(newest_valid(tmp_path / "parts/checkpoints"))["step"] == 3
    several.run(tmp_path / "parts", size, *options, resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    for stem in ("model", "ema", "optimizer"):
        expected, got = (read_tensors(newest_valid(tmp_path / r / "checkpoints"), stem) for r in ("whole", "parts"))
        assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


def stop_at(trainer: Any, step: int, rank: int = 1) -> None:
    """Send SIGTERM to one rank only, while that step is computed."""
    plain = trainer.train_step

    def stepped(number: int, *rest: Any) -> Any:
        if number == step - 1 and trainer.ranks.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(number, *rest)

    stepped.clear, stepped.dry_run = plain.clear, plain.dry_run  # type: ignore[attr-defined]
    trainer.train_step = stepped


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_shards_resume_with_fewer_and_with_more_ranks(several: Several, tmp_path: Path, optimizer: str) -> None:
    """2 → 1 → 3 → 2·2 ranks: each resumes where the others stopped, from sharded and single-file checkpoints."""
    options = (
        *TEXT[:-1],
        f"train.optimizer={optimizer}",
        "train.global_batch=12",
        "train.micro_batch=2",
        "train.ema=0.9",
    )
    alone = losses(several.run(tmp_path / "alone", 1, *options, "train.steps=8"))
    run = tmp_path / "run"
    for size, stop in ((2, 2), (1, 4), (3, 6), (4, 8)):
        fsdp = ("parallel.mode=hsdp", "parallel.shard_size=2") if size == 4 else ("parallel.mode=fsdp",)
        steps = ("train.steps=8",)
        if size == 1:
            several.world.run(run, *options, *steps, resume=True, stop_at=stop)
        else:
            options = (*options, "train.micro_batch=1") if size == 4 else options
            several.run(run, size, *options, *steps, *fsdp, resume=stop > 2, prepare=lambda t, s=stop: stop_at(t, s, 0))
        newest = newest_valid(run / "checkpoints")
        assert newest is not None
        assert verify(newest)["step"] == stop
        assert (newest / "model.index.json").exists() == (size > 1)
    assert losses(run) == pytest.approx(alone, abs=1e-5)
