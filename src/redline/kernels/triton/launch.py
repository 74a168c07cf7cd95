"""What a launch must know of its device."""

from __future__ import annotations

import torch


def processors(device: torch.device) -> int:
    """How many programs run side by side at the least; one by one where Triton is interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
