"""The low-rank linear against plain torch operations, and against PEFT's own."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from redline.errors import UsageError, UserError
from redline.jobs.objective import role_groups
from redline.kernels.low_rank import keep_probability
from redline.models.adapters import FrozenMatrix, LoraLinear
from redline.models.decoder import CHECKPOINTING

QKV = {"q": 40, "k": 24, "v": 24}


def lora(
    parts: dict[str, int], inputs: int, adapted: Any = None, *, base: str = "nf4", bias: bool = False, **options: Any
) -> LoraLinear:
    """Return a layer whose B is not zero, so that A has a gradient."""
    generator = torch.Generator().manual_seed(inputs)
    weights = [torch.randn(rows, inputs, generator=generator) / inputs**0.5 for rows in parts.values()]
    matrix = FrozenMatrix(torch.cat(weights), tuple(parts.values()), quantise=base == "nf4")
    offset = torch.randn(sum(parts.values()), generator=generator) if bias else None
    options = {"r": 3, "alpha": 5.0, "dropout": 0.0} | options
    linear = LoraLinear(matrix, parts, parts if adapted is None else adapted, bias=offset, **options)
    linear.initialise(generator)
    for b in linear.lora_B.values():
        b.data.normal_(generator=generator)
    return linear


def unfused(linear: LoraLinear, x: Tensor, mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return the output by plain operations, and the leaves x, A and each B, in that order, for autograd."""
    leaves = [x.to(dtype)] + [p.detach().to(dtype) for p in linear.parameters()]
    x, *matrices = (leaf.detach().clone().requires_grad_() for leaf in leaves)
    bias = None if linear.bias is None else linear.bias.to(dtype)
    y = F.linear(x, linear.base.dense(torch.float32).to(dtype), bias)
    dropped = x if mask is None else x * mask.to(dtype) / keep_probability(linear.dropout)
    added = torch.zeros_like(y)
    for b, (rows, columns) in zip(matrices[1:], linear.adapters.values(), strict=True):
        added[..., rows] += linear.scale * (dropped @ matrices[0][columns].T @ b.T)
    return y + added, [x, *matrices]


def check(linear: LoraLinear, x: Tensor, slack: float, seed: int = 5) -> None:
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    y = linear(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    y.backward(weights)
    mask = mask_of(linear, x, seed) if linear.dropout and linear.training else None
    expected, leaves = unfused(linear, x, mask, torch.float64)
    expected.backward(weights.double())
    assert (y.dtype, y.shape) == (x.dtype, expected.shape)
    close(y, expected, slack)
    for mine, leaf in zip([x, *linear.parameters()], leaves, strict=True):
        assert mine.grad is not None
        assert leaf.grad is not None
        assert mine.grad.dtype == mine.dtype
        close(mine.grad, leaf.grad, slack)


def mask_of(linear: LoraLinear, x: Tensor, seed: int) -> Tensor:
    """Return the dropout mask, observed through an adapter that copies its input, on a base of zeros."""
    inputs = x.shape[-1]
    probe = LoraLinear(FrozenMatrix(torch.zeros(inputs, inputs)), {"o": inputs}, ["o"], inputs, inputs, linear.dropout)
    for parameter in probe.parameters():
        parameter.data.copy_(torch.eye(inputs))
    torch.manual_seed(seed)
    return (probe(torch.ones_like(x)) > 0).detach()


def close(found: Tensor, expected: Tensor, slack: float) -> None:
    """Compare relative to the tensor's norm: single values may cancel."""
    error = (found.double() - expected.double()).norm()
    assert error <= slack * expected.double().norm() + 1e-30


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    widths=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    inputs=st.integers(1, 90),
    tokens=st.lists(st.integers(1, 7), min_size=1, max_size=2),
    r=st.integers(1, 20),
    dropout=st.sampled_from([0.0, 0.3]),
    base=st.sampled_from(["nf4", "plain"]),
    bias=st.booleans(),
    rslora=st.booleans(),
)
def test_any_size(
    data: Any,
    widths: list[int],
    inputs: int,
    tokens: list[int],
    r: int,
    dropout: float,
    base: str,
    bias: bool,
    rslora: bool,
) -> None:
    parts = dict(zip("qkv", widths, strict=False))
    adapted = data.draw(st.sets(st.sampled_from(sorted(parts)), min_size=1))
    linear = lora(parts, inputs, adapted, base=base, bias=bias, r=r, dropout=dropout, rslora=rslora)
    x = torch.randn(*tokens, inputs, generator=torch.Generator().manual_seed(r))
    check(linear, x, 5e-5)  # what is summed may cancel


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("base", ["nf4", "plain"])
def test_half_precision(base: str, dropout: float) -> None:
    linear = lora(QKV, 128, ["q", "v"], base=base, bias=True, r=16, alpha=16.0, dropout=dropout)
    check(linear, torch.randn(4, 33, 128, generator=torch.Generator().manual_seed(2)).bfloat16(), 2**-7)


