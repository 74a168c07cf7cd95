"""The update rules of the optimizers, and the horizon of the learning-rate schedule."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from redline.jobs.objective import ParamGroup
from redline.planning.schedule import cycled_momentum, lr_factor
from redline.recipe.schema import Train
from redline.training.optim import Adam, Ema, Optimizer
from redline.training.schedule import REPLAN_AT, Horizon

GOOD, BAD = torch.tensor(0.0), torch.tensor(1.0)
ONE = torch.tensor(1.0)


def options(**changes: Any) -> Train:
    return Train(lr=3e-3, weight_decay=0.1, **changes)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def groups(model: nn.Module) -> list[ParamGroup]:
    named = dict(model.named_parameters())
    matrices = {n: p for n, p in named.items() if p.dim() == 2}
    scalars = {n: p for n, p in named.items() if p.dim() < 2}
    return [
        ParamGroup("matrix", matrices, {n: (p.shape[0],) for n, p in matrices.items()}),
        ParamGroup("scalar", scalars, {n: (p.shape[0],) for n, p in scalars.items()}),
    ]


def gradients(model: nn.Module, steps: int) -> Iterator[list[Tensor]]:
    chance = torch.Generator().manual_seed(1)
    for size in torch.logspace(-2, 2, steps).tolist():  # some are clipped, some are not
        yield [torch.randn(p.shape, generator=chance) * size for p in model.parameters()]


def test_adamw_equals_torchs(model: nn.Module) -> None:
    other = copy.deepcopy(model)
    decayed = [p for p in other.parameters() if p.dim() == 2]
    plain = [p for p in other.parameters() if p.dim() < 2]
    sets = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(sets, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
    ours = Optimizer(groups(model), options())
    clipped = 0
    for grads in gradients(model, 8):
        for mine, theirs, grad in zip(model.parameters(), other.parameters(), grads, strict=True):
            mine.grad, theirs.grad = grad.clone(), grad.clone()
        norm = nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        clipped += bool(norm > 1.0)
        reference.step()
        ours.step(1.0, (torch.clamp_min(norm / 1.0, 1.0), GOOD))
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert 0 < clipped < 8


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
def test_only_matrices_decay(model: nn.Module, optimizer: str) -> None:
    ours = Optimizer(groups(model), options(optimizer=optimizer, muon_lr=3e-3))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ours.step(0.5, (ONE, GOOD))
    for name, parameter in model.named_parameters():
        factor = 1 - 0.5 * 3e-3 * 0.1 if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
def test_the_gate_and_the_names(model: nn.Module, optimizer: str) -> None:
    """A closed gate changes nothing, and the state has its names before the first step."""
    ours = Optimizer(groups(model), options(optimizer=optimizer))
    names = set(ours.tensors())
    assert {re.split(r"\.(momentum|second_moment|exp_avg|step)", n)[0] for n in names} == {
        name for name, _ in model.named_parameters()
    }
    live = [*ours.tensors().values(), *model.parameters()]
    before = [t.detach().clone() for t in live]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    ours.step(1.0, (ONE, BAD))
    assert all(torch.equal(a, b) for a, b in zip(before, live, strict=True))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    ours.step(1.0, (ONE, GOOD))
    assert set(ours.tensors()) == names
    assert not any(torch.equal(a, b) for a, b in zip(before, live, strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_role_has_its_rate(optimizer: str) -> None:
    """The first step of AdamW changes every value by the learning rate, whatever the gradient."""
    chance = torch.Generator().manual_seed(6)
    roles = {role: nn.Parameter(torch.randn(4, 3, generator=chance)) for role in ("matrix", "embedding", "head")}
    roles["scalar"] = nn.Parameter(torch.ones(5))
    parts = [ParamGroup(role, {role: p}, {role: (p.shape[0],)}) for role, p in roles.items()]
    rates: dict[str, Any] = {"embedding_lr": 0.3, "head_lr": 0.004, "scalar_lr": 0.05}
    ours = Optimizer(parts, Train(lr=3e-3, weight_decay=0.0, eps=1e-20, optimizer=optimizer, **rates))
    before = {role: p.detach().clone() for role, p in roles.items()}
    for parameter in roles.values():
        parameter.grad = torch.randn(parameter.shape, generator=chance)
    ours.step(0.5, (ONE, GOOD))
    expected = {"matrix": 3e-3, "embedding": 0.3, "head": 0.004, "scalar": 0.05}
    for role, parameter in roles.items():
        if role != "matrix" or optimizer == "adamw":
            assert parameter.grad is not None
            moved = before[role] - 0.5 * expected[role] * parameter.grad.sign()
            torch.testing.assert_close(parameter.detach(), moved, rtol=1e-5, atol=1e-6)


def test_roles_with_equal_rates_share_one_launch(model: nn.Module) -> None:
    shared, own = (Adam(groups(model), options(**rates)).groups for rates in ({}, {"scalar_lr": 0.1}))
    assert list(shared) == [(3e-3, 0.1, torch.float32), (3e-3, 0.0, torch.float32)]
    assert list(own) == [(3e-3, 0.1, torch.float32), (0.1, 0.0, torch.float32)]


def test_adam_equals_torchs_fused_one_bit_for_bit(model: nn.Module) -> None:
    twin = copy.deepcopy(model)
    ours = Optimizer(groups(model), options())
    sets = [
        {"params": [p for p in twin.parameters() if (p.dim() > 1) is matrices], "weight_decay": decay}
        for matrices, decay in ((True, 0.1), (False, 0.0))
    ]
    theirs = torch.optim.AdamW(sets, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
    chance = torch.Generator().manual_seed(3)
    for _ in range(3):
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = torch.randn(mine.shape, generator=chance)
            mine.grad = other.grad.clone()
        ours.step(1.0, (ONE, GOOD))
        theirs.step()
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_run_that_compiles_nothing_imports_no_compiler(tmp_path: Path, corpus: Path) -> None:
    """Importing it takes seconds."""
    words = ["train", "quickstart", f"data.source={corpus}", "data.tokenizer=bytes", "train.steps=2", "eval.samples=1"]
    shape = ["model.size=null", "model.layers=1", "model.d_model=32", "model.heads=2", "model.d_ff=64"]
    own = ["data.seq_len=32", "train.global_batch=4", "train.compile=false", "train.device=cpu"]
    code = f"""
