"""The choice of the matmuls that run in fp8: those that are faster, measured once at the run's own shapes.

    python -m redline.kernels.float8_choice LINEAR … < request.json

is the child process of `choose`, in which each linear is tried.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import UserError, install_hint
from redline.hardware.measurements import FLOAT8, gpu_key, read_measurement, store_measurement
from redline.hardware.nvml import driver_version
from redline.hardware.trials import Answers, answer_trials, run_trials
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
# Linear layers in fp8 by torchao, for blocks that torch.compile compiles: dynamic scales, one per tensor.


Float8Linear = Callable[[Tensor, Tensor], Tensor]


def missing() -> str:
    """Why torchao cannot serve; empty when it can."""
    return "" if find_spec("torchao") is not None else f"torchao is not installed ({install_hint('fp8')})"


def float8_linear() -> Float8Linear:
    """Return a function for x·Wᵀ whose three matmuls run in fp8, for a weight of any precision."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Module
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    with torch.device("meta"):
        template = nn.Linear(16, 16, bias=False)
    config = Float8LinearConfig()
    mm_config = Module.from_float(template, config).linear_mm_config

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = matmul_with_hp_or_float8_args.apply(x, weight.to(x.dtype).t(), mm_config, config)
        return out

    return linear


# ----------------------------------------------------------------------------------------------------
# The choice.


CAST = ("out", "head")  # native: linears whose input no fused kernel writes in fp8, so that it must be cast
_NATIVE_SECONDS, _TORCHAO_SECONDS = 60, 180  # time limits of the trial of one linear; torchao's is compiled first
Shapes = dict[str, tuple[int, int, int]]  # linear → tokens, width of its input and of its output


@dataclass(frozen=True)
class Float8Choice:
    """The linears that run in fp8, by which back-end, and why."""

    backend: str  # native, torchao, or none
    linears: tuple[str, ...]
    reason: str
    failed: tuple[str, ...] = ()  # the linears whose trial failed, crashed, hung or was wrong: they stay in bf16

    @property
    def text(self) -> str:
        return f"{self.backend}: {', '.join(self.linears)}" if self.linears else "none"


def choose(requested: str, shapes: Shapes, *, fused: bool, learns: bool = True) -> Float8Choice:
    """Choose the linears to run in fp8: by `native` in fused blocks, by `torchao` in compiled ones.

    A linear that cannot run in fp8, or is not faster, stays in bf16. So does one whose trial fails (cuBLASLt does not
    support every shape), crashes, hangs or computes something else than bf16 does; the reason says which. `learns` is
    False for a frozen weight: it has no gradient, and its cast is not counted because bf16 pays a similar one.
    """
    if not fused and (requested == "native" or not learns):
        return Float8Choice("none", (), "native fp8 needs model.kernels=fused")
    if not fused and missing():
        if requested == "torchao":  # asked for by name: do not train in bf16 silently
            fix = "Install it, or use train.fp8=auto or train.precision=bf16."
            raise UserError(f"{missing()}.", where="train.fp8", fix=fix)
        return Float8Choice("none", (), missing())
    backend = "native" if fused else "torchao"
    able = {name: shape for name, shape in shapes.items() if all(side % MULTIPLE == 0 for side in shape)}
    odd = [f"{name} has a side that is not a multiple of {MULTIPLE}" for name in shapes if name not in able]
    key = _key(backend, able, learns)
    times, date = _recall(key, able), ""
    errors: dict[str, str] = {}
    if times is None:
        answers = try_linears(backend, able, learns=learns)
        if any(answer.get("kind") == "OutOfMemoryError" for answer in answers.values()):
            # The trainer recovers with smaller micro-batches, at whose shapes the linears are tried again.
            raise torch.OutOfMemoryError("the trial of the fp8 matmuls ran out of GPU memory")
        times = {name: tuple(answer["about"]) for name, answer in answers.items() if answer["works"]}
        errors = {name: answer["detail"] for name, answer in answers.items() if not answer["works"]}
        if not errors:  # otherwise the next run tries again
            store_measurement(FLOAT8, key, {"ms": times})
    else:
        date = ", as measured before"
    faster = tuple(name for name, (bf16, fp8) in times.items() if fp8 < bf16)
    milliseconds = [f"{name} {bf16:.2f} → {fp8:.2f}" for name, (bf16, fp8) in times.items()]
    which = f"a layer's {'three' if learns else 'two'} matmuls"
    failed = [f"{name} failed: {error}" for name, error in errors.items()]
    reason = f"ms of {which} in bf16 → fp8{date}: {'; '.join([', '.join(milliseconds) or 'none', *odd, *failed])}"
    return Float8Choice(backend if faster else "none", faster, reason, tuple(errors))


