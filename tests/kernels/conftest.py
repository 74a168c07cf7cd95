"""Every kernel is tested in both implementations: plain torch, and Triton (interpreted where there is no GPU)."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eight_bits import implementations

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when it is imported, which no test does earlier


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", params=["reference", "triton"])
def kernels(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The operations of the kernel module that the test file names in KERNELS, in one of their implementations."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="the kernels need triton")
    return implementations(request.param, importlib.import_module(f"redline.kernels.{request.module.KERNELS}"))


@pytest.fixture
def casts_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the Triton interpreter cast as a GPU does.

    By itself it rounds ties up and bf16 towards zero, wraps values beyond the largest, and lets NaN win a maximum.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._convert_float
    eight = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        float32 = torch.from_numpy(np.array(data, dtype=np.float32)) if source == tl.float32 else None
        if float32 is not None and target == tl.bfloat16:
            return float32.to(torch.bfloat16).view(torch.uint16).numpy()
        if float32 is not None and target in eight:  # as cvt.rn.satfinite does: NaN stays, infinity saturates
            largest = torch.finfo(eight[target]).max
            return float32.clamp(-largest, largest).to(eight[target]).view(torch.uint8).numpy()
        return plain(data, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    larger = lambda self, a, b: self.binary_op(a, b, np.fmax)  # noqa: E731
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_maxnumf", larger)


@pytest.fixture
def multiplies_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the Triton interpreter's tl.dot multiply values.

    By itself it multiplies the bit patterns of bf16 as integers, and reads NaN in fp8 as 480.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    def values(handle: Any) -> np.ndarray:
        if handle.dtype.scalar == tl.bfloat16:
            return torch.from_numpy(handle.data.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
        return np.asarray(handle.data, dtype=np.float32)

    def dot(self: Any, a: Any, b: Any, total: Any, *how: Any) -> Any:
        with np.errstate(invalid="ignore"):  # inf · 0
            return interpreter.TensorHandle(values(a) @ values(b) + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    plain = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float8e4nv and target == tl.bfloat16:
            return torch.from_numpy(data.copy()).view(torch.float8_e4m3fn).to(torch.bfloat16).view(torch.uint16).numpy()
        return plain(data, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