def test_dropout_is_of_the_adapter_alone_and_of_training_alone() -> None:
    linear = lora({"o": 64}, 256, r=4, dropout=0.25)
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    share = mask_of(linear, x, 3).double().mean()
    assert abs(share - 0.75) < 0.01
    torch.manual_seed(1)
    first, other = linear(x), linear(x)
    torch.manual_seed(1)
    assert torch.equal(linear(x), first)
    assert not torch.equal(first, other)
    for parameter in linear.lora_B.values():
        parameter.data.zero_()
    assert torch.equal(linear(x), linear.eval()(x))  # the base's input is whole
    linear = lora({"o": 64}, 256, r=4, dropout=0.25).eval()
    check(linear, x, 1e-5)
    assert torch.equal(linear(x), linear(x))


@pytest.mark.parametrize("base", ["nf4", "plain"])
def test_nothing_as_large_as_the_base_lives_between_the_passes(base: str) -> None:
    linear = lora({"gate": 72, "up": 56}, 96, base=base)  # computed in bf16: a plain base is cast, too
    x = torch.randn(5, 96, dtype=torch.bfloat16, requires_grad=True)
    sizes: list[int] = []

    def seen(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    before = large()
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        y = linear(x)
    assert large() == before
    assert sorted(sizes) == sorted([x.numel(), 5 * 6, 6 * 96, 72 * 3, 56 * 3])  # x, x·Aᵀ, A, the Bs
    y.sum().backward()
    assert large() == before
    assert [name for name, _ in linear.named_parameters()] == ["lora_A", "lora_B.gate", "lora_B.up"]
    assert list(linear.state_dict()) == ["lora_A", "lora_B.gate", "lora_B.up"]  # the base is not trained nor saved
    assert linear.base.plain is None or linear.base.plain.grad is None


def large() -> int:
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter) and x.is_floating_point()]
    return len({x.data_ptr() for x in found if x.numel() >= 128 * 96})


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_checkpointed_the_same(kind: str) -> None:
    linear, x = lora(QKV, 48, dropout=0.2), torch.randn(6, 48)

    def gradients(run: Any) -> list[Tensor]:
        linear.zero_grad()
        here = x.clone().requires_grad_()
        torch.manual_seed(7)
        run(lambda z: linear(F.silu(linear(z)[:, :48])), here).square().sum().backward()
        return [here.grad, *(p.grad for p in linear.parameters())]  # type: ignore[list-item]

    plain, again = gradients(CHECKPOINTING["none"]), gradients(CHECKPOINTING[kind])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_frozen_input_gets_no_gradient() -> None:
    linear = lora(QKV, 48)
    linear(torch.randn(4, 48)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in linear.parameters())


def test_without_adapters_it_is_the_base() -> None:
    linear = lora(QKV, 48, [], bias=True)
    assert not list(linear.parameters())
    x = torch.randn(3, 48, requires_grad=True)
    weight = linear.base.dense(torch.float32)
    y = linear(x)
    torch.testing.assert_close(y, F.linear(x, weight, linear.bias))
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))
    assert checkpoint(linear, torch.ones(1, 48), use_reentrant=False).shape == (1, 88)


