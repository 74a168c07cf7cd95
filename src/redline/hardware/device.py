"""What torch calls differently on CUDA, on MPS (the GPU of a Mac) and on the CPU. MPS was never run by us."""

from __future__ import annotations

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all queued work. A CPU queues none."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def free_unused_memory() -> None:
    """Return memory that torch keeps for later tensors to the driver."""
    torch.cuda.empty_cache()  # does nothing without CUDA
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the widest type in which a device can add losses: float64, which MPS does not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device had too little memory. MPS raises a RuntimeError that only its text tells apart."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("MPS backend out of memory")
