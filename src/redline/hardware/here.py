"""The machine at hand, asked without torch: for what must answer at once."""

from __future__ import annotations

from redline.hardware.machine import Machine, cpu_machine, gpu_machine
from redline.hardware.measured import cpu_key, gpu_key, recall_rates, torch_version
from redline.hardware.nvml import first_card


def machine_here() -> Machine | None:
    """The first visible GPU, else the CPU as it was measured; None when it was not yet: `detect` measures it."""
    card = None if torch_version().endswith("+cpu") else first_card()  # a torch for CPUs sees no GPU
    if card is not None:
        measured = recall_rates(gpu_key(card.name, card.driver))
        return gpu_machine(card.name, card.memory_bytes, card.capability, measured)
    return cpu_here()


def cpu_here() -> Machine | None:
    measured = recall_rates(cpu_key())
    return cpu_machine(measured) if measured else None
