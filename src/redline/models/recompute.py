"""Gradient checkpointing: what a block keeps for its backward, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def _plain(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return function(*inputs)


def _save_matmuls(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


_aten = torch.ops.aten
_EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
CHECKPOINTING: dict[str, Callable[..., Tensor]] = {
    "none": _plain,
    "full": partial(checkpoint, use_reentrant=False),
    # keep what matmuls and attention made, recompute the cheap rest
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _save_matmuls)
    ),
}
