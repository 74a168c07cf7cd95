"""A run on MPS, the GPU of a Mac, as far as it can be imitated: tensors "on MPS" lie in host memory.

Calls that MPS refuses (float64, pinned memory) raise here, too, and so do asynchronous copies, which on MPS would read
memory that may have been reused. No test ran on a Mac.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import redline
from finetuning import Tuning
from redline.bench import throughput
from redline.bench.setting import choose_setting
from redline.errors import RecipeError, UserError
from redline.hardware import probe
from redline.hardware.device import is_out_of_memory, sum_dtype
from redline.hardware.machine import Machine, gpu_machine, mps_machine
from redline.kernels import nf4
from redline.kernels.attention import MaskSpec, candidates, select
from redline.launch.plan import plan_recipe
from redline.launch.profile import profile_recipe
from redline.planning.batch import BatchPlan
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, Resolved, resolve
from redline.training.step import _runs_out_of_memory

GIB = 1 << 30
MPS = torch.device("mps")
MAC = Machine("mps", "Apple M9 GPU (MPS)", 24 * GIB, 8)
FACTS = DataFacts(256, 1_000_000, 50_000, "f", "bytes", "t")


def on_mps(value: object) -> bool:
    return value == "mps" or (isinstance(value, torch.device) and value.type == "mps")


class ImitatedMps(TorchFunctionMode):
    """Put tensors that are meant for MPS into host memory, and refuse what MPS refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if any(map(on_mps, (*args, *kwargs.values()))):
            self.moved += 1
            args = tuple("cpu" if on_mps(value) else value for value in args)
            kwargs = {name: "cpu" if on_mps(value) else value for name, value in kwargs.items()}
        if kwargs.get("non_blocking") or kwargs.get("pin_memory"):
            raise RuntimeError(f"{func} copies asynchronously, or pins memory")
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and result.dtype is torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return result


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Imitate torch.mps; return a list that grows with each wait for the device."""
    calls: list[str] = []
    cpu_generator = torch.Generator
    monkeypatch.setattr(torch.mps, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 * GIB)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 18 * GIB)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": cpu_generator())
    return calls


# --- which device, and what the plan says


def test_a_plan_on_a_mac_asks_torch_for_mps(waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that was measured before must not take the place of the GPU that the run will use."""
    monkeypatch.setattr("redline.hardware.machine.sys.platform", "darwin")
    monkeypatch.setattr("redline.hardware.machine.first_gpu", lambda: None)
    monkeypatch.setattr("redline.hardware.machine.read_rates", lambda key: {"fp32": 1e11, "copy": 1e10})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loaded = load("pretrain-125m", ["data.source=embedded", "train.steps=10"])
    assert {c["key"]: c["value"] for c in plan_recipe(loaded).event["choices"]}["train.device"] == "mps"


