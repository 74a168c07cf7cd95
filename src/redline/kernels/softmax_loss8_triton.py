"""Two kernels: rows for the sums, then tiles for the gradient, since a column needs many rows' side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.float8 import Float8, Scale
from redline.kernels.float8_triton import WORD, Made, fitting, load_quarters, place_of, store_tile
from redline.kernels.softmax_loss import IGNORE
from redline.kernels.softmax_loss8 import ALONG_COLUMNS, ALONG_ROWS, CUT
from redline.kernels.softmax_loss_triton import LARGEST_BLOCK, LOG2E, capped, row_lse

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
