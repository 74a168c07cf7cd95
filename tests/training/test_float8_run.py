"""Runs in fp8: choice, training, saving and resuming. Here with the reference kernels; tests/gpu uses the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import UserError
from redline.hardware.machine import Machine
from redline.jobs.objective import Sampling
from redline.kernels import float8_choice
from redline.recipe.resolve import DataFacts, resolve
from redline.runs.events import read_events

EIGHT = ("train.precision=fp8", "model.kernels=fused", "model.qk_norm=false", "data.seq_len=32", "train.micro_batch=8")
ABLE = Machine("cpu", "a CPU that passes for a GPU", 8 << 30, 2, (9, 0), cpu_flops=1e11, fast_bf16=True)
FACTS = DataFacts(256, 10**6, 10**4, "", "bytes", "")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fp8_tried_here: None) -> list[tuple[Any, ...]]:
    """Replace the measurement: the matrix `down` is slower in fp8 and stays in bf16."""
    asked: list[tuple[Any, ...]] = []

    def measure(backend: str, *shape: int, cast: bool, learns: bool) -> tuple[float, float]:
        asked.append((backend, *shape))
        return (1.0, 2.0) if shape[1:] == (64, 32) else (2.0, 1.0)

    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(float8_choice, "measure", measure)
    monkeypatch.setattr(float8_choice, "_key", lambda *what: str(what))
    return asked


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["type"] == "step"]


def test_fp8_learns_as_bf16_does(world: Any, tmp_path: Path) -> None:
    eight = world.run(tmp_path / "fp8", *EIGHT, "train.steps=30", machine=ABLE)
    world.run(tmp_path / "bf16", *EIGHT, "train.precision=bf16", "train.steps=30", machine=ABLE)
    assert eight.objective.float8.linears == ("qkv", "out", "up", "head")
    found, expected = losses(tmp_path / "fp8"), losses(tmp_path / "bf16")
    assert found != expected
    assert found[-1] < found[0] - 0.3
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 0.1


BLOCKS = (*EIGHT, "objective=block_diffusion", "block_diffusion.block_size=8", "data.pack=false", "model.d_ff=64")


def test_blocks_are_denoised_in_fp8(world: Any, tmp_path: Path, measured: list[Any]) -> None:
    """The head, whose rows are the masked positions, stays in bf16."""
    options = (*BLOCKS, "train.steps=20", "train.lr=5e-3", "train.warmup_steps=2")
    eight = world.run(tmp_path / "fp8", *options, machine=ABLE)
    assert eight.objective.float8.linears == ("qkv", "out", "up")
    assert {tokens for _, tokens, *_ in measured} == {8 * 2 * 32}, "both copies"
    world.run(tmp_path / "bf16", *options, "train.precision=bf16", machine=ABLE)
    found, expected = losses(tmp_path / "fp8"), losses(tmp_path / "bf16")
    assert found != expected
    assert sum(found[-5:]) < sum(found[:5]) - 1
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 0.1
    world.run(tmp_path / "parts", *options, machine=ABLE, stop_at=10)
    world.run(tmp_path / "parts", *options, machine=ABLE, resume=True)
    assert losses(tmp_path / "parts") == found
    (sample,) = eight.objective.sample("def ", Sampling(tokens=16))
    assert sample.text


def test_the_choice_of_fp8_is_logged_with_its_reason(world: Any, tmp_path: Path) -> None:
    trainer = world.run(tmp_path / "run", *EIGHT, "train.steps=1", machine=ABLE)
    key, value, reason = trainer.objective.choices()[-1]
    assert (key, value) == ("train.fp8", "native: qkv, out, up, head")
    assert "down 1.00 → 2.00" in reason


def test_fp8_resumes_bit_for_bit(world: Any, tmp_path: Path, tensors_of: Any, measured: list[Any]) -> None:
    options = (*EIGHT, "train.steps=8")
    world.run(tmp_path / "whole", *options, machine=ABLE)
    world.run(tmp_path / "parts", *options, machine=ABLE, stop_at=4)
    asked = len(measured)
    trainer = world.run(tmp_path / "parts", *options, machine=ABLE, resume=True)
    expected = tensors_of(tmp_path / "whole/checkpoints/step-00000008")
    got = tensors_of(tmp_path / "parts/checkpoints/step-00000008")
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    assert len(measured) == asked, "a resumed run computes with what it began with"
    assert trainer.objective.float8.reason == "as chosen when the run began"


def test_the_trial_uses_few_sequences_and_gradients_of_their_true_size(world: Any, tmp_path: Path) -> None:
    """The gradients of a step are means over its global batch, so the trial on a part must scale them alike."""
    options = (*EIGHT, "train.steps=1", "train.micro_batch=16", "train.global_batch=64")
    trainer = world.run(tmp_path / "run", *options, machine=ABLE)
    assert [rows for rows, _ in trainer.objective.warmup_batches(16)] == [16]
    scales = trainer.objective.model.scales
    factor = scales.factor[..., 0].clone()
    trainer.train_step.backward(1, next_batch(trainer))
    scales.next()
    ratio = scales.factor[..., 0] / factor
    assert ratio.max() <= 8
    assert ratio.min() >= 1 / 8


def next_batch(trainer: Any) -> Any:
    from redline.training.step import BatchLoader

    with BatchLoader(trainer.objective, trainer.batch, trainer.device, 1, 1) as feed:
        return feed.next(1)


def test_without_fp8_hardware_it_is_off_with_a_warning(world: Any) -> None:
    plain = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
    resolved = resolve(world.recipe("train.precision=fp8"), plain, FACTS)
    assert resolved.recipe.train.precision == "fp32"
    (warning,) = resolved.warnings
    assert "fp8" in warning


@pytest.mark.parametrize(
    ("asked", "reason"),
    [("native", "model.kernels=fused"), ("auto", "torchao is not installed (`make setup EXTRAS=fp8`)")],
)
def test_what_fp8_cannot_compute_stays_in_bf16(asked: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.kernels.float8_choice.find_spec", lambda _: None)
    choice = float8_choice.choose(asked, {"up": (128, 32, 64)}, fused=False)
    assert (choice.backend, choice.linears, choice.text) == ("none", (), "none")
    assert reason in choice.reason


def test_torchao_by_name_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A back-end that is named must not be replaced by another precision."""
    monkeypatch.setattr("redline.kernels.float8_choice.find_spec", lambda _: None)
    with pytest.raises(UserError) as refused:
        float8_choice.choose("torchao", {"up": (128, 32, 64)}, fused=False)
    assert refused.value.where == "train.fp8"


