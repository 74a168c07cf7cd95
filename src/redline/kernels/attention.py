"""Attention: one entry point, several back-ends, chosen once and said why.

Tensors are [B, H, T, K]. `Attention.bind` turns a batch's documents into what the back-end wants (a dense mask,
borders, a block mask) once per batch; every layer then calls `attention(q, k, v, bound)`. Block diffusion's mask is the
same for all batches, and made once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.errors import UserError
from redline.hardware.measurements import ATTENTION, gpu_key, read_measurement, store_measurement
from redline.hardware.nvml import driver_version
from redline.kernels.masks import MaskSpec, sees_block
from redline.kernels.timing import kernel_ms

# ----------------------------------------------------------------------------------------------------
# Heads that share their keys and values: without copies where a back-end's kernel can, and gets it right.


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


BACKENDS = ("cudnn", "flash", "efficient", "flex", "split", "dense")

Shape = tuple[int, int, int, int]  # B, H, T, K
_FLEX: dict[str, Any] = {}  # the compiled function, once it was needed


@dataclass
class Bound:
    """A mask made ready for one batch."""

    dense: Tensor | None = None  # [B or 1, 1, T, keys], True where seen
    borders: Tensor | None = None  # cumulative document lengths over the flattened batch
    longest: int = 0
    blocks: Any = None  # flex BlockMask


class Attention:
    """The chosen back-end for one mask description."""

    def __init__(self, backend: str, spec: MaskSpec, device: str = "cpu", *, grouped: bool = False) -> None:
        """`grouped`: several heads share their keys and values."""
        self.backend, self.spec, self.device = backend, spec, device
        self.varlen = backend == "flash" and spec.documents and device == "cuda"
        used = ("varlen", "flash", "cudnn") if self.varlen else (backend,)  # looked at now: a compiler cannot
        self.sharing = frozenset(name for name in used if grouped and device == "cuda" and reads_groups(name))
        self.own_blocks = spec.own_blocks
        self._static: Bound | None = None

    def bind(
        self,
        length: int,
        documents_BT: Tensor | None = None,
        borders: Tensor | None = None,
        longest: int | None = None,  # document; where that is known, fewer empty blocks are launched
    ) -> Bound:
        if self.spec.blocks:
            assert length == self.spec.read, "a row is both copies"
            self._static = self._static or self._bind_blocks()
            return self._static
        if self.backend == "flex":
            return Bound(blocks=_block_mask(self.spec, length, documents_BT, self.device))
        if not self.spec.documents or (self.varlen and documents_BT is None):
            return Bound()  # causal is a flag to these kernels, not a tensor
        assert documents_BT is not None, "a document mask needs document ids"
        if self.varlen:
            return Bound(borders=borders if borders is not None else _borders(documents_BT), longest=longest or length)
        return Bound(dense=self.spec.dense(length, documents_BT))

    def _bind_blocks(self) -> Bound:
        keys_from = len(self.spec.noisy) if self.backend == "split" else 0
        if self.backend == "flex" or (self.backend == "split" and self.device == "cuda"):
            return Bound(blocks=_block_mask(self.spec, self.spec.read, None, self.device, keys_from))
        mask = self.spec.dense(self.spec.read, device=torch.device(self.device))
        return Bound(dense=mask[..., keys_from:].contiguous())

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bound: Bound) -> Tensor:
        if self.backend == "dense":
            return _dense(q, k, v, self.spec, bound.dense)
        if self.backend == "flex":
            return _flex(q, k, v, bound.blocks)
        if self.backend == "split":
            return _split(q, k, v, self.own_blocks, bound)
        if bound.borders is not None:
            return _varlen(q, k, v, bound, "varlen" in self.sharing)
        backend = _for_whole_rows(q) if self.varlen else self.backend
        grouped = backend in self.sharing and bound.dense is None
        if not grouped:
            k, v = repeat_kv(q, k, v)
        with sdpa_kernel(SDPA[backend]):
            causal = self.spec.causal and bound.dense is None
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bound.dense, is_causal=causal, enable_gqa=grouped)


def _for_whole_rows(q: Tensor) -> str:
    """By documents is flash's; without borders the fastest may do it, unless it must be the same every time."""
    same = torch.are_deterministic_algorithms_enabled()
    return "flash" if same or candidates(MaskSpec(), "cuda", q.dtype, q.shape[-1])["cudnn"] else "cudnn"


