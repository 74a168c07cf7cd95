"""8-bit AdamW: it learns like AdamW with a quarter of the memory, and bad steps are gated."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import EXIT_PREEMPTED, UserError
from redline.jobs.objective import ParamGroup
from redline.planning.memory import LOW_BIT, moment_bytes, training_memory
from redline.planning.shapes import DecoderShape
from redline.recipe.schema import Train
from redline.runs.events import read_events
from redline.training.control import RunDirectory
from redline.training.optim import Optimizer

bitsandbytes = pytest.importorskip("bitsandbytes")

GOOD, BAD, ONE = torch.tensor(0.0), torch.tensor(1.0), torch.tensor(1.0)
LARGE = ("model.d_model=64", "model.heads=2", "model.d_ff=128")  # matrices of 4096 values and more


def options(optimizer: str = "adamw_8bit", **changes: Any) -> Train:
    return Train(optimizer=optimizer, lr=3e-3, weight_decay=0.1, **changes)


def weights() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"large": nn.Parameter(torch.randn(96, 64)), "small": nn.Parameter(torch.randn(64))}


def groups(named: dict[str, nn.Parameter]) -> list[ParamGroup]:
    return [
        ParamGroup("matrix", {"large": named["large"]}, {"large": (96,)}),
        ParamGroup("scalar", {"small": named["small"]}, {"small": (64,)}),
    ]


def gradients(named: dict[str, nn.Parameter], steps: int) -> list[dict[str, Tensor]]:
    chance = torch.Generator().manual_seed(1)
    return [{n: torch.randn(p.shape, generator=chance) for n, p in named.items()} for _ in range(steps)]


def test_updates_equal_those_of_bitsandbytes() -> None:
    """Compares every weight with bitsandbytes' AdamW8bit, with clipping and with decay on matrices only."""
    mine, theirs = weights(), weights()
    sets = [
        {"params": [theirs["large"]], "weight_decay": 0.1},
        {"params": [theirs["small"]], "weight_decay": 0.0},
    ]
    reference = bitsandbytes.optim.AdamW8bit(sets, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    ours = Optimizer(groups(mine), options())
    for number, grads in enumerate(gradients(mine, 12)):
        divisor = 2.0 ** (number % 3)
        for name, grad in grads.items():
            mine[name].grad, theirs[name].grad = grad * divisor, grad.clone()
        reference.step()
        ours.step(1.0, (torch.tensor(divisor), GOOD))
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=0.01 * 3e-3)  # eps: see Adam8bit
    state = reference.state[theirs["large"]]
    held = ours.tensors()
    assert held["large.exp_avg_8bit"].dtype == torch.uint8
    assert (held["large.exp_avg_8bit"] != state["state1"]).float().mean() < 0.01, "codes at a border may differ"
    torch.testing.assert_close(held["large.exp_avg_sq_scale"], state["absmax2"], rtol=1e-4, atol=0)
    assert held["small.exp_avg"].dtype == torch.float32, "small tensors keep 32 bits, as bitsandbytes has it"
    assert state["state1"].dtype == torch.uint8
    assert reference.state[theirs["small"]]["state1"].dtype == torch.float32


