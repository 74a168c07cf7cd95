"""Kernels are tested twice: as plain torch, and as Triton, by its interpreter where there is no GPU."""

from __future__ import annotations

import importlib
import os
from types import ModuleType, SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which no test does before this


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> ModuleType | SimpleNamespace:
    """The functions of the kernel module that the test file names, in either form, under their public names."""
    name = f"redline.kernels.{request.module.KERNELS}"
    if request.param == "triton":
        pytest.importorskip("triton", reason="the kernels need triton")
        return importlib.import_module(f"{name}_triton")
    found = vars(importlib.import_module(name))
    mark = "reference_"
    return SimpleNamespace(**{key.removeprefix(mark): found[key] for key in found if key.startswith(mark)})
