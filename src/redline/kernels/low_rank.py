"""The narrow matmuls of low-rank adapters (LoRA, arXiv 2106.09685), with dropout of the input inside the matmul.

Which values are dropped is a hash of the seed, the row and the column, the same on every device. So the backward drops
what the forward dropped, and neither a mask nor a masked copy of the input is ever in memory.

The input may be in fp8 (e4m3): its values are the stored ones times `unscale`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from redline.kernels.dispatch import op, triton_serves

GOLDEN = 0x9E3779B9  # 2³² divided by the golden ratio: multiples of it are spread evenly over 32-bit words
_WORD = 0xFFFFFFFF
_E4M3 = torch.float8_e4m3fn
_Words = TypeVar("_Words", int, Tensor)


class Dropout(NamedTuple):
    """Which values to drop. The scaling of what is kept is left to the caller."""

    p: float  # in [0, 1)
    seed: int  # up to 64 bits

    @property
    def threshold(self) -> int:
        """Of 65,536 equally likely values those below this are dropped. At least one is always kept."""
        return min(round(self.p * 65536), 65535)

    @property
    def seed_words(self) -> tuple[int, int]:
        """The seed as two mixed 32-bit words. Mixing here, once, leaves only one round of mixing for each row."""
        low, high = (_mix(half + GOLDEN & _WORD) for half in (self.seed, self.seed >> 32))
        return low, _mix(low + high & _WORD)


def keep_probability(p: float) -> float:
    """Return the exact share of values that are kept, which a sum is to be divided by; 1 - p is off by the rounding."""
    return 1 - Dropout(p, 0).threshold / 65536


def _compiled(kernel: str) -> Callable[..., bool]:
    """Return a function of an operation's arguments: whether its kernel may run on their device, in their precision."""

    def serves(*arguments: object) -> bool:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        on_fp8 = " on fp8" if any(x.dtype == _E4M3 for x in tensors) else ""
        return triton_serves(tensors[0].device, kernel + on_fp8)

    return serves


@op(triton="low_rank:project_down", uses_triton=_compiled("low_rank._project_down"))
def project_down(x_NI: Tensor, a_RI: Tensor, dropout: Dropout | None, unscale: Tensor | None = None) -> Tensor:
    """Return dropout(x)·Aᵀ [N, R], summed in float32: in x's dtype, or in bf16 when x is in fp8."""
    product = _drop(x_NI.float(), dropout) @ a_RI.float().T
    return (product if unscale is None else product * unscale).to(projected_dtype(x_NI))


@op(triton="low_rank:project_down_weight_gradient", uses_triton=_compiled("low_rank._weight_gradient"))
def project_down_weight_gradient(
    grad_NR: Tensor, x_NI: Tensor, dropout: Dropout | None, unscale: Tensor | None = None
) -> Tensor:
    """Return the gradient of A [R, I], gradᵀ·dropout(x), in float32."""
    product = grad_NR.float().T @ _drop(x_NI.float(), dropout)
    return product if unscale is None else product * unscale


@op(triton="low_rank:project_down_input_gradient", uses_triton=_compiled("low_rank._input_gradient"))
def project_down_input_gradient(
    grad_NR: Tensor, a_RI: Tensor, dropout: Dropout | None, out_NI: Tensor | None = None
) -> Tensor:
    """Return the gradient of x [N, I], dropout(grad·A), in grad's dtype; or add it to `out`, rounding once."""
    product = _drop(grad_NR.float() @ a_RI.float(), dropout)
    return product.to(grad_NR.dtype) if out_NI is None else out_NI.copy_(out_NI.float() + product)


def projected_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of x·Aᵀ."""
    return torch.bfloat16 if x.dtype == _E4M3 else x.dtype


def keep_mask(rows: int, columns: int, dropout: Dropout, device: torch.device) -> Tensor:
    """Return [rows, columns], True where a value is kept. A 32-bit word decides for two columns, its lower half for the
    even one.
    """
    low, high = dropout.seed_words
    key_N1 = _mix(torch.arange(rows, device=device)[:, None] ^ low) + high
    word_NI = _mix(key_N1 + torch.arange((columns + 1) // 2, device=device) * GOLDEN & _WORD)
    halves = torch.stack((word_NI & 0xFFFF, word_NI >> 16), -1).flatten(1)
    return halves[:, :columns] >= dropout.threshold


def _drop(x_NI: Tensor, dropout: Dropout | None) -> Tensor:
    """Set dropped values to zero. By selection, not multiplication: a dropped NaN must become zero, too."""
    if dropout is None:
        return x_NI
    rows, columns = x_NI.shape
    return torch.where(keep_mask(rows, columns, dropout, x_NI.device), x_NI, 0.0)


def _mix(x: _Words) -> _Words:
    """Apply murmur3's finaliser to 32-bit words: each bit of x affects every bit of the result."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _WORD
    return x ^ (x >> 16)
