"""Training on a GPU: exact resume, recovery from out-of-memory errors, half precision, fp8, CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from redline.runs.events import read_events

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = ("train.device=cuda", "train.precision=bf16", "model.d_model=128", "data.seq_len=64")
PLAIN = ("model.qk_norm=false",)  # with QK norm, fused blocks are not chosen automatically


@pytest.fixture
def machine() -> Any:
    from redline.hardware.probe import detect_machine

    return detect_machine("cuda")


@pytest.fixture(autouse=True)
def _restore_determinism() -> Any:
    yield
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()


@pytest.mark.parametrize("packed", ["true", "false"])
def test_deterministic_resume_is_bitwise(
    world: Any, tmp_path: Path, tensors_of: Any, machine: Any, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    exact = ("train.deterministic=true", "train.ema=0.9", "train.compile=true")
    options = (*GPU, *exact, "train.steps=8", f"data.pack={packed}")
    world.run(tmp_path / "whole", *options, machine=machine)
    world.run(tmp_path / "parts", *options, machine=machine, stop_at=4)
    world.run(tmp_path / "parts", *options, machine=machine, resume=True)
    expected = tensors_of(tmp_path / "whole/checkpoints/step-00000008")
    got = tensors_of(tmp_path / "parts/checkpoints/step-00000008")
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


def test_out_of_memory_in_the_warm_up_halves_the_micro_batch(world: Any, tmp_path: Path, machine: Any) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.5 * 2**30 / total)
    try:
        options = (*GPU, "train.steps=2", "train.global_batch=4096", "train.micro_batch=4096", "model.d_ff=512")
        trainer = world.run(tmp_path / "run", *options, machine=machine)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert trainer.outcome.reason == "steps"
    assert trainer.batch.micro < 4096
    assert trainer.batch.global_batch == 4096
    messages = [e["message"] for e in read_events(tmp_path / "run/events.jsonl") if e["type"] == "recovery"]
    assert messages
    assert "the global batch stays 4096" in messages[0]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_compiled_half_precision_follows_fp32(
    world: Any, tmp_path: Path, machine: Any, precision: str, checkpointing: str
) -> None:
    curves = []
    for name, options in (
        ("fp32", ("train.precision=fp32",)),
        ("half", (f"train.precision={precision}", "train.compile=true", f"train.grad_checkpointing={checkpointing}")),
    ):
        world.run(tmp_path / name, *GPU, *options, "train.steps=20", "data.pack=true", machine=machine)
        curves.append([e["loss"] for e in read_events(tmp_path / name / "events.jsonl") if e["type"] == "step"])
    if precision == "bf16":
        assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 0.05
    # fp16 skips a few steps until its loss scale fits, and is as many steps behind at the end
    assert curves[1][-1] < curves[0][-1] + 0.4
    assert curves[1][-1] < curves[1][0] - 0.5


@pytest.fixture
def fp8_measured_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fp8_tried_here: None) -> None:
    """At the size of these tests bf16 is faster and would be chosen."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("redline.kernels.float8_choice.measure", lambda *_, **__: (2.0, 1.0))


@pytest.mark.usefixtures("fp8_measured_faster")
@pytest.mark.parametrize("backend", ["native", "torchao"])
def test_fp8_follows_bf16(world: Any, tmp_path: Path, machine: Any, backend: str) -> None:
    if backend == "torchao":
        pytest.importorskip("torchao", reason="needs torchao")
    curves = []
    for precision in ("bf16", "fp8"):
        shape = (*GPU, *PLAIN, "train.steps=40", "train.compile=true")
        options = (*shape, f"train.precision={precision}", f"train.fp8={backend}")
        trainer = world.run(tmp_path / precision, *options, machine=machine)
        events = list(read_events(tmp_path / precision / "events.jsonl"))
        curves.append([e["loss"] for e in events if e["type"] == "step"])
    assert trainer.objective.float8.backend == backend
    head = ("head",) if backend == "native" else ()
    assert trainer.objective.float8.linears == ("qkv", "out", "up", "down", *head)
    bf16, fp8 = curves
    assert bf16 != fp8
    slack = 0.1 if backend == "native" else 0.2  # the torchao back-end deviates more
    assert max(abs(a - b) for a, b in zip(bf16, fp8, strict=True)) < slack
    assert fp8[-1] < fp8[0] - 0.5


