"""Delayed scaling: each fp8 tensor's scale follows from the largest magnitude that the tensor had in earlier steps.

A kernel then rounds while it writes, without a pass over the tensor first. e4m3 has full precision over fifteen powers
of two, so a scale can leave headroom for growth at no cost. The first pass of a run computes in bf16 and only measures
magnitudes (Micikevicius et al., arXiv 2209.05433, section 4, on delayed scaling and its alternatives).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.float8 import LARGEST, Scale, normed_factor

LINEARS = ("qkv", "out", "up", "down")  # the four linear layers of a block
HEADROOM = 2.0  # a tensor may grow this much from one step to the next; more if its scale was rounded down
PEAK_DECAY = 0.9  # a step later, this much of the largest magnitude still counts
_STRIDE = 4  # floats between two scales: matmuls may want their addresses to be multiples of 16 bytes


class AmaxProbe(NamedTuple):
    """Store the tensor in bf16, and raise `amax` to its largest magnitude."""

    amax: Tensor


Storage = Scale | AmaxProbe | None  # in fp8; in bf16 with its magnitude measured; in bf16


class BlockScales(NamedTuple):
    """Storage a block's matmuls store their operands: each weight, its input, and the gradient of its output."""

    qkv: Storage = None
    qkv_input: Storage = None
    qkv_grad: Storage = None
    out: Storage = None
    out_input: Storage = None
    out_grad: Storage = None
    up: Storage = None
    up_input: Storage = None
    up_grad: Storage = None
    down: Storage = None
    down_input: Storage = None
    down_grad: Storage = None


_SLOTS = {name: place for place, name in enumerate(BlockScales._fields)}
_NORMED = tuple(_SLOTS[name] for name in ("qkv_input", "up_input"))


class Scales:
    """All scales of a decoder, on its device."""

    def __init__(
        self,
        layers: int,
        linears: Iterable[str],
        width: int,
        device: torch.device,
        norms: Sequence[Sequence[float]] = (),
    ) -> None:
        """Start without known magnitudes. `norms`, for a frozen base, is the largest weight of each layer's norms."""
        self.linears = frozenset(linears)
        shape = (layers, len(_SLOTS), _STRIDE)
        self.amax, self.peak = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self.factor, self.unscale = torch.ones(shape, device=device), torch.ones(shape, device=device)
        self.known, self._frozen = False, bool(norms)
        # the inputs of qkv and up come out of a norm, which bounds them: their scales need no measurement
        bounds = [[normed_factor(width, largest) for largest in layer] for layer in norms or [[2.0] * 2] * layers]
        self._normed = torch.tensor(bounds, device=device).view(layers, len(_NORMED), 1)
        self._scales = [self._block(layer, self._scale) for layer in range(layers)]
        self._probes = [self._block(layer, self._probe) for layer in range(layers)]

    def next(self) -> list[BlockScales]:
        """Return the storage of all blocks for one forward and its backward; magnitudes since the last call set it."""
        measured = torch.where(torch.isfinite(self.amax), self.amax, 0.0)  # a bad step must not set a scale
        if not self.known and not bool(measured.any()):
            return self._probes
        torch.maximum(measured, PEAK_DECAY * self.peak, out=self.peak)
        self._set()
        return self._scales

    def _set(self) -> None:
        self.amax.zero_()
        exponent = torch.floor(torch.log2(LARGEST / (HEADROOM * self.peak)))
        torch.exp2(torch.where(self.peak > 0, exponent, 0.0).clamp_(-100, 100), out=self.factor)
        for place, slot in enumerate(_NORMED):  # not by a list of indices, which would be copied from the host
            self.factor[:, slot] = self._normed[:, place]
        torch.reciprocal(self.factor, out=self.unscale)
        self.known = True

    def state(self) -> list[list[float]] | None:
        """Return the magnitudes for a checkpoint: the peaks, and those measured since the scales were last set."""
        if not self.known:
            return None
        measured = torch.where(torch.isfinite(self.amax), self.amax, 0.0)
        both = torch.stack((self.peak[..., 0], measured[..., 0]))
        return [both[0].flatten().tolist(), both[1].flatten().tolist()]

    def load(self, state: list[list[float]] | None) -> None:
        """Restore what `state` returned."""
        self.known = state is not None
        for tensor, values in zip((self.peak, self.amax), state or [[0.0], [0.0]], strict=True):
            tensor.copy_(torch.tensor(values).view(-1, len(_SLOTS) if state else 1, 1).expand_as(tensor))

    def _block(self, layer: int, make: Callable[[int, int], Storage]) -> BlockScales:
        used = {name: place for name, place in _SLOTS.items() if name.split("_")[0] in self.linears}
        return BlockScales(**{name: make(layer, place) for name, place in used.items()})

    def _scale(self, layer: int, slot: int) -> Scale:
        at = (layer, slot, 0)
        amax = None if slot in _NORMED else self.amax[at]
        return Scale(self.factor[at], self.unscale[at], amax, rows_alone=self._frozen)

    def _probe(self, layer: int, slot: int) -> AmaxProbe:
        return AmaxProbe(self.amax[layer, slot, 0])
