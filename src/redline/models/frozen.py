"""A base weight that never learns, plain or in NF4, and what matmuls read of it: bf16, or fp8."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from redline.kernels.float8 import Float8, Scale, current_scale, quantise, scale_for, turned
from redline.kernels.nf4 import dense_nf4, largest_magnitude, quantise_nf4


class FrozenMatrix(nn.Module):
    """A base weight [out, in], plain or in NF4, whose parts lie one below the other.

    In NF4 each part is a matrix of its own, for the mean of its scales is: merged with another it would not be
    bitsandbytes' any more. It is moved with its model but never cast, trained or saved.
    """

    def __init__(
        self,
        weight: Tensor,
        rows: Sequence[int] = (),
        *,
        quantise: bool = False,
        double: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Of a weight whose parts have so many rows each; kept in `dtype`, unless it is quantised."""
        super().__init__()
        self.shape = (weight.shape[0], weight.shape[1])
        self.rows = tuple(rows) or (weight.shape[0],)
        parts = weight.detach().split(self.rows) if quantise else ()
        self.quantised = [quantise_nf4(part, double=double) for part in parts]
        self.plain = None if quantise else weight.detach().to(dtype or weight.dtype)
        self._scale: Scale | None = None

    @property
    def device(self) -> torch.device:
        return self.quantised[0].codes.device if self.plain is None else self.plain.device

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix, for reading: the stored one where it has that dtype, a new one otherwise."""
        if self.plain is not None:
            return self.plain.to(dtype)
        return dense_nf4(self.quantised, dtype)

    def rows8(self) -> Float8:
        """For x·Wᵀ."""
        if self.plain is not None:
            return quantise(self.plain, self.scale)
        return Float8(dense_nf4(self.quantised, torch.float8_e4m3fn, self.scale.factor), None, self.scale.unscale)

    def columns8(self) -> Float8:
        """For grad·W."""
        row = self.rows8().row
        assert row is not None
        return Float8(None, turned(row), self.scale.unscale)

    @property
    def scale(self) -> Scale:
        """In fp8; one for all parts, which one matmul reads. It stays: the weight does."""
        if self._scale is None:
            parts = [largest_magnitude(part) for part in self.quantised]
            found = scale_for(torch.stack(parts).amax()) if self.plain is None else current_scale(self.plain)
            self._scale = found._replace(rows_alone=True)
        return self._scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenMatrix:
        device = fn(torch.empty(0, dtype=torch.uint8, device=self.device)).device
        self.plain = None if self.plain is None else self.plain.to(device)
        self.quantised = [part.to(device) for part in self.quantised]
        self._scale = None
        return self
