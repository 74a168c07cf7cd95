"""The narrow matmuls of low-rank adapters (LoRA, arXiv 2106.09685), with the dropout of their input drawn on the way.

Which values are dropped is a hash of the seed, the row and the column, the same on every device. So the backward draws
what the forward drew, and neither a mask nor a masked copy of the input is ever in memory. Triton on a GPU, plain torch
elsewhere.

The input may be in fp8 (e4m3): what it stands for is `unscale` times what is stored.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

GOLDEN = 0x9E3779B9  # 2³² over the golden ratio: counted in these steps, words spread evenly
_WORD = 0xFFFFFFFF
_EIGHT = torch.float8_e4m3fn
_Words = TypeVar("_Words", int, Tensor)


class Dropped(NamedTuple):
    """Dropout, without its scaling."""

    p: float  # in [0, 1)
    seed: int  # of up to 64 bits

    @property
    def threshold(self) -> int:
        """Of 65,536 equally likely values, those below it are dropped; the last is kept whatever p."""
        return min(round(self.p * 65536), 65535)

    @property
    def words(self) -> tuple[int, int]:
        """The seed as two words. Mixed here, once, they leave a row no more than one round to do."""
        low, high = (_mixed(half + GOLDEN & _WORD) for half in (self.seed, self.seed >> 32))
        return low, _mixed(low + high & _WORD)


def keep_probability(p: float) -> float:
    """What is kept of very many values: by this, not by 1 - p, a sum is to be divided."""
    return 1 - Dropped(p, 0).threshold / 65536


def narrow(x_NI: Tensor, a_RI: Tensor, dropped: Dropped | None, unscale: Tensor | None = None) -> Tensor:
    """dropped(x)·Aᵀ [N, R] in x's dtype, or in bf16 where x is in fp8; summed in float32."""
    assert x_NI.dtype in (a_RI.dtype, _EIGHT)
    if x_NI.is_cuda:
        from redline.kernels.triton import low_rank as low_rank_triton

        return low_rank_triton.narrow(x_NI, a_RI, dropped, unscale)
    return reference_narrow(x_NI, a_RI, dropped, unscale)


def narrow_gradient(grad_NR: Tensor, x_NI: Tensor, dropped: Dropped | None, unscale: Tensor | None = None) -> Tensor:
    """The gradient of A [R, I]: gradᵀ·dropped(x), in float32."""
    assert x_NI.dtype in (grad_NR.dtype, _EIGHT)
    if x_NI.is_cuda:
        from redline.kernels.triton import low_rank as low_rank_triton

        return low_rank_triton.narrow_gradient(grad_NR, x_NI, dropped, unscale)
    return reference_narrow_gradient(grad_NR, x_NI, dropped, unscale)


def spread(grad_NR: Tensor, a_RI: Tensor, dropped: Dropped | None, out_NI: Tensor | None = None) -> Tensor:
    """The gradient of x [N, I]: dropped(grad·A), in grad's dtype, or added to `out`, rounded once."""
    assert grad_NR.dtype == a_RI.dtype
    if grad_NR.is_cuda:
        from redline.kernels.triton import low_rank as low_rank_triton

        return low_rank_triton.spread(grad_NR, a_RI, dropped, out_NI)
    return reference_spread(grad_NR, a_RI, dropped, out_NI)


def narrowed_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype == _EIGHT else x.dtype


def reference_narrow(x_NI: Tensor, a_RI: Tensor, dropped: Dropped | None, unscale: Tensor | None = None) -> Tensor:
    product = _passed(x_NI.float(), dropped) @ a_RI.float().T
    return (product if unscale is None else product * unscale).to(narrowed_dtype(x_NI))


def reference_narrow_gradient(
    grad_NR: Tensor, x_NI: Tensor, dropped: Dropped | None, unscale: Tensor | None = None
) -> Tensor:
    product = grad_NR.float().T @ _passed(x_NI.float(), dropped)
    return product if unscale is None else product * unscale


def reference_spread(grad_NR: Tensor, a_RI: Tensor, dropped: Dropped | None, out_NI: Tensor | None = None) -> Tensor:
    product = _passed(grad_NR.float() @ a_RI.float(), dropped)
    return product.to(grad_NR.dtype) if out_NI is None else out_NI.copy_(out_NI.float() + product)


def kept(rows: int, columns: int, dropped: Dropped, device: torch.device) -> Tensor:
    """True where a value passes. One word serves two columns, its lower half the even one."""
    low, high = dropped.words
    key_N1 = _mixed(torch.arange(rows, device=device)[:, None] ^ low) + high
    word_NI = _mixed(key_N1 + torch.arange((columns + 1) // 2, device=device) * GOLDEN & _WORD)
    halves = torch.stack((word_NI & 0xFFFF, word_NI >> 16), -1).flatten(1)
    return halves[:, :columns] >= dropped.threshold


def _passed(x_NI: Tensor, dropped: Dropped | None) -> Tensor:
    """Chosen, not multiplied: what is dropped is gone, even where it is not finite."""
    if dropped is None:
        return x_NI
    rows, columns = x_NI.shape
    return torch.where(kept(rows, columns, dropped, x_NI.device), x_NI, 0.0)


def _mixed(x: _Words) -> _Words:
    """Murmur3's last step, on words of 32 bits: each bit of x tells in all of the result."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _WORD
    return x ^ (x >> 16)
