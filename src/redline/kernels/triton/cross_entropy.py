"""The softmax loss and its gradient in one kernel: logits are read from memory once and overwritten once.

A program has a row. Its first sweep computes the row's maximum and sum, the second writes the gradient. Between the two
the row (100 KB at GPT-2's vocabulary) stays in the L2 cache, as long as few programs share a multiprocessor: hence many
warps per program. Padding columns, which are not classes, are loaded with the others and masked out, so that a row is
still read 16 bytes at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.cross_entropy import COLUMN_STEP, CUT_BITS, IGNORE, ROW_STEP
from redline.kernels.float8 import Float8, Scale
from redline.kernels.triton.float8 import WORD, OperandBuffer, load_quarters, place_of, store_tile, tile_side

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
    rows, vocab = logits_NV.shape
    assert logits_NV.stride(1) == 1, "the logits of a row must be contiguous"
    losses = torch.empty(rows, device=logits_NV.device, dtype=torch.float32)
    block = min(LARGEST_BLOCK, triton.next_power_of_2(vocab))
    if rows:
        _softmax_loss[(rows,)](
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
    """Return softcap·tanh(z / softcap), and its derivative."""
    t = _tanh(z / softcap)
    return softcap * t, 1.0 - t * t


@triton.jit
def row_lse(  # type: ignore[no-untyped-def]
    logits, target, vocab, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr,
    classes=0, LIMITED: tl.constexpr = False,
):  # fmt: skip
    """Return the log-sum-exp of a row, and the logit of its target. With LIMITED only `classes` columns count."""
    end = vocab
    if LIMITED:
        end = classes
    # a target out of range gives a NaN loss, not a read of other memory
    inside = (target >= 0) & (target < end)
    picked = tl.load(logits + target, mask=inside, other=float("nan")).to(tl.float32)
    if CAPPED:
        picked = softcap * _tanh(picked / softcap)
    lanes = tl.arange(0, BLOCK)
    largest = float("-inf")
    sums = tl.zeros([BLOCK], tl.float32)  # per lane: only the maximum is exchanged between threads in the loop
    ahead = _row_part(logits, lanes, vocab, EVICTION)
    for start in tl.range(0, vocab, BLOCK):
        z = ahead.to(tl.float32)
        ahead = _row_part(logits, start + BLOCK + lanes, vocab, EVICTION)  # prefetched while this part is summed
        if CAPPED:
            z = softcap * _tanh(z / softcap)
        if CAPPED or LIMITED:
            z = tl.where(start + lanes < end, z, float("-inf"))
        highest = tl.maximum(largest, tl.max(z, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # −inf − (−inf) would be NaN
        sums = sums * tl.exp2((largest - base) * LOG2E) + tl.exp2(z * LOG2E - base * LOG2E)
        largest = highest
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return base + tl.log(tl.sum(sums, 0)), picked


@triton.jit
def _row_part(logits, columns, vocab, EVICTION: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(logits + columns, mask=columns < vocab, other=float("-inf"), eviction_policy=EVICTION)


@triton.jit
def _softmax_loss(  # type: ignore[no-untyped-def]
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
# To fp8, in two kernels: rows for the sums, then tiles for the gradient, because the transposed layout needs the codes
# of many rows at once.


_CUT_BITS, _ROW_STEP, _COLUMN_STEP = (tl.constexpr(value) for value in (CUT_BITS, ROW_STEP, COLUMN_STEP))
TILE = (128, 64, 8)  # rows, columns, warps


def softmax_loss8(
    logits_NV: Tensor, target_N: Tensor, scale: Scale, *, softcap: float | None = None
) -> tuple[Tensor, Float8]:
    n, vocab = logits_NV.shape
    losses, lse = torch.empty((2, n), device=logits_NV.device, dtype=torch.float32)
    out = OperandBuffer(n, vocab, scale, torch.float8_e5m2)
    block = min(LARGEST_BLOCK, triton.next_power_of_2(vocab))
    cap, is_capped = float(softcap or 1.0), bool(softcap)
    _losses_and_lse[(n,)](
        logits_NV, target_N, losses, lse, vocab, cap,
        IGNORED=IGNORE, CAPPED=is_capped, BLOCK=block, num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
    tokens, columns, warps = tile_side(TILE[0], n), TILE[1], TILE[2]
    row, column, factor, _ = out.pointers
    _softmax_gradient8[(triton.cdiv(n, tokens) * triton.cdiv(vocab, columns),)](
        logits_NV, target_N, lse, row, column, factor, n, vocab, cap,
        IGNORED=IGNORE, CAPPED=is_capped, COLUMN=out.flags["COLUMN"],
        GROUPS=tokens // WORD.value, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip
    return losses, out.operand()


@triton.jit
def _losses_and_lse(  # type: ignore[no-untyped-def]
    logits, target, losses, lse, vocab, softcap,
    IGNORED: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows × vocabulary can pass 2³¹
    target_of_row = tl.load(target + row)
    if target_of_row == IGNORED:
        tl.store(losses + row, 0.0)
        tl.store(lse + row, 0.0)
    else:
        row_sum, picked = row_lse(logits + row * vocab, target_of_row, vocab, softcap, CAPPED, BLOCK, "evict_first")
        tl.store(losses + row, row_sum - picked)
        tl.store(lse + row, row_sum)


@triton.jit
def _gradient_of(  # type: ignore[no-untyped-def]
    z, token, target, lse, place, n, exponent, softcap, IGNORED: tl.constexpr, CAPPED: tl.constexpr
):
    """Return the gradient at logits z, times 2^exponent, dithered to e5m2's three significant bits."""
    target_of_row = tl.load(target + token, mask=token < n, other=IGNORED)
    sums = tl.load(lse + token, mask=token < n, other=0.0)
    z = z.to(tl.float32)
    slope = 1.0
    if CAPPED:
        z, slope = capped(z, softcap)
    value = tl.exp2(z * LOG2E + (exponent - sums * LOG2E)[:, None])
    value = tl.where(place[None, :] == target_of_row[:, None], value - tl.exp2(exponent), value) * slope
    threshold = (token.to(tl.uint32) * _ROW_STEP)[:, None] + (place.to(tl.uint32) * _COLUMN_STEP)[None, :]
    bits = value.to(tl.uint32, bitcast=True) + (threshold >> (32 - _CUT_BITS))
    value = (bits >> _CUT_BITS << _CUT_BITS).to(tl.float32, bitcast=True)
    # a row with a NaN or infinite logit has no finite sum and becomes NaN; an ignored row becomes zero in any case
    scored = target_of_row != IGNORED
    other = tl.where(scored, float("nan"), 0.0)
    return tl.where((scored & (tl.abs(sums) < float("inf")))[:, None], value, other[:, None])


@triton.jit
def _softmax_gradient8(  # type: ignore[no-untyped-def]
    logits, target, lse, row, column, factor, n, vocab, softcap,
    IGNORED: tl.constexpr, CAPPED: tl.constexpr, COLUMN: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    group, place = place_of(vocab, GROUPS, COLUMNS)
    exponent = tl.log2(tl.load(factor))
    a, b, c, d = load_quarters(logits, group, place, n, vocab, place < vocab)
    a = _gradient_of(a, group * WORD, target, lse, place, n, exponent, softcap, IGNORED, CAPPED)
    b = _gradient_of(b, group * WORD + 1, target, lse, place, n, exponent, softcap, IGNORED, CAPPED)
    c = _gradient_of(c, group * WORD + 2, target, lse, place, n, exponent, softcap, IGNORED, CAPPED)
    d = _gradient_of(d, group * WORD + 3, target, lse, place, n, exponent, softcap, IGNORED, CAPPED)
    store_tile((a, b, c, d), (row, column, 1.0), group, place, n, vocab, place < vocab, COLUMN)
