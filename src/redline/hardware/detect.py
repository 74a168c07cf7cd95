"""Asking torch what this process can train on."""

from __future__ import annotations

import torch

from redline.errors import UserError
from redline.hardware.machine import Machine, cpu_machine, gpu_machine
from redline.hardware.measured import cpu_key, gpu_key, recall_rates, times_measured
from redline.hardware.nvml import driver_version
from redline.hardware.probe import measure_and_keep

_TIMES = 3  # a CPU may have been busy with something else


def detect(device: str = "auto", asked_by: str = "train.device=") -> Machine:
    """What this process can train on. A CPU is measured a few times, a GPU when `redline doctor --probe` is asked.

    `asked_by` is what stood before the device, for who must change it.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        known = recall_rates(cpu_key()) if times_measured(cpu_key()) >= _TIMES else None
        return cpu_machine(known or measure_and_keep("cpu"))
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        raise UserError(
            f"no GPU that torch {torch.__version__}, {built}, can use.",
            where=asked_by.rstrip("= "),
            fix=f"`redline doctor` says why; or use {asked_by}cpu.",
        )
    card = torch.cuda.get_device_properties(0)
    measured = recall_rates(gpu_key(card.name, driver_version()))
    return gpu_machine(card.name, card.total_memory, (card.major, card.minor), measured)
