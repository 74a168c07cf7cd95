"""Which matmuls of a block run in fp8: those that are faster so, measured once at the run's own shapes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import UserError, install_hint
from redline.hardware.measurements import FLOAT8, gpu_key, read_measurement, store_measurement
from redline.hardware.nvml import driver_version
from redline.kernels.float8 import (
    MULTIPLE,
    Scale,
    input_gradient8,
    linear8,
    mean_correction,
    quantise,
    weight_gradient8,
)
from redline.kernels.matmul import weight_gradient
from redline.kernels.timing import kernel_ms

# ----------------------------------------------------------------------------------------------------
# Linear layers in fp8 by torchao, for the blocks that torch.compile fuses: dynamic scales, one per tensor.


Float8Linear = Callable[[Tensor, Tensor], Tensor]


def missing() -> str:
    """Why torchao cannot serve; empty when it can."""
    return "" if find_spec("torchao") is not None else f"torchao is not installed ({install_hint('fp8')})"


def float8_linear() -> Float8Linear:
    """x·Wᵀ whose three matmuls run in fp8, for a weight of any precision."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Module
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    with torch.device("meta"):
        like = nn.Linear(16, 16, bias=False)
    config = Float8LinearConfig()
    how = Module.from_float(like, config).linear_mm_config

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.to(x.dtype).t(), how, config)
        return out

    return linear


CAST = ("out", "head")  # native: their inputs come from kernels that know no fp8
Shapes = dict[str, tuple[int, int, int]]  # linear → tokens, width of its input and of its output


@dataclass(frozen=True)
class Float8Choice:
    backend: str  # native, torchao, or none
    linears: tuple[str, ...]
    reason: str
    failed: tuple[str, ...] = ()  # the linears whose trial raised an error: they stay in bf16

    @property
    def text(self) -> str:
        return f"{self.backend}: {', '.join(self.linears)}" if self.linears else "none"


def choose(asked: str, shapes: Shapes, *, fused: bool, learns: bool = True) -> Float8Choice:
    """`native` is for fused blocks, `torchao` for compiled ones; what cannot be in fp8, or loses, stays in bf16.

    A weight that does not learn has no gradient, and its cast costs much the same either way. A matmul whose trial
    raises an error (cuBLASLt does not support every shape) stays in bf16, and the reason names the error.
    """
    if not fused and (asked == "native" or not learns):
        return Float8Choice("none", (), "native fp8 is part of the fused kernels, which are off")
    if not fused and missing():
        if asked == "torchao":  # asked for by name: training in bf16 instead is not what was meant
            fix = "Install it, or use train.fp8=auto or train.precision=bf16."
            raise UserError(f"{missing()}.", where="train.fp8", fix=fix)
        return Float8Choice("none", (), missing())
    backend = "native" if fused else "torchao"
    able = {name: shape for name, shape in shapes.items() if all(side % MULTIPLE == 0 for side in shape)}
    odd = [f"{name} is no multiple of {MULTIPLE}" for name in shapes if name not in able]
    key = _key(backend, able, learns)
    times, date = _recall(key, able), ""
    errors: dict[str, str] = {}
    if times is None:
        times = {}
        for name, shape in able.items():
            try:
                times[name] = measure(backend, *shape, cast=name in CAST, learns=learns)
            except torch.OutOfMemoryError:
                raise  # the run recovers from it with smaller micro-batches
            except Exception as error:
                errors[name] = _first_line(error)
        if not errors:  # the next run tries again what failed
            store_measurement(FLOAT8, key, {"ms": times})
        torch.cuda.empty_cache()  # the model wants the room in other pieces
    else:
        date = ", as measured before"
    faster = tuple(name for name, (bf16, fp8) in times.items() if fp8 < bf16)
    told = [f"{name} {bf16:.2f} → {fp8:.2f}" for name, (bf16, fp8) in times.items()]
    which = f"a layer's {'three' if learns else 'two'} matmuls"
    failed = [f"{name} failed: {error}" for name, error in errors.items()]
    reason = f"ms of {which} in bf16 → fp8{date}: {'; '.join([', '.join(told) or 'none', *odd, *failed])}"
    return Float8Choice(backend if faster else "none", faster, reason, tuple(errors))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__


