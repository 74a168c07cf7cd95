"""Cross-entropy of given logits and its gradient as an fp8 operand: Triton on a GPU, plain torch elsewhere.

The gradient is in e5m2: most of it is probabilities far below 1, which e4m3 would round to nothing. It keeps three bits
of each, and a token's probability is much the same in many rows: rounded to nearest, all would be wrong the same way.
So they are dithered: up or down, by a threshold that runs evenly along rows and columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.float8 import Float8, Scale
from redline.kernels.softmax_loss import reference

CUT = 21  # bits of a float32 that e5m2 does not have
ALONG_ROWS, ALONG_COLUMNS = 0xC13FA9A9, 0x91E10DA5  # 1/g and 1/g² of 2³², g³ = g + 1: even in both directions


def softmax_loss8(
    logits_NV: Tensor, target_N: Tensor, scale: Scale, *, softcap: float | None = None
) -> tuple[Tensor, Float8]:
    """Float32 losses [N], and softmax − onehot in e5m2, both ways round; as softmax_loss.softmax_loss otherwise."""
    if logits_NV.is_cuda:
        from redline.kernels import softmax_loss8_triton

        return softmax_loss8_triton.softmax_loss8(logits_NV, target_N, scale, softcap=softcap)
    return reference_softmax_loss8(logits_NV, target_N, scale, softcap=softcap)


def reference_softmax_loss8(
    logits_NV: Tensor, target_N: Tensor, scale: Scale, *, softcap: float | None = None
) -> tuple[Tensor, Float8]:
    losses, gradient = reference(logits_NV.float(), target_N, softcap=softcap)
    assert gradient is not None
    whole = losses.isfinite()[:, None]
    codes = torch.where(whole, dithered(gradient * scale.factor), float("nan")).to(torch.float8_e5m2)
    return losses, Float8(codes, codes.T.contiguous(), scale.unscale)


def dithered(value_NV: Tensor) -> Tensor:
    """To e5m2's three bits: away from zero when what is cut off, of one step, is above a threshold."""
    rows, columns = (torch.arange(size, device=value_NV.device) for size in value_NV.shape)
    threshold = ((rows * ALONG_ROWS)[:, None] + (columns * ALONG_COLUMNS)[None, :] & 0xFFFF_FFFF) >> (32 - CUT)
    bits = value_NV.float().contiguous().view(torch.int32) + threshold.to(torch.int32)
    return (bits >> CUT << CUT).view(torch.float32)