def test_a_batch_of_parameters_learns_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and moments are equal bit for bit, also if sizes are not multiples of a block."""
    shapes = {"a": (33, 129), "b": (64, 64), "c": (5, 1001), "d": (71, 83)}
    found = []
    for most in (1, 9000, 1 << 26):
        monkeypatch.setattr("redline.training.optim._MAX_BATCH", most)
        torch.manual_seed(0)
        named = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
        ours = Optimizer([ParamGroup("matrix", named, {n: (rows,) for n, (rows, _) in shapes.items()})], options())
        for grads in gradients(named, 3):
            for name, grad in grads.items():
                named[name].grad = grad
            ours.step(1.0, (ONE, GOOD))
        found.append({**ours.tensors(), **named})
        assert ours.low_bit is not None
        assert len(ours.low_bit.batches) == {1: 4, 9000: 3}.get(most, 1)
    alone, *others = found
    for other in others:
        assert other.keys() == alone.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in alone.items())


@pytest.mark.parametrize("optimizer", LOW_BIT)
def test_a_closed_gate_changes_nothing(optimizer: str) -> None:
    named = weights()
    ours = Optimizer(groups(named), options(optimizer))
    assert ours.low_bit is not None
    names = set(ours.tensors())
    for bad_at in (0, 2):  # before the first step too: that is what the warm-up does
        for grads in gradients(named, bad_at):
            for name, grad in grads.items():
                named[name].grad = grad
            ours.step(1.0, (ONE, GOOD))
        live = [*ours.tensors().values(), *named.values()]
        before = [t.detach().clone() for t in live]
        for value in (float("nan"), float("inf"), 1.0):
            for parameter in named.values():
                parameter.grad = torch.full_like(parameter, value)
            ours.step(1.0, (ONE, BAD))
        assert all(torch.equal(a, b) for a, b in zip(before, live, strict=True))
    assert set(ours.tensors()) == names, "the state has its names before the first step"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_step_in_a_run_changes_no_bit(world: Any, tmp_path: Path, value: float) -> None:
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, *LARGE, "train.optimizer=adamw_8bit", "train.steps=6")
        plain, seen = trainer.objective.loss, {}

        def loss(batch: Any) -> Any:
            terms = plain(batch)
            if trainer.state.step == 3:
                first = next(iter(trainer.parameters.values()))
                terms = {n: type(t)(t.sum + value * first.sum(), t.weight, t.coefficient) for n, t in terms.items()}
            return terms

        def keep(number: int) -> None:
            files = trainer.tensors()
            seen[number] = {f"{f}/{n}": t.clone() for f, ts in files.items() for n, t in ts.items()}

        trainer.objective.loss = loss
        world.around(trainer, after=keep)
        trainer.run()
    assert any(name.endswith("exp_avg_8bit") for name in seen[2])
    assert all(torch.equal(t, seen[3][n]) for n, t in seen[2].items())
    assert sum(not torch.equal(t, seen[4][n]) for n, t in seen[3].items()) > len(seen[3]) // 2, (
        "the next good step must change the weights"
    )


def test_ten_steps_equal_five_a_resume_and_five_more(world: Any, tmp_path: Path, tensors_of: Any) -> None:
    setup = (*LARGE, "train.optimizer=paged_adamw_8bit", "train.steps=10", "train.ema=0.9")
    whole = world.run(tmp_path / "whole", *setup)
    first = world.run(tmp_path / "parts", *setup, stop_at=5)
    assert first.outcome.exit_code == EXIT_PREEMPTED
    world.run(tmp_path / "parts", *setup, resume=True)
    expected = tensors_of(tmp_path / "whole/checkpoints/step-00000010")
    got = tensors_of(tmp_path / "parts/checkpoints/step-00000010")
    assert expected.keys() == got.keys()
    assert sum(t.dtype == torch.uint8 for t in got.values()) > 4
    assert all(torch.equal(t, got[n]) for n, t in expected.items())
    assert whole.state.step == 10


def test_adam_8bit_learns_like_32_bits(world: Any, tmp_path: Path) -> None:
    losses = {}
    for optimizer in ("adamw", "adamw_8bit"):
        run = tmp_path / optimizer
        world.run(run, *LARGE, f"train.optimizer={optimizer}", "train.steps=60", "train.lr=3e-3", "eval.sequences=16")
        events = [e for e in read_events(run / "events.jsonl") if e["type"] == "eval"]
        losses[optimizer] = [e["loss"] for e in events]
    first, last = losses["adamw"][0], losses["adamw"][-1]
    assert first - last > 1.5
    assert losses["adamw_8bit"][0] == first
    assert abs(losses["adamw_8bit"][-1] - last) < 0.02 * (first - last)


def test_the_plan_counts_the_memory_of_8bit_moments(world: Any, tmp_path: Path) -> None:
    shape = DecoderShape(24, 1024, 16, 16, 64, 2688, 50304)
    for optimizer in LOW_BIT:
        assert moment_bytes(shape, optimizer) / shape.parameters == pytest.approx(2.03125, rel=1e-3)
        with_it, without = (
            training_memory(shape, tokens=8192, bytes_per_value=2, optimizer=o, ema=False, checkpointing="none")
            for o in (optimizer, "adamw")
        )
        assert with_it.optimizer < 0.255 * without.optimizer
        assert with_it.peak - without.peak == pytest.approx(with_it.optimizer - without.optimizer)
    with RunDirectory(tmp_path / "run") as run:
        trainer = world.trainer(run, *LARGE, "train.optimizer=adamw_8bit")
        held = sum(t.numel() * t.element_size() for t in trainer.optimizer.tensors().values())
    assert held == pytest.approx(moment_bytes(trainer.resolved.shape, "adamw_8bit"), rel=0.01)


def test_a_cpu_warns_that_it_does_not_page(world: Any, tmp_path: Path) -> None:
    for optimizer, count in (("paged_adamw_8bit", 1), ("adamw_8bit", 0)):
        with RunDirectory(tmp_path / optimizer) as run:
            plan = world.trainer(run, *LARGE, f"train.optimizer={optimizer}").resolved.plan_event()
        assert len([w for w in plan["warnings"] if "runs as adamw_8bit" in w]) == count
        assert json.dumps(plan)


def test_a_missing_package_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def no_bitsandbytes(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "bitsandbytes":
            raise ImportError(name)
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_bitsandbytes)
    with pytest.raises(UserError, match=r"train.optimizer: 8-bit .*`make setup EXTRAS=low-bit`"):
        Optimizer(groups(weights()), options())
    assert Optimizer(groups(weights()), options("adamw")).low_bit is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_paging_changes_no_bit_and_needs_no_host_sync() -> None:
    results, one, good, bad = [], ONE.cuda(), GOOD.cuda(), BAD.cuda()
    for optimizer in LOW_BIT:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(1024, 512, device="cuda"))
        ours = Optimizer([ParamGroup("matrix", {"w": weight}, {"w": (1024,)})], options(optimizer))
        assert ours.low_bit is not None
        assert (ours.low_bit.batches[0].pages is not None) == (optimizer == "paged_adamw_8bit")
        for number in range(4):
            weight.grad = torch.randn_like(weight)
            torch.cuda.set_sync_debug_mode("error" if number else "default")
            ours.step(1.0, (one, bad if number == 2 else good))
            torch.cuda.set_sync_debug_mode("default")
        results.append([weight.detach(), *ours.tensors().values()])
    assert all(torch.equal(plain, paged) for plain, paged in zip(*results, strict=True))
    assert results[0][1].item() == 3, "steps that happened"