def test_auto_takes_mps(waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine = probe.detect_machine()
    assert machine == probe.detect_machine("mps") == mps_machine(18 * GIB)
    assert (machine.device, machine.memory_bytes, machine.spec, machine.fast_bf16) == ("mps", 18 * GIB, None, False)


@pytest.mark.parametrize("built", [True, False])
def test_mps_that_torch_cannot_use_is_refused(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    with pytest.raises(UserError, match="cannot use MPS.*too old" if built else "without MPS") as refused:
        probe.detect_machine("mps", "--device ")
    assert refused.value.fix == "To train on the CPU, use --device cpu."


def test_profiling_is_refused(waits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"does not see what the GPU of a Mac does.* train\.device=cpu"):
        profile_recipe(
            load("quickstart", []),
            {},
            tmp_path,
            preparation=nullcontext(lambda progress: None),
            on_step=lambda done, steps: None,
            log=lambda text: None,
        )


@pytest.mark.parametrize("device", ["mps", "cpu", "cuda"])
def test_every_device_has_benchmark_defaults(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card = gpu_machine("NVIDIA H200", 140 * GIB, (9, 0), None) if device == "cuda" else replace(MAC, device=device)
    monkeypatch.setattr("redline.hardware.probe.detect_machine", lambda device: card)
    setting = choose_setting(None, ["data.source=embedded"], throughput.DEFAULTS)
    assert (setting.machine.device, setting.recipe.train.steps == 200) == (device, device == "cuda")


def plan(*overrides: str, recipe: str = "pretrain-125m", machine: Machine = MAC) -> Resolved:
    return resolve(load(recipe, ["data.source=embedded", *overrides]).recipe, machine, FACTS)


def test_the_plan_is_in_fp32_without_compiling_or_fused_kernels() -> None:
    resolved = plan("train.steps=100")
    train = resolved.recipe.train
    assert (train.device, train.precision, train.compile) == ("mps", "fp32", False)
    assert resolved.recipe.model.kernels == "torch"
    reasons = {choice.key: choice.reason for choice in resolved.choices}
    assert "safe choice on MPS" in reasons["train.precision"]
    assert reasons["train.compile"] == "torch.compile for MPS is a prototype"
    assert reasons["model.kernels"] == "the fused kernels need an NVIDIA GPU"
    assert any("MPS is untested" in warning for warning in resolved.warnings)


def test_the_plan_invents_no_speed_and_no_mfu() -> None:
    event = plan("train.steps=100").plan_event(price=1.0)
    assert event["throughput"]["source"] == "unknown"
    assert event["throughput"]["tokens_per_s"] is event["throughput"]["mfu"] is event["hours"] is None
    assert event["ceiling"]["tokens_per_s"] is None


def test_the_scores_of_attention_count_as_memory() -> None:
    """Attention on MPS is the reference, which keeps a matrix of scores that a CPU's fused kernel does not have."""
    words = ("train.steps=10", "train.micro_batch=8", "train.precision=fp32", "train.compile=false")
    assert plan(*words).memory.activations > 1.2 * plan(*words, machine=replace(MAC, device="cpu")).memory.activations


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_can_be_set(precision: str) -> None:
    assert plan("train.steps=10", f"train.precision={precision}").recipe.train.precision == precision


def test_a_model_is_sized_for_the_smallest_apple_gpu() -> None:
    words = ("model.size=auto", "train.hours=0.033")
    assert plan(*words, recipe="quickstart").shape.parameters < 30e6


@pytest.mark.parametrize(
    ("words", "ranks", "says"),
    [
        (("train.optimizer=adamw_8bit",), 1, "needs float64, which MPS does not have.* Use train.optimizer=adamw"),
        ((), 2, "2 processes cannot share the GPU of a Mac. Use train.device=cpu"),
    ],
)
def test_what_mps_lacks_is_refused(words: tuple[str, ...], ranks: int, says: str) -> None:
    recipe = load("pretrain-125m", ["data.source=embedded", "train.steps=10", *words]).recipe
    with pytest.raises(RecipeError, match=says):
        resolve(recipe, MAC, FACTS, gpus=ranks)


def test_attention_is_the_reference() -> None:
    shape = (2, 4, 64, 32)
    assert select("auto", MaskSpec(), device="mps", dtype=torch.float32, shape=shape).backend == "dense"
    assert [name for name, why in candidates(MaskSpec(), "mps", torch.bfloat16, 64).items() if not why] == ["dense"]
    with pytest.raises(UserError, match=r"model\.attention=flash needs an NVIDIA GPU"):
        select("flash", MaskSpec(), device="mps", dtype=torch.float32, shape=shape)


# --- training


def test_a_run_trains_evaluates_samples_and_resumes(
    world: Any, waits: list[str], tensors_of: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    words = ("train.device=mps", "train.steps=4", "eval.every=2", "eval.samples=1", "eval.sample_tokens=4")
    with ImitatedMps() as mps:
        trained = world.run(tmp_path / "run", *words, machine=MAC)
        moved = mps.moved
        world.run(tmp_path / "run", *words[:1], "train.steps=6", *words[2:], machine=MAC, resume=True)
    assert moved > 20, "batches and weights were meant for MPS"
    assert trained.device == MPS
    assert len(waits) >= 6, "the host waits for each step"
    events = trained.monitor.view.events
    assert [event["memory_gib"] for event in events if event["type"] == "step"] == [3.0] * 4
    on_cpu = world.run(tmp_path / "cpu", "train.steps=4", "model.attention=dense")
    saved = [tensors_of(run / "checkpoints/step-00000004") for run in (tmp_path / "run", tmp_path / "cpu")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert (tmp_path / "run/checkpoints/step-00000006").is_dir()
    assert on_cpu.device.type == "cpu"


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_fine_tuning(
    method: str,
    world: Any,
    waits: list[str],
    tiny_base: Path,
    answers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On MPS `nearest_code` quantises the scales, as on a GPU; in this imitation every tensor is a CPU tensor.
    monkeypatch.setattr(nf4, "_code_by_table", nf4.nearest_code)
    words = ("train.device=mps", "train.steps=3", "eval.samples=1", "eval.sample_tokens=4", "model.lora.dropout=0.1")
    tuning = Tuning(world, tiny_base, answers, tmp_path)
    with ImitatedMps() as mps:
        trained = tuning.run(tmp_path / "run", *words, f"finetune.method={method}", machine=MAC)
    assert trained.state.step == 3
    assert mps.moved > 10


@pytest.mark.parametrize("recipe", ["problems-bd3lm", "problems-hdp"])
def test_diffusion(
    recipe: str, waits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_pictures: None
) -> None:
    monkeypatch.setattr(probe, "detect_machine", lambda device: MAC)
    words = ("model.layers=1", "model.d_model=32", "model.heads=2", "model.d_ff=64", "data.source=problems:easy:60")
    words += ("data.tokenizer=train:300", "train.global_batch=4", "train.micro_batch=2", "train.steps=2")
    words += ("train.warmup_steps=1", "eval.sequences=4", "eval.samples=1", "eval.sample_tokens=4")
    with ImitatedMps() as mps:
        run = redline.train(recipe, *words, "train.device=mps", run=tmp_path / "run", show=False)
    assert run.status == "finished"
    assert run.metrics["loss"] > 0
    assert mps.moved > 10


def test_the_imitation_refuses_float64_and_asynchronous_copies() -> None:
    with ImitatedMps():
        assert torch.ones(2, device="mps").device.type == "cpu"
        with pytest.raises(TypeError, match="float64"):
            torch.zeros((), dtype=torch.float64, device=MPS)
        with pytest.raises(RuntimeError, match="asynchronously"):
            torch.ones(2).to(MPS, non_blocking=True)


def test_losses_are_added_in_the_widest_type() -> None:
    assert sum_dtype(MPS) is torch.float32
    assert sum_dtype(torch.device("cpu")) is sum_dtype(torch.device("cuda")) is torch.float64


def test_running_out_of_memory_halves_the_micro_batch_on_mps() -> None:
    """torch raises a plain RuntimeError there."""

    def dry_run(error: Exception) -> Callable[[BatchPlan], None]:
        def fail(batch: BatchPlan) -> None:
            raise error

        return fail

    full = RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GiB, max allowed: 9.32 GiB).")
    assert is_out_of_memory(full)
    assert _runs_out_of_memory(dry_run(full), BatchPlan(8, 1, 1))
    with pytest.raises(RuntimeError, match="shapes"):
        _runs_out_of_memory(dry_run(RuntimeError("shapes differ")), BatchPlan(8, 1, 1))
