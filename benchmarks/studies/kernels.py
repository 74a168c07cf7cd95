"""Time of each part of a 350M block on this GPU, against its lower bound: bytes / bandwidth or FLOPs / dense peak.

    python -m benchmarks.studies.kernels OUT.json [TOKENS]

It also times matmuls in every orientation and with both output precisions, and a weight gradient concurrent with a
memory-bound kernel on a second stream, to show what could still be gained.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.studies.rates import copy_rate, seconds
from redline.kernels.activations import swiglu, swiglu_backward_
from redline.kernels.rms_norm import add_rms_norm, rms_norm_backward
from redline.kernels.rotary import merge_rotated_gradients, rotate_qkv_
from redline.models.decoder import rotary_table

D, F, H, K, T = 1024, 2688, 16, 64, 1024
PEAK = 989e12


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def memory_bound(tokens: int, bandwidth: float) -> dict[str, Any]:
    x, delta, g = bf16(tokens, D), bf16(tokens, D), bf16(tokens, D)
    weight = torch.rand(D, device="cuda") + 0.5
    total, _, rstd = add_rms_norm(x, delta, weight, 1e-5)
    batch = tokens // T
    qkv = bf16(batch, T, 3 * D)
    cos, sin = rotary_table(T, K, 1e4, torch.device("cuda"))
    heads = [bf16(batch, T, H, K).transpose(1, 2) for _ in range(3)]
    h, grad_s = bf16(tokens, 2 * F), bf16(tokens, F)
    work: dict[str, tuple[Callable[[], Any], float]] = {
        "add_rms_norm": (lambda: add_rms_norm(x, delta, weight, 1e-5), 4 * D),
        "rms_norm_backward": (lambda: rms_norm_backward(g, total, rstd, weight, x), 4 * D),
        "rotate_qkv_": (lambda: rotate_qkv_(qkv, cos, sin, H, H, K), 4 * D),
        "merge_rotated_gradients": (lambda: merge_rotated_gradients(heads[0], heads[1], heads[2], cos, sin), 6 * D),
        "swiglu": (lambda: swiglu(h), 3 * F),
        "swiglu_backward_": (lambda: swiglu_backward_(grad_s, h), 5 * F),
    }
    rows = {}
    for name, (call, values) in work.items():
        spent, floor = seconds(call, 0.1), 2.0 * values * tokens / bandwidth
        rows[name] = {"ms": 1e3 * spent, "floor_ms": 1e3 * floor, "share": floor / spent}
        print(f"{name:26s} {1e3 * spent:7.3f} ms  floor {1e3 * floor:7.3f}  {floor / spent:5.0%}", flush=True)
    return rows


def matmuls(tokens: int) -> dict[str, Any]:
    """Time forward y = x·Wᵀ, dgrad g·W and wgrad gᵀ·x, with W stored in both layouts and wgrad in bf16 and float32."""
    rows = {}
    for name, (inner, outer) in {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 2 * F), "down": (F, D)}.items():
        x, g, w = bf16(tokens, inner), bf16(tokens, outer), bf16(outer, inner)
        w_t = w.T.contiguous()
        flops = 2.0 * tokens * inner * outer
        calls: dict[str, Callable[[], Any]] = {
            "forward": lambda x=x, w=w: x @ w.T,
            "forward, W transposed": lambda x=x, w_t=w_t: x @ w_t,
            "dgrad": lambda g=g, w=w: g @ w,
            "dgrad, W transposed": lambda g=g, w_t=w_t: g @ w_t.T,
            "wgrad bf16": lambda g=g, x=x: g.T @ x,
            "wgrad fp32": lambda g=g, x=x: torch.mm(g.T, x, out_dtype=torch.float32),
            "wgrad transposed": lambda g=g, x=x: x.T @ g,
        }
        for kind, call in calls.items():
            rate = flops / seconds(call, 0.1) / 1e12
            rows[f"{name} {kind}"] = rate
            print(f"{name + ' ' + kind:32s} {rate:6.1f} TFLOP/s  {1e12 * rate / PEAK:4.0%}", flush=True)
    return rows


def overlap(tokens: int) -> dict[str, float]:
    """Time a weight gradient and the SwiGLU backward, in sequence and on two streams."""
    g, s, h, grad_s = bf16(tokens, D), bf16(tokens, F), bf16(tokens, 2 * F), bf16(tokens, F)
    second_stream = torch.cuda.Stream()

    def sequential() -> None:
        g.T @ s
        swiglu_backward_(grad_s, h)

    def concurrent() -> None:
        second_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(second_stream):
            g.T @ s
        swiglu_backward_(grad_s, h)
        torch.cuda.current_stream().wait_stream(second_stream)

    times = {"in_turn_ms": 1e3 * seconds(sequential, 0.2), "beside_ms": 1e3 * seconds(concurrent, 0.2)}
    print("wgrad and SwiGLU backward:", {name: round(ms, 3) for name, ms in times.items()})
    return times


def main() -> None:
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 131_072
    bandwidth = copy_rate()
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tokens": tokens,
        "copy_gb_s": bandwidth / 1e9,
        "memory_bound": memory_bound(tokens, bandwidth),
        "matmul_tflops": matmuls(tokens),
        "overlap": overlap(tokens),
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