def attend_cached(q: Tensor, k: Tensor, v: Tensor, start: int, whole: bool = False) -> Tensor:
    """New queries at positions start… against the keys up to their own (sampling), or against the whole of them."""
    k, v = repeat_kv(q, k, v)
    if whole or q.shape[2] == 1:
        return F.scaled_dot_product_attention(q, k, v)
    rows = torch.arange(start, start + q.shape[2], device=q.device)
    seen = rows[:, None] >= torch.arange(k.shape[2], device=q.device)[None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _dense(q: Tensor, k: Tensor, v: Tensor, spec: MaskSpec, mask: Tensor | None) -> Tensor:
    """The reference: every score in float32, masked, softmax."""
    k, v = repeat_kv(q, k, v)
    if mask is None:
        mask = spec.dense(q.shape[2], device=q.device)
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ v.float()).to(q.dtype)


def _borders(documents_BT: Tensor) -> Tensor:
    """Cumulative lengths of the documents; each row begins a new one."""
    starts = torch.ones_like(documents_BT, dtype=torch.bool)
    starts[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    first = starts.flatten().nonzero().flatten()
    return torch.cat([first, first.new_tensor([documents_BT.numel()])]).to(torch.int32)


def _varlen(q: Tensor, k: Tensor, v: Tensor, bound: Bound, grouped: bool) -> Tensor:
    B, H, T, K = q.shape
    if not grouped:
        k, v = repeat_kv(q, k, v)
    q, k, v = (x.transpose(1, 2).reshape(B * T, -1, K) for x in (q, k, v))
    assert bound.borders is not None
    return by_documents(q, k, v, bound.borders, bound.longest, grouped).view(B, T, H, K).transpose(1, 2)


def _flex(q: Tensor, k: Tensor, v: Tensor, blocks: Any, **options: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = flex_attention
    if q.is_cuda and not torch.compiler.is_compiling():
        run = _FLEX.setdefault("flex", torch.compile(flex_attention, dynamic=False))  # uncompiled, it makes all scores
    if q.is_cuda:  # not its kernels for single queries, which it would take for short ones and then not have
        options["kernel_options"] = {"BACKEND": "TRITON"}
    return run(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1], **options)


def _block_mask(spec: MaskSpec, length: int, documents_BT: Tensor | None, device: str, keys_from: int = 0) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    tables = spec.tables(device) if spec.blocks else None  # made here: what follows is compiled

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if tables is not None:
            return sees_block(*tables, query, key + keys_from)
        same = documents_BT[batch, query] == documents_BT[batch, key] if documents_BT is not None else None
        return spec.allows(query, key, same)

    batch = documents_BT.shape[0] if spec.documents and documents_BT is not None else None
    return create_block_mask(allowed, batch, None, length, length - keys_from, device=device)


def _split(q: Tensor, k: Tensor, v: Tensor, own_blocks: list[tuple[int, int]], bound: Bound) -> Tensor:
    """Block diffusion in two parts: every query among the clean keys, and a noisy one in its own block.

    Noisy positions see no noisy ones but those of their block, so their scores are few and need no mask.
    """
    start = sum(count * size for count, size in own_blocks)
    found, lse = _among_clean(q, k[:, :, start:], v[:, :, start:], bound)
    k, v = repeat_kv(q, k, v)
    joined, start = [], 0
    for count, size in own_blocks:
        end = start + count * size
        each = (x[:, :, start:end].unflatten(2, (count, size)) for x in (q, k, v, found, lse))
        out: Tensor = _OwnBlock.apply(*each)
        joined.append(out.flatten(2, 3))
        start = end
    return torch.cat((*joined, found[:, :, start:].to(q.dtype)), 2)


def _among_clean(q: Tensor, k: Tensor, v: Tensor, bound: Bound) -> tuple[Tensor, Tensor]:
    """What each query finds there, and the log-sum-exp of its scores; where it sees none, 0 and −inf or nearly."""
    if bound.blocks is not None:
        from torch.nn.attention.flex_attention import AuxRequest

        out, more = _flex(q, k, v, bound.blocks, return_aux=AuxRequest(lse=True))
        return out, more.lse
    assert bound.dense is not None
    k, v = repeat_kv(q, k, v)
    scores = _scores(q, k).masked_fill(~bound.dense, float("-inf"))
    highest = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)  # −inf − −inf: a NaN
    terms = (scores - highest).exp()
    total = terms.sum(-1, keepdim=True).clamp_min(1.0)  # the highest is 1; less is none
    return terms @ v.float() / total, (highest + total.log())[..., 0]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q.float() @ k.float().mT / math.sqrt(q.shape[-1])


