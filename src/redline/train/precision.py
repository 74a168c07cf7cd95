"""Loss scaling for fp16; in bf16 and fp32 the scale is one and stays."""

from __future__ import annotations

import torch
from torch import Tensor

_GROWTH, _BACKOFF, _INTERVAL, _FIRST = 2.0, 0.5, 2000, 65536.0


class LossScale:
    """Dynamic scale, held and updated on the device."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self.dynamic = precision == "fp16"
        self.scale = torch.full((), _FIRST if self.dynamic else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, bad: Tensor) -> None:
        if self.dynamic:
            torch._amp_update_scale_(self.scale, self._good_steps, bad, _GROWTH, _BACKOFF, _INTERVAL)

    def tensors(self) -> dict[str, Tensor]:
        return {"loss_scale": self.scale, "loss_scale.good_steps": self._good_steps} if self.dynamic else {}
