"""Heads that share their keys and values: without copies where a back-end's kernel can, and gets it right."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_BY_DOCUMENTS: dict[str, Any] = {}  # how that kernel is told, once it was asked; a compiler cannot look
_WRONG = 0.02  # of a result's size


def repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def by_documents(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, grouped: bool) -> Tensor:
    """Causal within documents, over the flattened batch [B·T, H, K]."""
    from torch.nn.attention.varlen import varlen_attn  # a second of imports

    lengths = (borders, borders, longest, longest)
    out = varlen_attn(q, k, v, *lengths, window_size=(-1, 0), **(_BY_DOCUMENTS if grouped else {}))
    assert isinstance(out, Tensor)
    return out


@cache
def reads_groups(backend: str) -> bool:
    """Whether its kernel takes fewer keys and values than heads: a kernel may do so and be wrong."""
    if backend not in (*SDPA, "varlen"):
        return False
    if backend == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        if "enable_gqa" in signature(varlen_attn).parameters:  # from torch 2.12 on
            _BY_DOCUMENTS["enable_gqa"] = True
    chance = torch.Generator("cuda").manual_seed(0)
    q, k, v, up = (
        torch.randn(2, H, 128, 64, device="cuda", dtype=torch.bfloat16, generator=chance) for H in (4, 2, 2, 4)
    )
    try:
        with torch.enable_grad(), unheard():
            shared, copied = (_attended(backend, (q, k, v), up, grouped) for grouped in (True, False))
    except (RuntimeError, ValueError):
        return False
    return all(torch.dist(one, other) <= _WRONG * other.norm() for one, other in zip(shared, copied, strict=True))


@contextmanager
def unheard() -> Iterator[None]:
    """What torch says of kernels that refuse a trial is no user's concern: who asked hears it as an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _attended(backend: str, qkv: tuple[Tensor, ...], up: Tensor, grouped: bool) -> list[Tensor]:
    """The output, and the gradients of all three."""
    leaves = q, k, v = [x.clone().requires_grad_() for x in qkv]
    if not grouped:
        k, v = repeat_kv(q, k, v)
    if backend == "varlen":
        B, H, T, K = q.shape
        borders = torch.arange(0, B * T + 1, T // 2, device=q.device, dtype=torch.int32)
        q, k, v = (x.transpose(1, 2).reshape(B * T, -1, K) for x in (q, k, v))
        out = by_documents(q, k, v, borders, T // 2, grouped).view(B, T, H, K).transpose(1, 2)
    else:
        with sdpa_kernel(SDPA[backend]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return [out, *torch.autograd.grad(out, leaves, up)]
