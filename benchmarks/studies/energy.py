"""Time, power and clock of the kernels of a step, each run long enough to reach the power limit.

    python -m benchmarks.studies.energy OUT.json [SECONDS]

At the power limit the clock falls, so the time of a step follows from the energy of its kernels: a kernel that needs
fewer joules makes the step faster even if it alone is not.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from redline.kernels.activations import swiglu, swiglu_backward_
from redline.kernels.rms_norm import add_rms_norm, rms_norm_backward
from redline.kernels.rotary import merge_rotated_gradients, rotate_qkv_
from redline.models.decoder import rotary_table

D, F, H, K, T, N = 1024, 2688, 16, 64, 1024, 131_072
if len(sys.argv) < 2 or not torch.cuda.is_available():
    sys.exit("usage: python -m benchmarks.studies.energy OUT.json [SECONDS], on a machine with an NVIDIA GPU")
pynvml.nvmlInit()
CARD = pynvml.nvmlDeviceGetHandleByIndex(0)


def sustained(work: Callable[[], Any], budget: float) -> dict[str, float]:
    """Return time, power and clock of one call: warm up for a third of `budget` seconds, then measure for the rest."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    calls = max(3, int(budget / 3 / (time.perf_counter() - begin)))
    for _ in range(calls):
        work()
    torch.cuda.synchronize()
    joules, begin = pynvml.nvmlDeviceGetTotalEnergyConsumption(CARD), time.perf_counter()
    for _ in range(2 * calls):
        work()
    clock = pynvml.nvmlDeviceGetClockInfo(CARD, pynvml.NVML_CLOCK_SM)
    torch.cuda.synchronize()
    spent = time.perf_counter() - begin
    joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(CARD) - joules) / 1e3
    return {"ms": 1e3 * spent / calls / 2, "watts": joules / spent, "mhz": clock, "joules": joules / calls / 2}


def bf16(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def fp8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn)


def matmuls() -> dict[str, tuple[Callable[[], Any], float]]:
    cases: dict[str, tuple[Callable[[], Any], float]] = {}
    one = torch.ones((), device="cuda")

    def scaled(a: torch.Tensor, b: torch.Tensor, out: torch.dtype, fast: bool) -> Callable[[], Any]:
        return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=out, use_fast_accum=fast)

    for name, (inner, outer) in {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 2 * F), "down": (F, D)}.items():
        x, g, w = bf16(N, inner), bf16(N, outer), bf16(outer, inner, scale=0.02)
        flops = 2.0 * N * inner * outer
        cases[f"{name} forward"] = (lambda x=x, w=w: x @ w.T, flops)
        cases[f"{name} dgrad"] = (lambda g=g, w=w: g @ w, flops)
        cases[f"{name} wgrad"] = (lambda g=g, x=x: torch.mm(g.T, x, out_dtype=torch.float32), flops)
        x8, g8, w8 = fp8(x), fp8(g), fp8(w * 50)
        w8t, x8t, g8t = w8.T.contiguous(), x8.T.contiguous(), g8.T.contiguous()
        cases[f"{name} forward fp8"] = (scaled(x8, w8, torch.bfloat16, True), flops)
        cases[f"{name} dgrad fp8"] = (scaled(g8, w8t, torch.bfloat16, True), flops)
        cases[f"{name} wgrad fp8"] = (scaled(g8t, x8t, torch.float32, True), flops)
        cases[f"{name} wgrad fp8 exact"] = (scaled(g8t, x8t, torch.float32, False), flops)
    return cases


def others() -> dict[str, tuple[Callable[[], Any], float]]:
    x, delta, g = bf16(N, D), bf16(N, D), bf16(N, D)
    weight = torch.rand(D, device="cuda") + 0.5
    total, _, rstd = add_rms_norm(x, delta, weight, 1e-5)
    batch = N // T
    qkv = bf16(batch, T, 3 * D)
    cos, sin = rotary_table(T, K, 1e4, torch.device("cuda"))
    h, grad_s = bf16(N, 2 * F), bf16(N, F)
    heads = [bf16(batch, T, H, K).transpose(1, 2) for _ in range(3)]
    q, k, v = (part.transpose(1, 2).requires_grad_() for part in bf16(batch, T, 3 * H, K).split(H, 2))
    upstream = bf16(batch, T, H, K).transpose(1, 2)
    attention = 2.0 * N * T * D

    def attend() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    out = attend()
    return {
        "attention forward": (attend, attention),
        "attention backward": (
            lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True),
            2.5 * attention,
        ),
        "add_rms_norm": (lambda: add_rms_norm(x, delta, weight, 1e-5), 0.0),
        "rms_norm_backward": (lambda: rms_norm_backward(g, total, rstd, weight, x), 0.0),
        "rotate_qkv_": (lambda: rotate_qkv_(qkv, cos, sin, H, H, K), 0.0),
        "merge_rotated_gradients": (lambda: merge_rotated_gradients(heads[0], heads[1], heads[2], cos, sin), 0.0),
        "swiglu": (lambda: swiglu(h), 0.0),
        "swiglu_backward_": (lambda: swiglu_backward_(grad_s, h), 0.0),
    }


def main() -> None:
    budget = float(sys.argv[2]) if len(sys.argv) > 2 else 0.8
    rows: dict[str, Any] = {}
    for group in (matmuls, others):
        for name, (work, flops) in group().items():
            row = rows[name] = sustained(work, budget)
            row["tflops"] = flops / row["ms"] / 1e9
            figures = f"{row['ms']:7.3f} ms {row['watts']:5.0f} W {row['mhz']:5.0f} MHz {row['tflops']:6.0f} TFLOP/s"
            print(f"{name:26s} {figures}", flush=True)
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": N}
    Path(sys.argv[1]).write_text(json.dumps(facts | {"kernels": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
