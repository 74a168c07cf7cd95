"""Rates of one GPU's kernels at the shapes of real models. The speed estimates of `redline plan` use them.

    python -m benchmarks.studies.rates OUT.json

Matmuls (forward, dgrad, wgrad) by model width; causal attention (forward and backward) by length and head size; copy
bandwidth. Medians of CUDA-event times on random data.
"""

from __future__ import annotations

import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS = 65_536
VOCAB = 50_304
WIDTHS = {256: 704, 384: 1024, 512: 1408, 768: 2048, 1024: 2688, 1536: 4096, 2048: 5504}


def seconds(work: Callable[[], Any], budget: float = 0.06) -> float:
    """Return the median time of one call, measured for about `budget` seconds."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    rounds = max(5, min(50, int(budget / max(1e-6, time.perf_counter() - begin))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / 1e3


def matmul_rates(width: int, hidden: int) -> dict[str, Any]:
    """Return the TFLOP/s of each matrix of a layer (forward, dgrad, wgrad) and of the layer and head as a whole."""
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "gate_up": (width, 2 * hidden),
        "down": (hidden, width),
        "head": (width, VOCAB),
    }
    result: dict[str, Any] = {}
    spent = {"layer": 0.0, "head": 0.0}
    work = {"layer": 0.0, "head": 0.0}
    for name, (inner, columns) in shapes.items():
        rows = TOKENS if name != "head" else 8192
        x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
        g = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        flops = 2.0 * rows * inner * columns
        times = [
            seconds(lambda x=x, w=w: x @ w.T),
            seconds(lambda g=g, w=w: g @ w),
            seconds(lambda g=g, x=x: g.T @ x),
        ]
        result[name] = [round(flops / t / 1e12, 1) for t in times]
        part = "head" if name == "head" else "layer"
        spent[part] += sum(times)
        work[part] += 3 * flops
        del x, w, g
    return {**result, **{f"{part}_tflops": round(work[part] / spent[part] / 1e12, 1) for part in spent}}


def fp8_rates(width: int, hidden: int) -> dict[str, Any]:
    """Return the TFLOP/s of tensorwise e4m3 × e4m3 with fast accumulation, at forward shapes and without the casts."""
    result = {}
    one = torch.ones((), device="cuda")
    shapes = {"qkv": (width, 3 * width), "gate_up": (width, 2 * hidden), "down": (hidden, width)}
    for name, (inner, columns) in shapes.items():
        x = torch.randn(TOKENS, inner, device="cuda").to(torch.float8_e4m3fn)
        w = torch.randn(columns, inner, device="cuda").to(torch.float8_e4m3fn)

        def multiply(x: torch.Tensor = x, w: torch.Tensor = w) -> torch.Tensor:
            return torch._scaled_mm(x, w.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        result[name] = round(2.0 * TOKENS * inner * columns / seconds(multiply) / 1e12, 1)
    return result


def attention_rate(length: int, head_dim: int) -> dict[str, float]:
    """Return milliseconds and TFLOP/s of causal attention, forward and backward, on 65,536 tokens of 1,024 channels.

    FLOPs are those of the causal half, counted as three times the forward pass.
    """
    heads, batch = 1024 // head_dim, TOKENS // length
    q, k, v, g = (
        torch.randn(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=i < 3)
        for i in range(4)
    )
    result = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):

        def step(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                scaled_dot_product_attention(q, k, v, is_causal=True).backward(g)

        try:
            spent = seconds(step)
        except RuntimeError:
            continue
        result[f"{name}_ms"] = round(1e3 * spent, 3)
        result[f"{name}_tflops"] = round(6.0 * TOKENS * 1024 * length / spent / 1e12, 1)
        q.grad = k.grad = v.grad = None
    return result


def copy_rate() -> float:
    """Return the bytes read and written per second by a copy."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2.0 * source.numel() * 4 / seconds(lambda: target.copy_(source))


def main() -> None:
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "tokens": TOKENS,
        "copy_gb_s": round(copy_rate() / 1e9, 1),
        "matmul_bf16_tflops": {},
        "matmul_fp8_tflops": {},
        "attention_causal": {},
    }
    for width, hidden in WIDTHS.items():
        result["matmul_bf16_tflops"][str(width)] = row = matmul_rates(width, hidden)
        print(f"d {width:5d}  layer {row['layer_tflops']:6.1f}  head {row['head_tflops']:6.1f} TFLOP/s", flush=True)
    for width in (768, 1024, 2048):
        result["matmul_fp8_tflops"][str(width)] = row = fp8_rates(width, WIDTHS[width])
        print(f"fp8 d {width:5d}  {row}", flush=True)
    for head_dim in (64, 128):
        for length in (256, 512, 1024, 2048, 4096, 8192):
            result["attention_causal"][f"{length}x{head_dim}"] = row = attention_rate(length, head_dim)
            print(f"T {length:5d} D {head_dim:3d}  {row}", flush=True)
    print(f"copy {result['copy_gb_s']} GB/s")
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
