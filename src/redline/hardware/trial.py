"""Tries what a GPU should be able to do, each with a tiny tensor: `python -m redline.hardware.trial NAME …`.

It runs in a process of its own, because a driver that does not fit can take the process with it. Every answer is one
line of JSON, written as soon as it is known.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LIMITS = {"torch": 60, "flex": 120, "compile": 120, "probe": 120}  # seconds; the rest are instant
USUAL_LIMIT = 30


def about_torch() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "available": available,
        "architectures": torch.cuda.get_arch_list() if available else [],
        "complaint": str(told[-1].message).splitlines()[0] if told else "",
    }


def bf16() -> None:
    a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    _finite(a @ a)


def fp8() -> None:
    a, b = (torch.randn(64, 64, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    _finite(torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))


def sdpa(backend: SDPBackend) -> Callable[[], None]:
    def attend() -> None:
        q, k, v = _heads()
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out.sum().backward()
        _finite(q.grad)

    return attend


def flex() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _heads()
    blocks = create_block_mask(lambda b, h, query, key: query >= key, None, None, 128, 128, device="cuda")
    out: Any = torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=blocks)
    out.sum().backward()
    _finite(q.grad)


def compile_() -> None:
    x = torch.randn(256, device="cuda", requires_grad=True)
    torch.compile(lambda x: (x.sin() * x).sum())(x).backward()
    _finite(x.grad)


def probe() -> dict[str, Any]:
    from redline.hardware.probe import measure_and_store

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {"device": device, "rates": measure_and_store(device)}


TRIALS: dict[str, Callable[[], dict[str, Any] | None]] = {
    "torch": about_torch,
    "bf16": bf16,
    "fp8": fp8,
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "flex": flex,
    "compile": compile_,
    "probe": probe,
}
NEED_GPU = tuple(name for name in TRIALS if name not in ("torch", "probe"))


def _heads() -> list[torch.Tensor]:
    shape = (1, 2, 128, 64)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def _finite(out: torch.Tensor | None) -> None:
    if out is None or not bool(out.isfinite().all()):
        raise ArithmeticError("the result is not finite")


def main(names: list[str]) -> None:
    for name in names:
        if name in NEED_GPU and not torch.cuda.is_available():
            continue
        faulthandler.dump_traceback_later(LIMITS.get(name, USUAL_LIMIT), exit=True)  # even out of a hanging driver
        poisoned = False
        answer: dict[str, Any]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answer = {"works": True, "about": TRIALS[name]()}
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            answer = {"works": False, "detail": lines[0][:160] if lines else type(error).__name__, "whole": str(error)}
            poisoned = "CUDA error" in str(error)  # then nothing works any more in this process
        print(json.dumps({"trial": name, **answer}), flush=True)
        if poisoned:
            break
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1:])