@pytest.mark.usefixtures("fp8_measured_faster")
def test_block_diffusion_in_fp8_follows_bf16(world: Any, tmp_path: Path, machine: Any) -> None:
    blocks = ("objective=block_diffusion", "block_diffusion.block_size=16", "data.pack=false", "data.seq_len=128")
    curves = []
    for precision in ("bf16", "fp8"):
        options = (*GPU, *PLAIN, *blocks, "train.steps=40", "train.lr=3e-3", f"train.precision={precision}")
        trainer = world.run(tmp_path / precision, *options, machine=machine)
        events = list(read_events(tmp_path / precision / "events.jsonl"))
        curves.append([e["loss"] for e in events if e["type"] == "step"])
    assert trainer.objective.float8.linears == ("qkv", "out", "up", "down")
    assert trainer.recipe.model.kernels == "fused"
    bf16, fp8 = curves
    assert bf16 != fp8
    assert max(abs(a - b) for a, b in zip(bf16, fp8, strict=True)) < 0.1
    assert sum(fp8[-5:]) < sum(fp8[:5]) - 1


@pytest.mark.usefixtures("fp8_measured_faster")
def test_fp8_resumes_bitwise(
    world: Any, tmp_path: Path, tensors_of: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    eight = ("train.precision=fp8", "train.fp8=native", "train.deterministic=true")
    options = (*GPU, *PLAIN, *eight, "train.steps=8")
    world.run(tmp_path / "whole", *options, machine=machine)
    world.run(tmp_path / "parts", *options, machine=machine, stop_at=4)
    world.run(tmp_path / "parts", *options, machine=machine, resume=True)
    expected = tensors_of(tmp_path / "whole/checkpoints/step-00000008")
    got = tensors_of(tmp_path / "parts/checkpoints/step-00000008")
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


def test_the_choice_of_fp8_matmuls_is_measured_and_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from redline.kernels.float8_choice import choose

    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    shapes = {"up": (16384, 1024, 5376), "odd": (16384, 1000, 1000)}
    first = choose("auto", shapes, fused=True)
    assert first.linears == ("up",)
    assert "odd has a side" in first.reason
    again = choose("auto", shapes, fused=True)
    assert "as measured before" in again.reason
    assert again.linears == first.linears


@pytest.mark.parametrize("options", [("train.precision=bf16",), ("train.precision=fp8", "train.fp8=native")])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.usefixtures("fp8_measured_faster")
def test_a_cuda_graph_gives_the_same_bits(
    world: Any,
    tmp_path: Path,
    tensors_of: Any,
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    accumulation: int,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr("redline.training.step._MAX_SLOWDOWN", 1e9)  # keep the graph even if it is slower
    micro = f"train.micro_batch={8 // accumulation}"
    shape = (f"train.accumulation={accumulation}", micro, "train.deterministic=true", "train.steps=8")
    found = {}
    for graph in ("true", "false"):
        run = tmp_path / graph
        trainer = world.run(run, *GPU, *PLAIN, *options, *shape, f"train.graph={graph}", machine=machine)
        said = [event.get("message") for event in read_events(run / "events.jsonl") if event["type"] == "warning"]
        assert (trainer.train_step.graph is not None) is (graph == "true"), said
        found[graph] = tensors_of(run / "checkpoints/step-00000008")
    assert all(torch.equal(tensor, found["false"][name]) for name, tensor in found["true"].items())