def test_nan_is_seen_everywhere() -> None:
    linear = lora(QKV, 48, ["k"], dropout=0.1)
    x = torch.randn(4, 48)
    x[1, 5] = float("nan")
    x.requires_grad_()
    y = linear(x)
    assert y.isnan().any(1).tolist() == [False, True, False, False]
    assert bool(y[1].isnan().all())
    y.sum().backward()
    assert all(bool(p.grad.isnan().any()) for p in linear.parameters())  # type: ignore[union-attr]
    (lora(QKV, 48)(x) * torch.tensor(float("nan"))).sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isnan().all())


def test_the_base_is_moved_but_never_cast() -> None:
    linear = lora(QKV, 64).to(torch.bfloat16)
    assert linear.base.quantised[0].nested is not None
    assert linear.base.quantised[0].nested[1].dtype == torch.float32
    assert torch.equal(linear.base.dense(torch.float32), lora(QKV, 64).base.dense(torch.float32))
    assert lora(QKV, 64).to("meta").base.device.type == "meta"


def test_parts_are_quantised_one_by_one() -> None:
    weights = [torch.randn(rows, 64) * rows for rows in (5, 70)]
    together = FrozenMatrix(torch.cat(weights), (5, 70), quantise=True).dense(torch.float32)
    alone = [FrozenMatrix(weight, quantise=True).dense(torch.float32) for weight in weights]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(together, FrozenMatrix(torch.cat(weights), quantise=True).dense(torch.float32))


def test_a_plain_base_is_kept_as_it_is_computed() -> None:
    weight = torch.randn(6, 8)
    base = FrozenMatrix(weight, dtype=torch.bfloat16)
    assert torch.equal(base.dense(torch.bfloat16), weight.bfloat16())
    assert base.dense(torch.bfloat16) is base.plain  # no copy
    assert base.dense(torch.float32).dtype == torch.float32


@pytest.mark.parametrize("rslora", [False, True])
def test_merged_it_computes_the_same(rslora: bool) -> None:
    linear = lora(QKV, 48, ["q", "v"], rslora=rslora)
    x = torch.randn(7, 48)
    merged = linear.merged_weight()
    assert merged.dtype == torch.float32
    torch.testing.assert_close(x @ merged.T, linear(x))
    assert torch.equal(merged[40:64], linear.base.dense(torch.float32)[40:64])  # k has no adapter
    plain = lora(QKV, 48, ["q"], base="plain")
    before = plain.base.dense(torch.float32).clone()
    plain.merged_weight()
    assert torch.equal(plain.base.dense(torch.float32), before)


def test_initialised_as_peft_does() -> None:
    linear = lora(QKV, 1000, ["v", "q"], r=8)
    linear.initialise(torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    expected = [nn.init.kaiming_uniform_(torch.empty(8, 1000), a=5**0.5, generator=generator) for _ in range(2)]
    assert linear.lora_A is not None
    assert torch.equal(linear.lora_A, torch.cat(expected))
    assert not any(bool(b.any()) for b in linear.lora_B.values())


def test_adapters_by_pefts_names() -> None:
    prefix = "base_model.model.model.layers.3.self_attn"
    linear, other = lora(QKV, 48, ["q", "v"]), lora(QKV, 48, ["q", "v"], alpha=1.0)
    tensors = linear.adapter_tensors(prefix)
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        f"{prefix}.q_proj.lora_A.weight": (3, 48),
        f"{prefix}.q_proj.lora_B.weight": (40, 3),
        f"{prefix}.v_proj.lora_A.weight": (3, 48),
        f"{prefix}.v_proj.lora_B.weight": (24, 3),
    }
    assert save(tensors)  # which refuses tensors that share memory
    other.initialise(torch.Generator().manual_seed(99))
    other.load_adapter_tensors(prefix, tensors | {"another": torch.zeros(1)})
    assert all(torch.equal(a, b) for a, b in zip(linear.parameters(), other.parameters(), strict=True))
    del tensors[f"{prefix}.v_proj.lora_B.weight"]
    with pytest.raises(UserError, match=r"v_proj.lora_B.weight is missing"):
        other.load_adapter_tensors(prefix, tensors)
    with pytest.raises(UserError, match=r"\[3, 48\].*\[4, 48\]"):
        lora(QKV, 48, ["q"], r=4).load_adapter_tensors(prefix, tensors)


