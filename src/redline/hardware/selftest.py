"""The self-tests of `redline doctor`: what torch can do on this machine, each with a tiny tensor.

    python -m redline.hardware.selftest NAME …

runs them in a child process (see `hardware/trials.py`), because a driver that does not fit torch can crash or hang the
process. This module imports torch in the child only.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from redline.hardware.trials import Answers, answer_trials, run_trials

if TYPE_CHECKING:
    import torch

CAPABILITIES = ("bf16", "fp8", "cudnn", "flash", "efficient", "flex", "compile")  # these need a GPU
# Time limits that differ from the default; the other tests take milliseconds.
_SECONDS = {"torch": 60, "flex": 120, "compile": 120, "probe": 120}


def run_selftests(names: list[str], command: list[str] | None = None) -> Answers:
    """Run the named tests and return the answer of each.

    A test that needs a GPU has no answer on a machine without one. If torch cannot be imported, no other test can run.
    """
    return run_trials("redline.hardware.selftest", names, vital="torch", command=command)


def _describe_torch() -> dict[str, Any]:
    import torch

    with warnings.catch_warnings(record=True) as caught:
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
        "mps": torch.backends.mps.is_available(),
        "architectures": torch.cuda.get_arch_list() if available else [],
        "error": str(caught[-1].message).splitlines()[0] if caught else "",
    }


def _test_bf16() -> None:
    import torch

    a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    _check_finite(a @ a)


def _test_fp8() -> None:
    import torch

    a, b = (torch.randn(64, 64, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    _check_finite(torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))


def _test_sdpa(backend: str) -> Callable[[], None]:
    def test() -> None:
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = _attention_inputs()
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out.sum().backward()
        _check_finite(q.grad)

    return test


def _test_flex() -> None:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _attention_inputs()
    blocks = create_block_mask(lambda b, h, query, key: query >= key, None, None, 128, 128, device="cuda")
    out: Any = torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=blocks)
    out.sum().backward()
    _check_finite(q.grad)


def _test_compile() -> None:
    import torch

    x = torch.randn(256, device="cuda", requires_grad=True)
    torch.compile(lambda x: (x.sin() * x).sum())(x).backward()
    _check_finite(x.grad)


def _measure_rates() -> dict[str, Any]:
    import torch

    from redline.hardware.probe import measure_and_store

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {"device": device, "rates": measure_and_store(device)}


SELFTESTS: dict[str, Callable[[], dict[str, Any] | None]] = {
    "torch": _describe_torch,
    "bf16": _test_bf16,
    "fp8": _test_fp8,
    "cudnn": _test_sdpa("CUDNN_ATTENTION"),
    "flash": _test_sdpa("FLASH_ATTENTION"),
    "efficient": _test_sdpa("EFFICIENT_ATTENTION"),
    "flex": _test_flex,
    "compile": _test_compile,
    "probe": _measure_rates,
}


def _attention_inputs() -> list[torch.Tensor]:
    import torch

    shape = (1, 2, 128, 64)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def _check_finite(out: torch.Tensor | None) -> None:
    if out is None or not bool(out.isfinite().all()):
        raise ArithmeticError("the result is not finite")


def main(names: list[str]) -> None:
    import torch  # here, so that an import error ends the process and not each test on its own

    able = [name for name in names if name not in CAPABILITIES or torch.cuda.is_available()]
    answer_trials(able, SELFTESTS, _SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
