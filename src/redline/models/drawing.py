"""Weights that a model begins with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_AT_ONCE = 8


@torch.no_grad()
def draw_normal(wanted: Sequence[tuple[Tensor, float]], generator: torch.Generator) -> None:
    """Each with its standard deviation.

    On the CPU, so that a seed gives the same model on every device; each from a seed of its own, so that several can be
    drawn at once: one after the other, a billion takes ten seconds.
    """
    seeds = torch.randint(1 << 62, (len(wanted),), generator=generator).tolist()

    def drawn(tensor: Tensor, std: float, seed: int) -> Tensor:
        return torch.empty(tensor.shape, device="cpu").normal_(0.0, std, generator=torch.Generator().manual_seed(seed))

    every = [(tensor, std, seed) for (tensor, std), seed in zip(wanted, seeds, strict=True)]
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        for first in range(0, len(every), _AT_ONCE):  # a few are held beside the model, not all
            some = every[first : first + _AT_ONCE]
            for (tensor, _, _), values in zip(some, pool.map(lambda one: drawn(*one), some), strict=True):
                tensor.copy_(values)