def measure(
    backend: str, tokens: int, inner: int, outer: int, *, cast: bool, learns: bool = True
) -> tuple[float, float]:
    """Milliseconds of forward and both gradients, in bf16 and in fp8, the weight's cast included; of a weight that does
    not learn, of the forward and its input's gradient alone."""
    x, grad = (torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for width in (inner, outer))
    weight = torch.randn(outer, inner, device="cuda") / inner**0.5
    if not learns:
        bf16, fp8 = _frozen(x, grad, weight, cast)
    else:
        bf16 = _bf16(x, grad, weight)
        fp8 = _native(x, grad, weight, cast) if backend == "native" else _torchao(x, grad, weight)
    pairs = [(kernel_ms(bf16), kernel_ms(fp8)) for _ in range(3)]  # in turns: the card's clock wanders
    first, second = zip(*pairs, strict=True)
    return round(statistics.median(first), 4), round(statistics.median(second), 4)


def _bf16(x: Tensor, grad: Tensor, weight: Tensor) -> Callable[[], Any]:
    def work() -> Any:
        half = weight.to(torch.bfloat16)
        return x @ half.T, grad @ half, weight_gradient(grad, x)

    return work


def _native(x: Tensor, grad: Tensor, weight: Tensor, cast: bool) -> Callable[[], Any]:
    """Operands are made by the kernels around, at the price of bf16 ones: only the weight is cast, and some inputs."""
    one = torch.ones((), device="cuda")
    scale = Scale(one, one, None)
    x8, grad8 = quantise(x, scale), quantise(grad, scale)

    def work() -> Any:
        operand, matrix = quantise(x, scale) if cast else x8, quantise(weight, scale)
        product = linear8(operand, matrix, mean_correction(operand, matrix, weight))
        return product, input_gradient8(grad8, matrix), weight_gradient8(grad8, operand)

    return work


def _frozen(x: Tensor, grad: Tensor, weight: Tensor, cast: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    one = torch.ones((), device="cuda")
    scale, half = Scale(one, one, None), weight.to(torch.bfloat16)
    x8, grad8, matrix = (quantise(operand, scale) for operand in (x, grad, half))

    def in_fp8() -> Any:
        return linear8(quantise(x, scale) if cast else x8, matrix), input_gradient8(grad8, matrix)

    return lambda: (x @ half.T, grad @ half), in_fp8


def _torchao(x: Tensor, grad: Tensor, weight: Tensor) -> Callable[[], Any]:
    """Compiled, as in the blocks: uncompiled, each cast would be half a dozen kernels."""
    linear = torch.compile(float8_linear(), dynamic=False)
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return lambda: torch.autograd.grad(linear(x, weight), (x, weight), grad)


def _recall(key: str, shapes: Shapes) -> dict[str, tuple[float, float]] | None:
    kept = (read_measurement(FLOAT8, key) or {}).get("ms")
    if not isinstance(kept, dict) or set(kept) != set(shapes):
        return None
    pairs = {name: tuple(pair) for name, pair in kept.items() if isinstance(pair, list) and len(pair) == 2}
    if len(pairs) != len(shapes) or not all(isinstance(ms, float) and ms > 0 for pair in pairs.values() for ms in pair):
        return None
    return {name: (pairs[name][0], pairs[name][1]) for name in shapes}


def _key(backend: str, shapes: Shapes, learns: bool) -> str:
    machine = gpu_key(torch.cuda.get_device_properties(0).name, driver_version())
    told = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items())
    return f"{machine}; {backend}{'' if learns else ', frozen'}: {told}"
