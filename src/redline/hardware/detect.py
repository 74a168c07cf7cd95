"""Asking torch what this process can train on."""

from __future__ import annotations

import os
import shutil

import torch

from redline.errors import UserError
from redline.hardware.machine import Machine, available_cores, cpu_name, host_memory_bytes
from redline.hardware.probe import cpu_matmul_flops


def detect(device: str = "auto") -> Machine:
    """What this process can train on."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        bf16 = cpu_matmul_flops(torch.bfloat16)
        fp32 = cpu_matmul_flops(torch.float32)
        fast_bf16 = bf16 > 1.5 * fp32  # AMX or AVX512-BF16; elsewhere bf16 is emulated and slower
        return Machine(
            "cpu",
            cpu_name(),
            host_memory_bytes(),
            available_cores(),
            cpu_flops=max(bf16, fp32),
            fast_bf16=fast_bf16,
            compiler=any(shutil.which(name) for name in ("g++", "clang++", os.environ.get("CXX", "g++"))),
        )
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        raise UserError(
            f"no GPU that torch {torch.__version__}, {built}, can use.",
            where="train.device",
            fix="Install a build that fits the driver (`nvidia-smi` names its CUDA version), or use train.device=cpu.",
        )
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    return Machine(
        "cuda",
        properties.name,
        properties.total_memory,
        available_cores(),
        capability,
        fast_bf16=capability >= (8, 0),
    )
