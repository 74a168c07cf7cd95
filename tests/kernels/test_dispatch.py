"""Operations pick their implementation by device, and both implementations have the same signature."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redline.kernels import activations, cross_entropy, float8, low_rank, muon, nf4, qk_norm, rms_norm, rotary, skip
from redline.kernels.activations import ACTIVATIONS
from redline.kernels.dispatch import Op, op, sm_count, triton_serves
from redline.planning.shapes import ACTIVATIONS as NAMES

MODULES = (activations, cross_entropy, float8, low_rank, muon, nf4, qk_norm, rms_norm, rotary, skip)
OPS = {f"{m.__name__}.{n}": v for m in MODULES for n, v in vars(m).items() if isinstance(v, Op)}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    signature = inspect.signature(function)
    return [(p.name.lstrip("_"), p.kind, p.default) for p in signature.parameters.values()]


@pytest.mark.parametrize("name", OPS)
def test_the_triton_implementation_takes_the_same_arguments(name: str) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    signature = parameters(OPS[name].triton)
    expected = parameters(OPS[name].reference)
    assert signature[: len(expected)] == expected
    assert all(default is not inspect.Parameter.empty for _, _, default in signature[len(expected) :])


def test_the_first_argument_decides() -> None:
    @op(triton="activations:swiglu")
    def twice(x: Any) -> Any:
        """Return it twice."""
        return "reference", x

    twice.__dict__["triton"] = lambda x: ("triton", x)
    on_gpu, elsewhere = SimpleNamespace(is_cuda=True), torch.zeros(1)
    assert twice(on_gpu) == ("triton", on_gpu)
    assert twice(elsewhere) == ("reference", elsewhere)
    assert (twice.__name__, twice.__doc__) == ("twice", "Return it twice.")


def test_a_condition_of_its_own_decides() -> None:
    @op(triton="activations:swiglu", uses_triton=lambda *_, large: large)
    def size(*, large: bool) -> str:
        return "reference"

    size.__dict__["triton"] = lambda *, large: "triton"
    assert (size(large=True), size(large=False)) == ("triton", "reference")


def test_triton_is_not_imported_where_no_tensor_is_on_a_gpu() -> None:
    code = (
        "import sys, torch; from redline.models import fused; from redline.kernels.activations import relu2;"
        "relu2(torch.ones(2, 2)); assert 'redline.kernels.triton' not in sys.modules, 'imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_there_is_one_program_at_a_time() -> None:
    assert sm_count(torch.device("cpu")) == 1
    assert not triton_serves(torch.device("cpu"), "muon._descend")


def test_every_activation_of_a_recipe_has_its_functions() -> None:
    assert ACTIVATIONS.keys() == NAMES.keys()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_functions_of_an_activation_agree(name: str) -> None:
    """The plain form by autograd, and forward and backward as written."""
    functions = ACTIVATIONS[name]
    h = torch.randn(6, 8 * (2 if NAMES[name] else 1), generator=torch.Generator().manual_seed(1)).requires_grad_()
    grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    out = functions.plain(h)
    (expected,) = torch.autograd.grad(out, h, grad)
    torch.testing.assert_close(functions.forward(h.detach()), out.detach())
    torch.testing.assert_close(functions.backward_(grad, h.detach().clone()), expected)
    scale = float8.Scale(torch.tensor(16.0), torch.tensor(1 / 16.0), None)
    for operand, exact in (
        (functions.forward8(h.detach(), scale), out.detach()),
        (functions.backward8(grad, h.detach(), scale), expected),
    ):
        assert operand.row is not None
        torch.testing.assert_close(operand.row.float() / 16.0, exact, rtol=2**-4, atol=2**-10)
