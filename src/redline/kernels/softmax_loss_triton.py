"""Cross-entropy and its gradient in one kernel: logits are read from memory once and overwritten once.

A program has a row. Its first sweep finds the row's maximum and sum, the second writes the gradient; between them the
row (100 KB at GPT-2's vocabulary) stays in L2, as long as few programs share a multiprocessor: hence many warps each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.softmax_loss import IGNORE

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST_BLOCK = 8192  # 16 values a thread at 16 warps: two 16-byte loads of bf16, and no spilled registers


def softmax_loss(
    logits_NV: Tensor,
    target_N: Tensor,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    with_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """As redline.kernels.softmax_loss.softmax_loss; the gradient is the logits' own tensor, overwritten."""
    rows, vocab = logits_NV.shape
    assert logits_NV.stride(1) == 1, "a row's logits lie side by side"
    losses = torch.empty(rows, device=logits_NV.device, dtype=torch.float32)
    block = min(LARGEST_BLOCK, triton.next_power_of_2(vocab))
    if rows:
        _softmax_loss_kernel[(rows,)](
            logits_NV,
            target_N,
            losses,
            logits_NV.stride(0),
            target_N.stride(0),
            vocab,
            float(softcap or 1.0),
            float(scale),
            IGNORED=IGNORE,
            CAPPED=bool(softcap),
            GRADIENT=with_gradient,
            BLOCK=block,
            num_warps=max(1, min(16, block // 512)),
        )
    return losses, logits_NV if with_gradient else None


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def capped(z, softcap):  # type: ignore[no-untyped-def]
    """softcap·tanh(z / softcap), and its slope."""
    t = _tanh(z / softcap)
    return softcap * t, 1.0 - t * t


@triton.jit
def row_lse(  # type: ignore[no-untyped-def]
    logits, target, vocab, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr
):
    """The log of a row's sum of exponentials, and its target's logit."""
    # a target outside the vocabulary makes a NaN, and never a read elsewhere
    inside = (target >= 0) & (target < vocab)
    picked = tl.load(logits + target, mask=inside, other=float("nan")).to(tl.float32)
    if CAPPED:
        picked = softcap * _tanh(picked / softcap)
    lanes = tl.arange(0, BLOCK)
    largest = float("-inf")
    sums = tl.zeros([BLOCK], tl.float32)  # by lane: only the maximum is exchanged in the sweep
    ahead = _row_part(logits, lanes, vocab, EVICTION)
    for start in tl.range(0, vocab, BLOCK):
        z = ahead.to(tl.float32)
        ahead = _row_part(logits, start + BLOCK + lanes, vocab, EVICTION)  # on its way while this part is summed
        if CAPPED:
            z = tl.where(start + lanes < vocab, softcap * _tanh(z / softcap), float("-inf"))
        highest = tl.maximum(largest, tl.max(z, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # −inf − −inf would be a NaN
        sums = sums * tl.exp2((largest - base) * LOG2E) + tl.exp2(z * LOG2E - base * LOG2E)
        largest = highest
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return base + tl.log(tl.sum(sums, 0)), picked


@triton.jit
def _row_part(logits, columns, vocab, EVICTION: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(logits + columns, mask=columns < vocab, other=float("-inf"), eviction_policy=EVICTION)


@triton.jit
def _softmax_loss_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    target_ptr,
    loss_ptr,
    row_stride,
    target_stride,
    vocab,
    softcap,
    scale,
    IGNORED: tl.constexpr,
    CAPPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows × vocabulary can pass 2³¹
    logits = logits_ptr + row * row_stride
    target = tl.load(target_ptr + row * target_stride)
    lanes = tl.arange(0, BLOCK)

    if target == IGNORED:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            for start in tl.range(0, vocab, BLOCK):
                columns = start + lanes
                zeros = tl.zeros([BLOCK], logits_ptr.dtype.element_ty)
                tl.store(logits + columns, zeros, mask=columns < vocab)
    else:
        lse, picked = row_lse(logits, target, vocab, softcap, CAPPED, BLOCK, "evict_last")
        tl.store(loss_ptr + row, lse - picked)

        if GRADIENT:
            ahead = _row_part(logits, lanes, vocab, "evict_first")
            for start in tl.range(0, vocab, BLOCK):
                columns = start + lanes
                valid = columns < vocab
                z = ahead.to(tl.float32)
                ahead = _row_part(logits, columns + BLOCK, vocab, "evict_first")
                slope = 1.0
                if CAPPED:
                    z, slope = capped(z, softcap)
                gradient = tl.exp2(z * LOG2E - lse * LOG2E)
                gradient = tl.where(columns == target, gradient - 1.0, gradient) * slope * scale
                tl.store(logits + columns, gradient.to(logits_ptr.dtype.element_ty), mask=valid)
