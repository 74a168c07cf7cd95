"""Scales of the fp8 tensors: each from the largest magnitude its tensor had in the steps before.

A kernel then rounds while it writes and needs no look at the tensor first. e4m3 keeps its precision over fifteen
powers of two, so a scale may leave room for growth at no cost. The first pass of a run computes in bf16 and only
looks (Micikevicius et al., arXiv 2209.05433, section 4, on delayed scaling and its alternatives).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.float8 import LARGEST, Scale, normed_factor

LINEARS = ("qkv", "out", "up", "down")  # of a block
HEADROOM = 2.0  # a tensor may grow this much from one step to the next, and more where its scale was rounded down
MEMORY = 0.9  # how much of the largest magnitude is remembered a step later
_APART = 4  # floats between two scales: matmuls may want their addresses to be multiples of 16 bytes


class Probe(NamedTuple):
    """Only look: the tensor stays as it is."""

    amax: Tensor


How = Scale | Probe | None  # in fp8, in bf16 with a look at it, in bf16


class BlockScales(NamedTuple):
    """How a block's matmuls store their operands: the weight, what it multiplies, and the gradient of the product."""

    qkv: How = None
    qkv_input: How = None
    qkv_grad: How = None
    out: How = None
    out_input: How = None
    out_grad: How = None
    up: How = None
    up_input: How = None
    up_grad: How = None
    down: How = None
    down_input: How = None
    down_grad: How = None


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
        """`norms`: of each layer's two norms the largest weight, where they and the matrices stay as they are."""
        self.linears = frozenset(linears)
        shape = (layers, len(_SLOTS), _APART)
        self.amax, self.peak = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self.factor, self.unscale = torch.ones(shape, device=device), torch.ones(shape, device=device)
        self.known, self._frozen = False, bool(norms)
        # needs no looking at
        bounds = [[normed_factor(width, largest) for largest in layer] for layer in norms or [[2.0] * 2] * layers]
        self._normed = torch.tensor(bounds, device=device).view(layers, len(_NORMED), 1)
        self._scales = [self._block(layer, self._scale) for layer in range(layers)]
        self._probes = [self._block(layer, self._probe) for layer in range(layers)]

    def next(self) -> list[BlockScales]:
        """For one forward and its backward: what was seen since the last call sets the scales."""
        seen = torch.where(torch.isfinite(self.amax), self.amax, 0.0)  # a bad step must not set a scale
        if not self.known and not bool(seen.any()):
            return self._probes
        torch.maximum(seen, MEMORY * self.peak, out=self.peak)
        self._set()
        return self._scales

    def _set(self) -> None:
        self.amax.zero_()
        exponent = torch.floor(torch.log2(LARGEST / (HEADROOM * self.peak)))
        torch.exp2(torch.where(self.peak > 0, exponent, 0.0).clamp_(-100, 100), out=self.factor)
        for place, slot in enumerate(_NORMED):  # one by one: a list of places would be a copy from the host
            self.factor[:, slot] = self._normed[:, place]
        torch.reciprocal(self.factor, out=self.unscale)
        self.known = True

    def state(self) -> list[list[float]] | None:
        """The magnitudes to go on with, exactly; those of steps that are not yet in the scales included."""
        if not self.known:
            return None
        seen = torch.where(torch.isfinite(self.amax), self.amax, 0.0)
        both = torch.stack((self.peak[..., 0], seen[..., 0]))
        return [both[0].flatten().tolist(), both[1].flatten().tolist()]

    def load(self, state: list[list[float]] | None) -> None:
        self.known = state is not None
        for tensor, values in zip((self.peak, self.amax), state or [[0.0], [0.0]], strict=True):
            tensor.copy_(torch.tensor(values).view(-1, len(_SLOTS) if state else 1, 1).expand_as(tensor))

    def _block(self, layer: int, make: Callable[[int, int], How]) -> BlockScales:
        used = {name: place for name, place in _SLOTS.items() if name.split("_")[0] in self.linears}
        return BlockScales(**{name: make(layer, place) for name, place in used.items()})

    def _scale(self, layer: int, slot: int) -> Scale:
        at = (layer, slot, 0)
        amax = None if slot in _NORMED else self.amax[at]
        return Scale(self.factor[at], self.unscale[at], amax, rows_alone=self._frozen)

    def _probe(self, layer: int, slot: int) -> Probe:
        return Probe(self.amax[layer, slot, 0])