def test_impossible_adapters_are_refused() -> None:
    with pytest.raises(UsageError, match="no o to adapt"):
        lora(QKV, 8, ["q", "o"])
    for options in ({"r": 0}, {"dropout": 1.0}, {"dropout": -0.1}):
        with pytest.raises(UsageError, match=r"lora\.r=.*lora\.dropout="):
            lora(QKV, 8, **options)


@pytest.mark.parametrize("rslora", [False, True])
def test_the_same_as_pefts_own_linear(rslora: bool) -> None:
    peft = pytest.importorskip("peft", reason="compared with peft")
    linear = lora(QKV, 48, ["q", "v"], bias=True, rslora=rslora)
    weights, biases = linear.base.dense(torch.float32).split(linear.splits), linear.bias.split(linear.splits)  # type: ignore[union-attr]
    theirs = nn.ModuleDict({f"{name}_proj": nn.Linear(48, rows) for name, rows in QKV.items()})
    for module, weight, bias in zip(theirs.values(), weights, biases, strict=True):
        module.weight.data, module.bias.data = weight.clone(), bias.clone()  # type: ignore[union-attr]
    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=5, lora_dropout=0.0, target_modules=targets, use_rslora=rslora)
    peft.inject_adapter_in_model(config, theirs)
    tensors = {f"m.{name.replace('.default', '')}": p for name, p in theirs.named_parameters() if "lora" in name}
    for name, tensor in linear.adapter_tensors("m").items():
        tensors[name].data.copy_(tensor)
    x, other = (torch.randn(5, 48, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    y, expected = linear(x), torch.cat([module(other) for module in theirs.values()], -1)
    close(y, expected, 1e-6)
    for output in (y, expected):
        output.square().sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    close(x.grad, other.grad, 1e-6)
    assert linear.lora_A is not None
    for name, a in zip(targets, linear.lora_A.grad.split(3), strict=True):  # type: ignore[union-attr]
        close(a, tensors[f"m.{name}.lora_A.weight"].grad, 1e-6)
        close(linear.lora_B[name[0]].grad, tensors[f"m.{name}.lora_B.weight"].grad, 1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_compiler_begins_once_for_all_passes(dropout: float) -> None:
    """A seed for each pass is a number of Python's: a compiler that followed it would begin anew each time."""
    linear, graphs = lora({"gate": 32, "up": 32}, 48, dropout=dropout), []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def twice(x: Tensor) -> Tensor:
        return linear(2 * x) + 1

    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(4))
    torch.manual_seed(7)
    expected = [twice(x) for _ in range(4)]
    linear.before_compiling()
    compiled = torch.compile(twice, backend=count)
    torch.manual_seed(7)
    assert torch.equal(compiled(x), expected[0])
    first = len(graphs)
    assert first > 0
    assert all(torch.equal(compiled(x), value) for value in expected[1:])
    assert len(graphs) == first


def test_training_imports_no_compiler() -> None:
    """The import takes a second."""
    code = "import sys, redline.models.adapters; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("base", ["nf4", "plain"])
def test_where_nothing_learns_a_compiler_sees_all_that_is_plain(base: str) -> None:
    linear = lora({"gate": 32, "up": 32}, 64, [], base=base)
    linear.before_compiling()
    compiled = torch.compile(lambda x: linear(2 * x).sin(), backend="aot_eager", fullgraph=base == "plain")
    results = []
    for run in (lambda x: linear(2 * x).sin(), compiled):
        x = torch.randn(6, 64, generator=torch.Generator().manual_seed(4)).requires_grad_()
        y = run(x)
        y.sum().backward()
        results.append((y.detach(), x.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_muon_takes_merged_adapters_one_by_one() -> None:
    """Otherwise the update of one part would depend on which others are adapted."""
    linear = LoraLinear(FrozenMatrix(torch.randn(24, 8)), {"q": 8, "k": 8, "v": 8}, ["q", "v"], 4, 4, 0.0)
    (group,) = role_groups(linear)
    assert group.splits == {"lora_A": (4, 4), "lora_B.q": (8,), "lora_B.v": (8,)}
