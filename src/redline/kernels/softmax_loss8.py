"""Cross-entropy of given logits and its gradient as an fp8 operand: Triton on a GPU, plain torch elsewhere.

The gradient is in e5m2: most of it is probabilities far below 1, which e4m3 would round to nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.kernels.float8 import Float8, Scale
from redline.kernels.softmax_loss import reference


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
    codes = (torch.where(gradient.isfinite(), gradient, float("nan")) * scale.factor).to(torch.float8_e5m2)
    return losses, Float8(codes, codes.T.contiguous(), scale.unscale)