def try_linears(backend: str, shapes: Shapes, *, learns: bool) -> Answers:
    """Try each linear in a child process, which may crash or hang, and return what `measure` answered."""
    if not shapes:
        return {}
    torch.cuda.empty_cache()  # the child needs memory for the operands
    request = json.dumps({"backend": backend, "shapes": shapes, "learns": learns})
    return run_trials("redline.kernels.float8_choice", list(shapes), request=request)


def linear_trials(backend: str, shapes: Shapes, *, learns: bool) -> dict[str, Callable[[], tuple[float, float]]]:
    """Return the trial of each linear."""
    return {name: partial(measure, backend, *shape, cast=name in CAST, learns=learns) for name, shape in shapes.items()}


def measure(
    backend: str, tokens: int, inner: int, outer: int, *, cast: bool, learns: bool = True
) -> tuple[float, float]:
    """Return the milliseconds of forward and both gradients in bf16 and in fp8, the cast of the weight included.

    For a frozen weight, measure the forward and the gradient of the input only. Raise an ArithmeticError if a result in
    fp8 is further from that in bf16 than rounding explains.
    """
    x, grad = (torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for width in (inner, outer))
    weight = torch.randn(outer, inner, device="cuda") / inner**0.5
    if not learns:
        bf16, fp8 = _frozen(x, grad, weight, cast)
    else:
        bf16 = _bf16(x, grad, weight)
        fp8 = _native(x, grad, weight, cast) if backend == "native" else _torchao(x, grad, weight)
    _check_results(bf16, fp8)
    pairs = [(kernel_ms(bf16), kernel_ms(fp8)) for _ in range(3)]  # alternately, because the clock of the GPU drifts
    first, second = zip(*pairs, strict=True)
    return round(statistics.median(first), 4), round(statistics.median(second), 4)


# Relative to the norm of the result. Rounding both operands to e4m3, which has three bits of mantissa, costs 0.04.
_TOLERANCE = 0.1
_ROWS_CHECKED = 4096  # of each result: all rows in float32 would need several times the memory of the trial


def _check_results(bf16: Callable[[], Sequence[Tensor]], fp8: Callable[[], Sequence[Tensor]]) -> None:
    exact, found = _sampled_rows(bf16()), _sampled_rows(fp8())
    # torchao's work returns the two gradients alone.
    for expected, result in zip(exact[-len(found) :], found, strict=True):
        difference = float((result - expected).norm() / expected.norm())
        if not difference < _TOLERANCE:
            raise ArithmeticError(f"the result is wrong: it differs from bf16's by {difference:.0%}")


def _sampled_rows(results: Sequence[Tensor]) -> list[Tensor]:
    return [result[:: max(1, len(result) // _ROWS_CHECKED)].float() for result in results]


def _bf16(x: Tensor, grad: Tensor, weight: Tensor) -> Callable[[], Any]:
    def work() -> Any:
        half = weight.to(torch.bfloat16)
        return x @ half.T, grad @ half, weight_gradient(grad, x)

    return work


def _native(x: Tensor, grad: Tensor, weight: Tensor, cast: bool) -> Callable[[], Any]:
    """Return the work in native fp8. Most operands are written by fused kernels, as fast as bf16 ones: only the weight,
    and with `cast` the input, is cast here.
    """
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
    """Return the work by torchao, compiled as in the blocks: without that, each cast would be half a dozen kernels."""
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
    sizes = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items())
    return f"{machine}; {backend}{'' if learns else ', frozen'}: {sizes}"


def main(names: list[str]) -> None:
    """Try the named linears of the request on standard input."""
    request = json.load(sys.stdin)
    trials = linear_trials(**request)
    seconds = _TORCHAO_SECONDS if request["backend"] == "torchao" else _NATIVE_SECONDS
    answer_trials(names, trials, dict.fromkeys(trials, seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
