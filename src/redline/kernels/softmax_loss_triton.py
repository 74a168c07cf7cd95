"""Cross-entropy and its gradient in one kernel: logits are read from memory once and overwritten once.

A program has a row. Its first sweep finds the row's maximum and sum, the second writes the gradient; between them the
row (100 KB at GPT-2's vocabulary) stays in L2, as long as few programs share a multiprocessor: hence many warps each.
Columns that are no classes are read with the others, and dropped: a row then still moves 16 bytes at a time.
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
    weight_N: Tensor | None = None,
    classes: int | None = None,
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
            losses if weight_N is None else weight_N,
            logits_NV.stride(0),
            target_N.stride(0),
            vocab,
            vocab if classes is None else classes,
            float(softcap or 1.0),
            float(scale),
            IGNORED=IGNORE,
            CAPPED=bool(softcap),
            WEIGHTED=weight_N is not None,
            LIMITED=classes is not None and classes < vocab,
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
    logits, target, vocab, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr,
    classes=0, LIMITED: tl.constexpr = False,
):  # fmt: skip
    """The log of a row's sum of exponentials, and its target's logit; LIMITED, of its first `classes` columns."""
    end = vocab
    if LIMITED:
        end = classes
    # a target that is no class makes a NaN, and never a read elsewhere
    inside = (target >= 0) & (target < end)
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
            z = softcap * _tanh(z / softcap)
        if CAPPED or LIMITED:
            z = tl.where(start + lanes < end, z, float("-inf"))
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
    weight_ptr,
    row_stride,
    target_stride,
    vocab,
    classes,
    softcap,
    scale,
    IGNORED: tl.constexpr,
    CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    LIMITED: tl.constexpr,
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
        lse, picked = row_lse(logits, target, vocab, softcap, CAPPED, BLOCK, "evict_last", classes, LIMITED)
        loss = lse - picked
        if WEIGHTED:
            weight = tl.load(weight_ptr + row)
            loss *= weight
            scale *= weight
        tl.store(loss_ptr + row, loss)

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
                if LIMITED:
                    gradient = tl.where(columns < classes, gradient, 0.0)
                tl.store(logits + columns, gradient.to(logits_ptr.dtype.element_ty), mask=valid)
