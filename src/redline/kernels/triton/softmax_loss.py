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

from redline.kernels.float8 import Float8, Scale
from redline.kernels.softmax_loss import ALONG_COLUMNS, ALONG_ROWS, CUT, IGNORE
from redline.kernels.triton.float8 import WORD, Made, fitting, load_quarters, place_of, store_tile

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


# ----------------------------------------------------------------------------------------------------
# Two kernels: rows for the sums, then tiles for the gradient, since a column needs many rows' side by side.


_CUT, _ALONG_ROWS, _ALONG_COLUMNS = (tl.constexpr(value) for value in (CUT, ALONG_ROWS, ALONG_COLUMNS))
TILE = (128, 64, 8)  # rows, columns, warps


def softmax_loss8(
    logits_NV: Tensor, target_N: Tensor, scale: Scale, *, softcap: float | None = None
) -> tuple[Tensor, Float8]:
    n, vocab = logits_NV.shape
    losses, lse = torch.empty((2, n), device=logits_NV.device, dtype=torch.float32)
    out = Made(n, vocab, scale, torch.float8_e5m2)
    block = min(LARGEST_BLOCK, triton.next_power_of_2(vocab))
    cap, is_capped = float(softcap or 1.0), bool(softcap)
    _losses[(n,)](
        logits_NV, target_N, losses, lse, vocab, cap,
        IGNORED=IGNORE, CAPPED=is_capped, BLOCK=block, num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    tokens, columns, warps = fitting(TILE[0], n), TILE[1], TILE[2]
    row, column, factor, _ = out.pointers
    _gradient[(triton.cdiv(n, tokens) * triton.cdiv(vocab, columns),)](
        logits_NV, target_N, lse, row, column, factor, n, vocab, cap,
        IGNORED=IGNORE, CAPPED=is_capped, COLUMN=out.flags["COLUMN"],
        GROUPS=tokens // WORD.value, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip
    return losses, out.operand()


@triton.jit
def _losses(  # type: ignore[no-untyped-def]
    logits, target, losses, lse, vocab, softcap,
    IGNORED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows × vocabulary can pass 2³¹
    wanted = tl.load(target + row)
    if wanted == IGNORED:
        tl.store(losses + row, 0.0)
        tl.store(lse + row, 0.0)
    else:
        found, picked = row_lse(logits + row * vocab, wanted, vocab, softcap, CAPPED, BLOCK, "evict_first")
        tl.store(losses + row, found - picked)
        tl.store(lse + row, found)


@triton.jit
def _slopes(  # type: ignore[no-untyped-def]
    z, token, target, lse, place, n, exponent, softcap, IGNORED: tl.constexpr, CAPPED: tl.constexpr
):
    """The gradient at logits z, times 2^exponent, in e5m2's three bits."""
    wanted = tl.load(target + token, mask=token < n, other=IGNORED)
    sums = tl.load(lse + token, mask=token < n, other=0.0)
    z = z.to(tl.float32)
    slope = 1.0
    if CAPPED:
        z, slope = capped(z, softcap)
    value = tl.exp2(z * LOG2E + (exponent - sums * LOG2E)[:, None])
    value = tl.where(place[None, :] == wanted[:, None], value - tl.exp2(exponent), value) * slope
    threshold = (token.to(tl.uint32) * _ALONG_ROWS)[:, None] + (place.to(tl.uint32) * _ALONG_COLUMNS)[None, :]
    bits = value.to(tl.uint32, bitcast=True) + (threshold >> (32 - _CUT))
    value = (bits >> _CUT << _CUT).to(tl.float32, bitcast=True)
    # a row with a bad logit has no sum: then all of it is bad; what is not scored says nothing, whatever it holds
    scored = wanted != IGNORED
    other = tl.where(scored, float("nan"), 0.0)
    return tl.where((scored & (tl.abs(sums) < float("inf")))[:, None], value, other[:, None])


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits, target, lse, row, column, factor, n, vocab, softcap,
    IGNORED: tl.constexpr, CAPPED: tl.constexpr, COLUMN: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, place = place_of(vocab, GROUPS, COLUMNS)
    exponent = tl.log2(tl.load(factor))
    a, b, c, d = load_quarters(logits, group, place, n, vocab, place < vocab)
    a = _slopes(a, group * WORD, target, lse, place, n, exponent, softcap, IGNORED, CAPPED)
    b = _slopes(b, group * WORD + 1, target, lse, place, n, exponent, softcap, IGNORED, CAPPED)
    c = _slopes(c, group * WORD + 2, target, lse, place, n, exponent, softcap, IGNORED, CAPPED)
    d = _slopes(d, group * WORD + 3, target, lse, place, n, exponent, softcap, IGNORED, CAPPED)
    store_tile((a, b, c, d), (row, column, 1.0), group, place, n, vocab, place < vocab, COLUMN)