def failing(name: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the trial of the matrix with this many outputs fail."""
    width = {"up": 128, "out": 32}[name]
    measure = float8_choice.measure

    def try_it(backend: str, *shape: int, **how: Any) -> tuple[float, float]:
        if shape[-1] == width and shape[-2] == 32:
            raise error
        return measure(backend, *shape, **how)

    monkeypatch.setattr(float8_choice, "measure", try_it)


def test_a_matrix_whose_trial_fails_stays_in_bf16(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul\nmore lines")
    failing("up", error, monkeypatch)
    trainer = world.run(tmp_path / "run", *EIGHT, "train.steps=2", machine=ABLE)
    assert trainer.outcome.reason == "steps"
    choice = trainer.objective.float8
    assert (choice.linears, choice.failed) == (("qkv", "out", "head"), ("up",))
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in choice.reason
    assert "more lines" not in choice.reason
    (warning,) = trainer.objective.warnings()
    assert "up" in warning


def test_a_trial_that_failed_is_tried_again_by_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        failing("up", RuntimeError("not today"), patch)
        assert float8_choice.choose("auto", {"up": (128, 32, 128)}, fused=True).linears == ()
    assert float8_choice.choose("auto", {"up": (128, 32, 128)}, fused=True).linears == ("up",)


def test_running_out_of_memory_in_a_trial_is_no_reason_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run recovers from out of memory with smaller micro-batches."""
    failing("up", torch.OutOfMemoryError("no room"), monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        float8_choice.choose("auto", {"up": (128, 32, 128)}, fused=True)


def test_a_run_without_any_fp8_matrix_is_warned(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.kernels.float8_choice.find_spec", lambda _: None)
    plain = ("train.precision=fp8", "model.kernels=torch", "train.steps=1")
    trainer = world.run(tmp_path / "run", *plain, machine=ABLE)
    (warning,) = trainer.objective.warnings()
    assert "bf16" in warning
    assert "torchao is not installed" in warning


def test_a_choice_is_measured_once_per_machine(measured: list[Any]) -> None:
    shapes = {"up": (128, 32, 64), "odd": (128, 30, 64)}
    first = float8_choice.choose("auto", shapes, fused=True)
    again = float8_choice.choose("auto", shapes, fused=True)
    assert measured == [("native", 128, 32, 64)]
    assert first.linears == again.linears == ("up",)
    assert "odd has a side" in first.reason
    assert "as measured before" in again.reason


def test_a_matrix_of_zeros_is_scaled_too(world: Any, tmp_path: Path) -> None:
    """A zero matrix has no scale in the first step; one step later it has."""
    words = ("model.init=zero", "model.tied=false", "model.mlp=relu2", "model.qk_norm=true", "train.optimizer=normuon")
    options = (*EIGHT, *words, "train.steps=30")
    eight = world.run(tmp_path / "fp8", *options, machine=ABLE)
    world.run(tmp_path / "bf16", *options, "train.precision=bf16", machine=ABLE)
    assert "out" in eight.objective.float8.linears
    found, expected = losses(tmp_path / "fp8"), losses(tmp_path / "bf16")
    assert found[-1] < found[0] - 0.3
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 0.1