import sys
from redline.cli.main import main
sys.argv = ["redline", *{[*words, *shape, *own, "--run", str(tmp_path / "run")]!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert "torch" in sys.modules
sys.exit("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_one_cycle_moves_weights_as_torch_does(model: nn.Module) -> None:
    """Record learning rate and beta1 of every step of torch's OneCycleLR with AdamW."""
    twin, steps = copy.deepcopy(model), 10
    sets = [
        {"params": [p for p in twin.parameters() if (p.dim() > 1) is matrices], "weight_decay": decay}
        for matrices, decay in ((True, 0.1), (False, 0.0))
    ]
    theirs = torch.optim.AdamW(sets, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(theirs, max_lr=3e-3, total_steps=steps)
    ours, horizon = Optimizer(groups(model), options()), Horizon(steps, None)
    for step, grads in enumerate(gradients(model, steps)):
        for mine, other, grad in zip(model.parameters(), twin.parameters(), grads, strict=True):
            mine.grad, other.grad = grad.clone(), grad.clone()
        where = {"step": step, "warmup": 0, "progress": horizon.progress(step), "per_step": horizon.per_step(step)}
        factor = lr_factor("one_cycle", **where, pct_start=0.3)  # type: ignore[arg-type]
        momentum = cycled_momentum(0.85, 0.95, **where, pct_start=0.3)  # type: ignore[arg-type]
        ours.step(factor, (ONE, GOOD), step, momentum)
        theirs.step()
        scheduler.step()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon", "adamw_8bit"])
def test_momentum_replaces_the_optimizers_own(optimizer: str) -> None:
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="8-bit AdamW is that of bitsandbytes")
    chance = torch.Generator().manual_seed(2)
    start = torch.randn(64, 128, generator=chance)  # large enough for 8-bit moments
    grads = [torch.randn(start.shape, generator=chance) for _ in range(3)]
    found = []
    for own, momentum in (({"betas": (0.8, 0.95), "muon_momentum": 0.8}, None), ({}, 0.8), ({}, None)):
        weight = nn.Parameter(start.clone())
        ours = Optimizer([ParamGroup("matrix", {"w": weight}, {"w": (64,)})], options(optimizer=optimizer, **own))
        for step, grad in enumerate(grads):
            weight.grad = grad.clone()
            ours.step(1.0, (ONE, GOOD), step, momentum)
        found.append(weight.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("words", "pct_start", "cycled"),
    [
        (("train.warmup_steps=auto",), 0.3, False),
        (("train.pct_start=0.5", "train.cycle_momentum=[0.85, 0.95]"), 0.5, True),
        (("train.warmup_steps=3", "train.cycle_momentum=[0.85, 0.95]"), 0.5, True),
    ],
)
def test_a_run_with_one_cycle_follows_torch(
    world: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    pct_start: float,
    cycled: bool,
) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=6, pct_start=pct_start)
    expected: list[tuple[float, float | None]] = []
    for _ in range(6):
        group = optimizer.param_groups[0]
        expected.append((group["lr"], group["betas"][0] if cycled else None))
        optimizer.step()
        scheduler.step()
    plain, found = Optimizer.step, []

    def noted(self: Optimizer, factor: float, gate: Any, step: int = 0, momentum: float | None = None) -> None:
        found.append((factor, momentum))
        plain(self, factor, gate, step, momentum)

    monkeypatch.setattr(Optimizer, "step", noted)
    trainer = world.run(tmp_path / "run", "train.schedule=one_cycle", "train.steps=6", "train.lr=1e-3", *words)
    taken = found[-6:]  # the first are dry runs
    assert [rate for rate, _ in taken] == pytest.approx([rate for rate, _ in expected], rel=1e-9)
    if cycled:
        assert [momentum for _, momentum in taken] == pytest.approx([one for _, one in expected], rel=1e-9)
    else:
        assert {momentum for _, momentum in taken} == {None}
    assert trainer.recipe.train.warmup_steps == 6 * pct_start or not cycled


def test_adam_state_is_live(model: nn.Module) -> None:
    """Restoring a checkpoint writes into the tensors that `tensors` returns."""
    first, twin = Adam(groups(model), options()), copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.step(1.0, (ONE, GOOD))
    second = Adam(groups(twin), options())
    with torch.no_grad():
        for name, tensor in second.tensors().items():
            tensor.copy_(first.tensors()[name])
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
            mine.grad = theirs.grad
    for optimizer in (first, second):
        optimizer.step(1.0, (ONE, GOOD))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_moving_average() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    ema = Ema({"w": weight}, 0.9)
    expected = weight.detach().clone()
    for step, value in ((100, 3.0), (101, 5.0), (102, -4.0)):
        with torch.no_grad():
            weight.fill_(value)
        ema.update(GOOD, step)
        expected = 0.9 * expected + 0.1 * value
        torch.testing.assert_close(ema.average["w"], expected)
    with torch.no_grad():
        weight.fill_(float("nan"))
    ema.update(BAD, 103)
    torch.testing.assert_close(ema.average["w"], expected)
    with torch.no_grad():
        weight.fill_(7.0)
    ema.swap()
    torch.testing.assert_close(weight.detach(), expected)
    ema.swap()
    assert weight.tolist() == [7.0, 7.0]
    torch.testing.assert_close(ema.average["w"], expected)


def test_a_young_average_forgets_the_initial_weights() -> None:
    """With the full decay, the average of a short run would be its initial weights."""
    weight = nn.Parameter(torch.zeros(1))
    ema = Ema({"w": weight}, 0.9999)
    with torch.no_grad():
        weight.fill_(1.0)
    for step in range(50):
        ema.update(GOOD, step)
    assert ema.average["w"].item() > 0.999


# --- the horizon


def test_progress_is_linear_in_counted_steps() -> None:
    horizon = Horizon(8, None)
    assert [horizon.progress(step) for step in range(10)] == [0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1]
    assert horizon.end == 8
    assert not horizon.replan_due(8, 1e9)


@st.composite
def clocked(draw: st.DrawFn) -> tuple[Horizon, list[float], list[float]]:
    """Return a horizon after a run with erratic speed, and the progress before and after each step."""
    steps = draw(st.one_of(st.none(), st.integers(5, 200)))
    horizon, seconds = Horizon(steps, 1.0), 0.0
    used, seen_later = [], []
    for step, duration in enumerate(draw(st.lists(st.floats(1.0, 400.0), min_size=5, max_size=60))):
        used.append(horizon.progress(step))
        seconds += duration
        if horizon.replan_due(step + 1, seconds):
            horizon.replan(step + 1, seconds, seconds / (step + 1), 20.0)
        seen_later.append(horizon.progress(step))
    return horizon, used, seen_later


@settings(max_examples=100, deadline=None)
@given(clocked())
def test_progress_never_falls_and_the_past_never_changes(case: tuple[Horizon, list[float], list[float]]) -> None:
    horizon, used, seen_later = case
    assert used == seen_later == [horizon.progress(step) for step in range(len(used))]
    assert used == sorted(used)
    assert all(0.0 <= p <= 1.0 for p in used)
    assert horizon.progress(horizon.end) == pytest.approx(1.0)
    if horizon.steps is not None:
        assert horizon.end <= max(horizon.steps, len(used) + 1)


@settings(max_examples=50, deadline=None)
@given(clocked(), st.integers(0, 500))
def test_the_state_of_a_horizon_survives_a_resume(case: tuple[Horizon, list[float], list[float]], later: int) -> None:
    old, used, _ = case
    new = Horizon(old.steps, 1.0)
    new.load_state(json.loads(json.dumps(old.state())), len(used), 0.0)
    assert new.state() == old.state()
    assert new.progress(later) == old.progress(later)
    assert [new.replan_due(later, s) for s in range(0, 3600, 60)] == [
        old.replan_due(later, s) for s in range(0, 3600, 60)
    ]


@given(st.integers(2, 1000), st.data())
def test_more_or_fewer_steps_on_resume(steps: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, steps - 1))
    changed = data.draw(st.integers(at + 1, 2000))
    old, new = Horizon(steps, None), Horizon(changed, None)
    new.load_state(old.state(), at, 0.0)
    assert new.progress(at) == pytest.approx(at / changed), "as if it had been the horizon from the start"
    assert new.progress(changed) == pytest.approx(1.0)
    assert new.end == changed
    assert all(new.progress(s) <= new.progress(s + 1) for s in range(changed))


def test_more_steps_on_resume_with_an_ample_time_budget() -> None:
    old, new = Horizon(100, 10.0), Horizon(200, 10.0)
    new.load_state(old.state(), 100, 60.0)
    assert new.progress(100) == 0.5
    assert new.progress(200) == 1.0


def test_no_replan_at_the_last_step() -> None:
    horizon = Horizon(25, 10.0)
    assert not any(horizon.replan_due(step, 0.006 * step) for step in range(26)), "steps bind, not the clock"
    assert horizon.replan(25, 7200.0, 0.006, 1.0) is None
    assert horizon.end == 25


def test_resuming_with_no_time_left_is_a_warning() -> None:
    assert not Horizon(100, None).resume_warning(100, 1e9)
    assert (
        Horizon(60, None).resume_warning(100, 1.0) == "the run is at step 100 already: its end, step 60, lies behind it"
    )
    assert not Horizon(None, 1.0).resume_warning(100, 1800.0)
    assert Horizon(None, 1.0).resume_warning(100, 3590.0).startswith("train.hours leaves 10s of 1h00m")


def test_a_new_time_budget_is_planned_at_once() -> None:
    old = Horizon(None, 1.0)
    for seconds in (80.0, 400.0):
        old.replan(int(seconds), seconds, 1.0, 0.0)
    new = Horizon(None, 2.0)
    new.load_state(old.state(), 400, 400.0)
    assert new.progress(400) == 400.0 / 7200.0
    assert new.replan_due(400, 400.0)
    piece = new.replan(400, 400.0, 1.0, 0.0)
    assert piece.length == 6800
    assert not new.replan_due(400, 400.0)
    assert new.replan_due(401, REPLAN_AT[3] * 7200)