class _OwnBlock(torch.autograd.Function):
    """Attention within blocks [B, H, N/S, S, K], joined with what the same queries found elsewhere.

    Two softmaxes over different keys are one softmax, weighted by their shares of the whole sum. All in float32; the
    scores are made again on the way back.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, found: Tensor, found_lse: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, found, found_lse)
        _, own, share = _OwnBlock.parts(q, k, v, found_lse)
        return torch.lerp(own, found.float(), share).to(q.dtype)

    @staticmethod
    def parts(q: Tensor, k: Tensor, v: Tensor, found_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The block's weights, what they give, and the share of what was found elsewhere."""
        scores = _scores(q, k)
        weights = scores.softmax(-1)
        share = (found_lse - scores.logsumexp(-1)).sigmoid()
        return weights, weights @ v.float(), share[..., None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, found, found_lse = ctx.saved_tensors
        weights, own, share = _OwnBlock.parts(q, k, v, found_lse)
        g = grad.float()
        g_own = g * (1.0 - share)
        g_lse = ((g_own * (found.float() - own)).sum(-1, keepdim=True)) * share  # of the others; the block's is −g_lse
        g_weights = g_own @ v.float().mT
        g_scores = weights * (g_weights - (g_own * own).sum(-1, keepdim=True) - g_lse) / math.sqrt(q.shape[-1])
        g_q, g_k, g_v = g_scores @ k.float(), g_scores.mT @ q.float(), weights.mT @ g_own
        return g_q.to(q.dtype), g_k.to(k.dtype), g_v.to(v.dtype), (g * share).to(found.dtype), g_lse[..., 0]


_FUSED_CPU = "torch's fused CPU kernel"


@dataclass(frozen=True)
class Selection:
    backend: str
    reason: str


def candidates(spec: MaskSpec, device: str, dtype: torch.dtype, head_dim: int) -> dict[str, str]:
    """Every back-end: empty where it can run, else why it cannot."""
    unsplit = "" if spec.noisy and spec.clean else "needs a noisy and a clean copy"
    if device == "cpu":
        gpu = "needs a GPU"
        flex = "has no backward on a CPU"
        pairs = "" if head_dim > 2 else "needs head_dim above 2"  # torch's finds the rotated ones in another order
        return {"cudnn": gpu, "flash": pairs, "efficient": gpu, "flex": flex, "split": unsplit, "dense": ""}
    half = dtype in (torch.bfloat16, torch.float16)
    wants_half = "" if half else "needs bf16 or fp16"
    size = "" if head_dim % 8 == 0 and head_dim <= 256 else "needs head_dim a multiple of 8, at most 256"
    power = "" if head_dim >= 16 and head_dim & (head_dim - 1) == 0 else "needs head_dim a power of two, at least 16"
    cudnn = "" if torch.backends.cudnn.is_available() and head_dim <= 128 else "needs cuDNN and head_dim at most 128"
    return {
        "cudnn": wants_half or size or cudnn,
        "flash": wants_half or size or ("takes no mask of blocks" if spec.blocks else ""),
        "efficient": "",
        "flex": power,
        "split": unsplit or power,  # the larger part by flex
        "dense": "",
    }


def select(asked: str, spec: MaskSpec, *, device: str, dtype: torch.dtype, shape: Shape) -> Selection:
    """The back-end asked for, or the fastest at the run's own shape [B, H, T, K] (measured on a GPU, once)."""
    able = candidates(spec, device, dtype, shape[-1])
    if asked != "auto":
        if able[asked]:
            working = ", ".join(name for name, why in able.items() if not why)
            raise UserError(f"{asked} {able[asked]}.", where="model.attention", fix=f"Use auto, or one of {working}.")
        return Selection(asked, "as asked")
    if device == "cpu":
        return Selection("dense", f"flash: {why}") if (why := able["flash"]) else Selection("flash", _FUSED_CPU)
    able_here = [name for name in BACKENDS if name != "dense" and not able[name]]
    ranking = _recall_ranking(able_here, spec, dtype, shape) or _measure_ranking(able_here, spec, dtype, shape)
    failed = {**{name: why for name, why in able.items() if why}, **ranking.failed}
    if not ranking.ms:
        return Selection("dense", "; ".join(f"{n}: {w}" for n, w in failed.items()))
    best = min(ranking.ms, key=ranking.ms.__getitem__)
    measured = ", ".join(f"{n} {t:.2f}" for n, t in sorted(ranking.ms.items(), key=lambda item: item[1]))
    unasked = ("dense",) if spec.blocks else ("dense", "split")
    lost = "".join(f"; {n}: {w}" for n, w in failed.items() if n not in unasked)
    when = f", as measured on {ranking.date}" if ranking.date else ""
    return Selection(best, f"forward+backward ms at {'×'.join(map(str, shape))}{when}: {measured}{lost}")


@dataclass(frozen=True)
class Ranking:
    """Milliseconds of every back-end that ran, and why the others did not."""

    ms: dict[str, float]
    failed: dict[str, str]
    date: str = ""  # of an earlier start, from the cache


def _measure_ranking(names: list[str], spec: MaskSpec, dtype: torch.dtype, shape: Shape) -> Ranking:
    times, failed, lasting = {}, {}, True
    for name in names:
        try:
            with unheard():
                times[name] = measure(name, spec, dtype=dtype, shape=shape)
        except Exception as error:  # a kernel may refuse a shape in many ways; the others still serve
            failed[name] = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
            lasting &= not isinstance(error, torch.OutOfMemoryError)  # another time there may be room
    if times and lasting:
        ms = {name: round(value, 4) for name, value in times.items()}
        store_measurement(ATTENTION, _ranking_key(spec, dtype, shape), {"ms": ms, "failed": failed})
    return Ranking(times, failed)


def _recall_ranking(names: list[str], spec: MaskSpec, dtype: torch.dtype, shape: Shape) -> Ranking | None:
    """What an earlier start measured on this machine, if it looked at the same back-ends."""
    kept = read_measurement(ATTENTION, _ranking_key(spec, dtype, shape)) or {}
    ms, failed = kept.get("ms"), kept.get("failed")
    if not isinstance(ms, dict) or not isinstance(failed, dict) or {*ms, *failed} != {*names} or not ms:
        return None
    if not all(isinstance(value, float) and value > 0 for value in ms.values()):
        return None
    return Ranking(ms, {name: str(why) for name, why in failed.items()}, kept["date"])


def _ranking_key(spec: MaskSpec, dtype: torch.dtype, shape: Shape) -> str:
    machine = gpu_key(torch.cuda.get_device_properties(0).name, driver_version())
    return f"{machine}; {'×'.join(map(str, shape))} {str(dtype).removeprefix('torch.')} {spec}"


def measure(backend: str, spec: MaskSpec, *, dtype: torch.dtype, shape: Shape) -> float:
    """Milliseconds, forward and backward, at this shape with documents of a quarter of a row."""
    B, H, T, K = shape
    # like the model's own: views of one merged projection
    qkv = torch.randn(B, T, 3, H, K, device="cuda", dtype=dtype, requires_grad=True)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    documents = (torch.arange(T, device="cuda") * 4 // T).expand(B, T).contiguous() if spec.documents else None
    attention = Attention(backend, spec, "cuda")
    bound = attention.bind(T, documents)
    upstream = torch.randn(B, T, H, K, device="cuda", dtype=dtype).transpose(1, 2)

    def once() -> None:
        attention(q, k, v, bound).backward(upstream)
        qkv.grad = None

    return kernel_ms(once)
