"""Attention: one entry point over several back-ends, of which one is selected at the start of a run, with a reason.

Tensors are [B, H, T, K]. `Attention.bind` turns the documents of a batch into what the back-end needs (a dense mask,
cumulative sequence lengths, or a block mask) once per batch; every layer then calls `attention(q, k, v, bound)`. The
mask of block diffusion is the same for all batches and made once.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.errors import UserError
from redline.hardware.measurements import ATTENTION, gpu_key, read_measurement, store_measurement
from redline.hardware.nvml import driver_version
from redline.kernels.context import Part
from redline.kernels.timing import TimingError, kernel_ms
from redline.planning.layout import Layout

# ----------------------------------------------------------------------------------------------------
# The description of a mask, with its dense form, which the tests take as the definition.


@dataclass(frozen=True)
class MaskSpec:
    """A causal mask, optionally within documents only; or the mask of block diffusion (arXiv 2503.09573).

    In block diffusion a row is a noisy copy of a sequence followed by a clean copy; `noisy` and `clean` hold the block
    number of each of their positions. A noisy block sees itself and the clean blocks before it; a clean block sees the
    clean blocks up to itself.
    """

    causal: bool = True  # ignored in block diffusion
    documents: bool = False
    noisy: tuple[int, ...] = ()
    clean: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert not (self.documents and self.blocks), "block diffusion has one document per row"
        assert all(a <= b for copy in (self.noisy, self.clean) for a, b in pairwise(copy)), (
            "block numbers must not decrease"
        )

    @classmethod
    def of_layout(cls, layout: Layout) -> MaskSpec:
        """Return the mask of a diffusion job's layout."""
        if not layout.clean:
            return cls(causal=False)  # a single noisy block, in which every position sees every other
        noisy, clean = (tuple(layout.block_of[place] for place in copy) for copy in (layout.noisy, layout.clean))
        return cls(noisy=noisy, clean=clean)

    @property
    def blocks(self) -> bool:
        """Whether this is a mask of block diffusion."""
        return bool(self.noisy or self.clean)

    @property
    def length(self) -> int:
        """The positions of a row of block diffusion, both copies together."""
        return len(self.noisy) + len(self.clean)

    @property
    def own_blocks(self) -> list[tuple[int, int]]:
        """The noisy blocks as runs of equal size: (number of blocks, size of each)."""
        sizes = [len(list(block)) for _, block in groupby(self.noisy)]
        return [(len(list(equal)), size) for size, equal in groupby(sizes)]

    def __str__(self) -> str:
        """Return a description that is short enough for a cache key, however many positions there are."""
        if not self.blocks:
            return f"MaskSpec(causal={self.causal}, documents={self.documents})"
        digest = hashlib.sha256(repr((self.noisy, self.clean)).encode()).hexdigest()[:12]
        return f"MaskSpec({len(self.noisy)} noisy, {len(self.clean)} clean, {digest})"

    def tables(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Return for each position its block number, and whether it is noisy: integers [T]."""
        noisy = (1,) * len(self.noisy) + (0,) * len(self.clean)
        block_T, noisy_T = torch.tensor(((*self.noisy, *self.clean), noisy), dtype=torch.int32, device=device)
        return block_T, noisy_T

    def allows(self, query: Tensor, key: Tensor, same_document: Tensor | None) -> Tensor:
        """Return whether position `query` sees position `key`; the arguments broadcast."""
        if self.blocks:
            return sees_block(*self.tables(query.device), query, key)
        seen = query >= key if self.causal else torch.ones_like(query >= key)
        return seen if same_document is None else seen & same_document

    def dense(
        self,
        length: int,
        documents_BT: Tensor | None = None,
        device: torch.device | None = None,
        queries_T: Tensor | None = None,
    ) -> Tensor:
        """Return a boolean mask [B or 1, 1, T, T], True where the query (row) sees the key (column).

        `queries` are the positions of the queries, if they are not all positions in order.
        """
        assert not self.blocks or length == self.length, "a row holds a noisy and a clean copy"
        if self.documents:
            assert documents_BT is not None, "a document mask needs document ids"
            device = documents_BT.device
        keys = torch.arange(length, device=device)
        queries = keys if queries_T is None else queries_T
        same = None
        if self.documents and documents_BT is not None:
            same = documents_BT[:, queries, None] == documents_BT[:, None, :]
        allowed = self.allows(queries[:, None], keys[None, :], same)
        return allowed[:, None] if allowed.dim() == 3 else allowed[None, None]


def sees_block(block_T: Tensor, noisy_T: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return whether `query` sees `key` in block diffusion."""
    own = (block_T[query] == block_T[key]) & (noisy_T[query] == 1)
    earlier = block_T[query] - noisy_T[query] >= block_T[key]  # noisy is 1 or 0: a clean query also sees its own block
    return torch.where(noisy_T[key] == 1, own, earlier)


# ----------------------------------------------------------------------------------------------------
# Grouped queries: heads that share keys and values. Back-ends whose kernels support this, and compute it correctly,
# read the shared keys and values directly; for the others they are copied.


SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The keyword that makes varlen_attn read shared keys and values. Filled in by supports_gqa, because torch.compile
# cannot inspect a signature inside a graph.
_VARLEN_GQA: dict[str, Any] = {}
_TOLERANCE = 0.02  # relative to the norm of the result


def repeat_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Copy shared keys and values so that every query head has its own."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    grouped: bool,
    cu_queries: Tensor | None = None,
) -> Tensor:
    """Compute attention that is causal within documents, over the flattened batch [B·T, H, K].

    `cu_queries` are the cumulative numbers of queries, if documents have fewer queries than keys: the last of each.
    """
    from torch.nn.attention.varlen import varlen_attn  # here, because the import takes a second

    lengths = (cu_seqlens if cu_queries is None else cu_queries, cu_seqlens, max_seqlen, max_seqlen)
    out = varlen_attn(q, k, v, *lengths, window_size=(-1, 0), **(_VARLEN_GQA if grouped else {}))
    assert isinstance(out, Tensor)
    return out


@cache
def supports_gqa(backend: str) -> bool:
    """Return whether the back-end's kernel takes fewer key and value heads than query heads, by trying it.

    The result is compared with that of copied keys and values: some kernels accept the shapes and compute nonsense.
    """
    if backend not in (*SDPA, "varlen"):
        return False
    if backend == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        if "enable_gqa" in signature(varlen_attn).parameters:  # from torch 2.12 on
            _VARLEN_GQA["enable_gqa"] = True
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, H, 128, 64, device="cuda", dtype=torch.bfloat16, generator=generator) for H in (4, 2, 2, 4)
    )
    try:
        with torch.enable_grad(), ignore_warnings():
            shared, copied = (_output_and_gradients(backend, (q, k, v), grad, grouped) for grouped in (True, False))
    except (RuntimeError, ValueError):
        return False
    return all(torch.dist(a, b) <= _TOLERANCE * b.norm() for a, b in zip(shared, copied, strict=True))


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Silence torch's warnings about kernels that refuse a trial; the caller gets the refusal as an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _output_and_gradients(backend: str, qkv: tuple[Tensor, ...], grad: Tensor, grouped: bool) -> list[Tensor]:
    """Return the attention's output and the gradients of q, k and v."""
    leaves = q, k, v = [x.clone().requires_grad_() for x in qkv]
    if not grouped:
        k, v = repeat_kv(q, k, v)
    if backend == "varlen":
        B, H, T, K = q.shape
        cu_seqlens = torch.arange(0, B * T + 1, T // 2, device=q.device, dtype=torch.int32)
        q, k, v = (x.transpose(1, 2).reshape(B * T, -1, K) for x in (q, k, v))
        out = varlen_attention(q, k, v, cu_seqlens, T // 2, grouped).view(B, T, H, K).transpose(1, 2)
    else:
        with sdpa_kernel(SDPA[backend]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return [out, *torch.autograd.grad(out, leaves, grad)]


# ----------------------------------------------------------------------------------------------------
# The entry point and its back-ends.


RING = "ring"  # of parallel.context_backend
BACKENDS = ("cudnn", "flash", "efficient", "flex", "split", "matmul", "dense")

Shape = tuple[int, int, int, int]  # B, H, T, K
_COMPILED_FLEX: dict[str, Any] = {}  # the compiled flex_attention, made on first use


@dataclass
class Bound:
    """The mask of one batch, in the form that the back-end needs. All None: plain causal attention over each row."""

    dense: Tensor | None = None  # [B or 1, 1, T, keys], True where the query sees the key
    cu_seqlens: Tensor | None = None  # cumulative document lengths over the flattened batch
    max_seqlen: int = 0
    block_mask: Any = None  # of flex attention
    own_blocks: tuple[tuple[int, int], ...] = ()  # of block diffusion: the noisy blocks, for `split`
    cu_queries: Tensor | None = None  # cumulative numbers of queries, where documents have fewer queries than keys
    part: Part | None = None  # the rank's part of the rows, if they are split over ranks
    pieces: tuple[Piece, ...] = ()  # with a part: what is computed by one call each
    _bias: Tensor | None = None

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the dense mask as a term to add to scores; it is made for the first layer and read by all."""
        if self.dense is not None and (self._bias is None or self._bias.dtype != dtype):
            self._bias = additive(self.dense, dtype)
        return self._bias


@dataclass(frozen=True)
class Piece:
    """Queries of a rank's part, with the keys [0, keys) of the whole rows and the mask between both."""

    queries: slice
    keys: int
    bound: Bound


class Attention:
    """Attention by one back-end, for one mask description."""

    def __init__(
        self, backend: str, spec: MaskSpec, device: str = "cpu", *, grouped: bool = False, in_parts: bool = False
    ) -> None:
        """Prepare the back-end. `grouped` says that several query heads share keys and values.

        `in_parts` says that rows are split over ranks; the back-end then computes whole rows too, in evaluations.
        """
        self.backend, self.spec, self.device = backend, spec, device
        self.varlen = backend == "flash" and (spec.documents or in_parts) and device == "cuda"
        # tried now, because torch.compile cannot trace the trial
        used = ("varlen", "flash", "cudnn") if self.varlen else (backend,)
        self.gqa_backends = frozenset(name for name in used if grouped and device == "cuda" and supports_gqa(name))
        self._static: Bound | None = None
        self._static_part: Bound | None = None

    def bind(
        self,
        length: int,
        documents_BT: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Bound:
        """Return the mask of a batch whose rows have `length` positions.

        `documents` [B, T] numbers the document of each position. `cu_seqlens` is computed from it unless given;
        `max_seqlen`, the longest document, saves the launch of empty blocks if it is known.
        """
        if self.spec.blocks:
            assert length == self.spec.length, "a row holds a noisy and a clean copy"
            self._static = self._static or self._bind_blocks()
            return self._static
        if self.backend == "flex":
            return Bound(block_mask=_block_mask(self.spec, length, documents_BT, self.device))
        if not self.spec.documents or (self.varlen and documents_BT is None):
            return Bound()  # these kernels take causality as a flag
        assert documents_BT is not None, "a document mask needs document ids"
        if self.varlen:
            starts = cu_seqlens if cu_seqlens is not None else _cu_seqlens(documents_BT)
            return Bound(cu_seqlens=starts, max_seqlen=max_seqlen or length)
        return Bound(dense=self.spec.dense(length, documents_BT))

    def bind_part(
        self, part: Part, documents_BT: Tensor | None = None, varlen: Sequence[tuple[Tensor, Tensor, int]] = ()
    ) -> Bound:
        """Return the mask of a batch that holds a part of each row; `documents` are those of the whole rows.

        `varlen` has cumulative numbers of queries and of keys and the longest document for each chunk of the part.
        """
        static = not self.spec.documents and not varlen
        if static and self._static_part is not None and self._static_part.part is part:
            return self._static_part
        bound = Bound(part=part, pieces=tuple(self._pieces(part, documents_BT, varlen)))
        self._static_part = bound if static else None
        return bound

    def _pieces(
        self, part: Part, documents_BT: Tensor | None, varlen: Sequence[tuple[Tensor, Tensor, int]]
    ) -> Iterator[Piece]:
        if part.group.backend == RING:
            return
        if self.backend == "flex":
            mask = _block_mask(self.spec, part.length, documents_BT, self.device, queries_T=part.positions_T)
            yield Piece(slice(None), part.length, Bound(block_mask=mask))
            return
        # A causal query sees no key behind its chunk, so these are left out. Other masks are one piece.
        causal = self.spec.causal and not self.spec.blocks
        ends = [end for _, end in part.chunks] if causal else [part.length]
        count = part.share // len(ends)
        for number, end in enumerate(ends):
            queries = slice(number * count, (number + 1) * count)
            if varlen:
                cu_queries, cu_keys, longest = varlen[number]
                yield Piece(queries, part.length, Bound(cu_seqlens=cu_keys, cu_queries=cu_queries, max_seqlen=longest))
                continue
            dense = None
            if self.backend != "matmul" or not causal or self.spec.documents:
                positions = part.positions_T[queries]
                dense = self.spec.dense(part.length, documents_BT, positions.device, positions)[..., :end]
            yield Piece(queries, end, Bound(dense=dense))

    def _of_part(self, q: Tensor, k: Tensor, v: Tensor, bound: Bound) -> Tensor:
        """Compute the attention of a rank's part of the rows, over the keys and values of all ranks."""
        assert bound.part is not None
        if not bound.pieces:
            with sdpa_kernel(SDPA[self.backend]):
                return bound.part.ring(q, *repeat_kv(q, k, v))
        k, v = bound.part.whole(k, v)
        outputs = [
            self(q[:, :, piece.queries], k[:, :, : piece.keys], v[:, :, : piece.keys], piece.bound)
            for piece in bound.pieces
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def _bind_blocks(self) -> Bound:
        splits = self.backend == "split"
        keys_from, own_blocks = (len(self.spec.noisy), tuple(self.spec.own_blocks)) if splits else (0, ())
        if self.backend == "flex" or (splits and self.device == "cuda"):
            block_mask = _block_mask(self.spec, self.spec.length, None, self.device, keys_from)
            return Bound(block_mask=block_mask, own_blocks=own_blocks)
        mask = self.spec.dense(self.spec.length, device=torch.device(self.device))
        return Bound(dense=mask[..., keys_from:].contiguous(), own_blocks=own_blocks)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bound: Bound) -> Tensor:
        if bound.part is not None:
            return self._of_part(q, k, v, bound)
        if self.backend == "dense":
            return _dense(q, k, v, self.spec, bound.dense)
        if self.backend == "matmul":
            causal = self.spec.causal and not self.spec.blocks
            return by_matmuls(q, *repeat_kv(q, k, v), bound.bias(q.dtype), causal=causal)
        if self.backend == "flex":
            return _flex(q, k, v, bound.block_mask)
        if self.backend == "split":
            return _split(q, k, v, bound.own_blocks, bound)
        if bound.cu_seqlens is not None:
            return _varlen(q, k, v, bound, "varlen" in self.gqa_backends)
        backend = _backend_without_documents(q) if self.varlen else self.backend
        grouped = backend in self.gqa_backends and bound.dense is None
        if not grouped:
            k, v = repeat_kv(q, k, v)
        with sdpa_kernel(SDPA[backend]):
            causal = self.spec.causal and bound.dense is None
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bound.dense, is_causal=causal, enable_gqa=grouped)


def _backend_without_documents(q: Tensor) -> str:
    """Return the back-end for a batch with one document per row.

    Only flash has a kernel for packed documents. Without them cuDNN is faster, but its backward is not deterministic.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    return "flash" if deterministic or candidates(MaskSpec(), "cuda", q.dtype, q.shape[-1])["cudnn"] else "cudnn"


def attend_cached(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, bidirectional: bool = False) -> Tensor:
    """Compute attention of new queries over cached and new keys.

    Each query sees the keys that `seen` says. Without it, it sees all keys if it is the only one or with
    `bidirectional`; otherwise the keys are the queries' own, and each sees those up to itself.
    """
    B, H, T, K = q.shape
    if T == 1 or (bidirectional and seen is None):
        # The queries that share a key become rows of one query head, so that no key is copied for each of them.
        groups = q.reshape(B, k.shape[1], -1, K)
        return F.scaled_dot_product_attention(groups, k, v, attn_mask=seen).view(B, H, T, K)
    return F.scaled_dot_product_attention(q, *repeat_kv(q, k, v), attn_mask=seen, is_causal=seen is None)


def _dense(q: Tensor, k: Tensor, v: Tensor, spec: MaskSpec, mask: Tensor | None) -> Tensor:
    """Compute the reference: all scores in float32, masked, softmax."""
    k, v = repeat_kv(q, k, v)
    if mask is None:
        mask = spec.dense(q.shape[2], device=q.device)
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ v.float()).to(q.dtype)


def by_matmuls(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool) -> Tensor:
    """Compute attention by batched matmuls in the precision of q, with a backward written by hand.

    On CPUs with bf16 matmuls this is two to four times as fast as torch's fused kernel up to 2,048 positions. `bias`
    [B or 1, 1, T, T] holds −inf where a query may not see a key. With `causal`, no later key is seen either; if there
    are fewer queries than keys, they are the last positions.
    """
    B, H, T, K = q.shape
    out: Tensor = _MatmulAttention.apply(*(x.reshape(B * H, -1, K) for x in (q, k, v)), bias, causal, H)
    return out.view(B, H, T, K)


_QUERIES = 128  # of causal attention at once: their scores with later keys are not computed


class _MatmulAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, heads: int) -> Tensor:
        out, kept, scale = torch.empty_like(q), [], q.shape[-1] ** -0.5
        before = k.shape[1] - q.shape[1]  # keys before the first query
        for rows, keys in _tiles(q.shape[1], k.shape[1], causal):
            if bias is None and causal:
                hidden = _causal_bias(before + rows.start, before + rows.stop, q.dtype)[None]
                scores = torch.baddbmm(hidden, q[:, rows], k[:, keys].mT, alpha=scale)
            else:
                sizes = len(q), rows.stop - rows.start, keys.stop
                scores = torch.empty(sizes, dtype=q.dtype, device=q.device)
                scores.baddbmm_(q[:, rows], k[:, keys].mT, beta=0, alpha=scale)
                if bias is not None:
                    scores.view(-1, heads, *sizes[1:]).add_(bias[..., rows, keys])
            weights = torch.softmax(scores, -1)
            torch.bmm(weights, v[:, keys], out=out[:, rows])
            kept.append(weights)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, *kept = ctx.saved_tensors
        g_q, g_k, g_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        scale = q.shape[-1] ** -0.5
        for (rows, keys), weights in zip(_tiles(q.shape[1], k.shape[1], ctx.causal), kept, strict=True):
            g = grad[:, rows]
            g_weights = g @ v[:, keys].mT
            g_scores = torch._softmax_backward_data(g_weights, weights, -1, weights.dtype)
            g_q[:, rows].baddbmm_(g_scores, k[:, keys], beta=0, alpha=scale)
            g_k[:, keys].baddbmm_(g_scores.mT, q[:, rows], alpha=scale)
            g_v[:, keys].baddbmm_(weights.mT, g)
        return g_q, g_k, g_v, None, None, None


def _tiles(queries: int, keys: int, causal: bool) -> list[tuple[slice, slice]]:
    """Return the queries to compute together, each time with the keys that they may see."""
    if not causal:
        return [(slice(0, queries), slice(0, keys))]
    starts, before = range(0, queries, _QUERIES), keys - queries
    ends = [min(start + _QUERIES, queries) for start in starts]
    return [(slice(start, end), slice(0, before + end)) for start, end in zip(starts, ends, strict=True)]


@cache
def _causal_bias(start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return the bias [end − start, end] of the queries from `start` to `end`."""
    positions = torch.arange(end)
    return additive(positions[start:, None] >= positions[None, :], dtype)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where the mask is True and −inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _cu_seqlens(documents_BT: Tensor) -> Tensor:
    """Return the cumulative lengths of the documents over the flattened batch; each row begins a new document."""
    starts = torch.ones_like(documents_BT, dtype=torch.bool)
    starts[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    first = starts.flatten().nonzero().flatten()
    return torch.cat([first, first.new_tensor([documents_BT.numel()])]).to(torch.int32)


def _varlen(q: Tensor, k: Tensor, v: Tensor, bound: Bound, grouped: bool) -> Tensor:
    B, H, T, K = q.shape
    if not grouped:
        k, v = repeat_kv(q, k, v)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    assert bound.cu_seqlens is not None
    out = varlen_attention(q, k, v, bound.cu_seqlens, bound.max_seqlen, grouped, bound.cu_queries)
    return out.view(B, T, H, K).transpose(1, 2)


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, **options: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = flex_attention
    if q.is_cuda and not torch.compiler.is_compiling():
        # without compilation flex_attention computes the whole matrix of scores
        run = _COMPILED_FLEX.setdefault("flex", torch.compile(flex_attention, dynamic=False))
    if q.is_cuda:
        # By default flex selects its decoding kernel for short queries, and fails where that kernel lacks a feature.
        options["kernel_options"] = {"BACKEND": "TRITON"}
    return run(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1], **options)


def _block_mask(
    spec: MaskSpec,
    length: int,
    documents_BT: Tensor | None,
    device: str,
    keys_from: int = 0,
    queries_T: Tensor | None = None,
) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    tables = spec.tables(device) if spec.blocks else None  # made outside `allowed`, which flex compiles

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query if queries_T is None else queries_T[query]
        if tables is not None:
            return sees_block(*tables, query, key + keys_from)
        same = documents_BT[batch, query] == documents_BT[batch, key] if documents_BT is not None else None
        return spec.allows(query, key, same)

    batch = documents_BT.shape[0] if spec.documents and documents_BT is not None else None
    queries = length if queries_T is None else len(queries_T)
    return create_block_mask(allowed, batch, None, queries, length - keys_from, device=device)


def _split(q: Tensor, k: Tensor, v: Tensor, own_blocks: Sequence[tuple[int, int]], bound: Bound) -> Tensor:
    """Compute block diffusion's attention in two parts: all queries over clean keys, noisy ones over their own block.

    A noisy position sees no noisy positions but those of its own block, so that the second part needs no mask and has
    few scores.
    """
    start = sum(count * size for count, size in own_blocks)
    clean_out, lse = _over_clean_keys(q, k[:, :, start:], v[:, :, start:], bound)
    k, v = repeat_kv(q, k, v)
    joined, start = [], 0
    for count, size in own_blocks:
        end = start + count * size
        each = (x[:, :, start:end].unflatten(2, (count, size)) for x in (q, k, v, clean_out, lse))
        out: Tensor = _OwnBlock.apply(*each)
        joined.append(out.flatten(2, 3))
        start = end
    return torch.cat((*joined, clean_out[:, :, start:].to(q.dtype)), 2)


def _over_clean_keys(q: Tensor, k: Tensor, v: Tensor, bound: Bound) -> tuple[Tensor, Tensor]:
    """Return the attention over the clean keys and the log-sum-exp of the scores.

    For a query that sees none of them, these are zero and −inf (or close to it).
    """
    if bound.block_mask is not None:
        from torch.nn.attention.flex_attention import AuxRequest

        out, aux = _flex(q, k, v, bound.block_mask, return_aux=AuxRequest(lse=True))
        return out, aux.lse
    assert bound.dense is not None
    k, v = repeat_kv(q, k, v)
    scores = _scores(q, k).masked_fill(~bound.dense, float("-inf"))
    # clamped, because −inf − (−inf) is NaN
    highest = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    terms = (scores - highest).exp()
    total = terms.sum(-1, keepdim=True).clamp_min(1.0)  # the largest term is 1; a smaller sum means that no key is seen
    return terms @ v.float() / total, (highest + total.log())[..., 0]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q.float() @ k.float().mT / math.sqrt(q.shape[-1])


class _OwnBlock(torch.autograd.Function):
    """Attention within blocks [B, H, N/S, S, K], merged with the attention of the same queries over other keys.

    The softmax over all keys is the mean of the two softmaxes, weighted by their shares of the sum of exponentials.
    Everything is in float32; the backward computes the scores again.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, other, other_lse)
        _, own, share = _OwnBlock.parts(q, k, v, other_lse)
        return torch.lerp(own, other.float(), share).to(q.dtype)

    @staticmethod
    def parts(q: Tensor, k: Tensor, v: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's attention weights, its attention, and the other keys' share of the whole sum."""
        scores = _scores(q, k)
        weights = scores.softmax(-1)
        share = (other_lse - scores.logsumexp(-1)).sigmoid()
        return weights, weights @ v.float(), share[..., None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, other, other_lse = ctx.saved_tensors
        weights, own, share = _OwnBlock.parts(q, k, v, other_lse)
        g = grad.float()
        g_own = g * (1.0 - share)
        # the gradient of the other keys' log-sum-exp; that of the block's own is its negative
        g_lse = ((g_own * (other.float() - own)).sum(-1, keepdim=True)) * share
        g_weights = g_own @ v.float().mT
        g_scores = weights * (g_weights - (g_own * own).sum(-1, keepdim=True) - g_lse) / math.sqrt(q.shape[-1])
        g_q, g_k, g_v = g_scores @ k.float(), g_scores.mT @ q.float(), weights.mT @ g_own
        return g_q.to(q.dtype), g_k.to(k.dtype), g_v.to(v.dtype), (g * share).to(other.dtype), g_lse[..., 0]


# ----------------------------------------------------------------------------------------------------
# The selection of a back-end: the one asked for, or the fastest at the run's own shape.


_FUSED_CPU = "torch's fused CPU kernel"
_MOST_POSITIONS = 2048  # by matmuls on a CPU: beyond, the attention weights kept for the backward take too much memory


@dataclass(frozen=True)
class Selection:
    """The selected back-end, and why."""

    backend: str
    reason: str


def part_candidates(
    spec: MaskSpec, device: str, dtype: torch.dtype, head_dim: int, context_backend: str
) -> dict[str, str]:
    """Return the same for rows that are split over ranks."""
    able = candidates(spec, device, dtype, head_dim)
    if context_backend == RING:
        wrong = "" if device == "cuda" else "needs a GPU: torch's ring attention has no CPU kernel"
        wrong = wrong or ("" if spec.causal and not (spec.documents or spec.blocks) else "has no mask but a causal one")
        kernels = ("flash", "cudnn", "efficient")
        return {name: wrong or why or ("" if name in kernels else "has no ring") for name, why in able.items()}
    able["split"] = able["split"] or "needs the own block of a query on its rank"
    able["cudnn"] = able["cudnn"] or "aligns the first query with the first key"
    if device == "cuda" and (spec.blocks or not spec.causal):
        able["flash"] = able["flash"] or "takes causal masks only"
    return able


def candidates(spec: MaskSpec, device: str, dtype: torch.dtype, head_dim: int) -> dict[str, str]:
    """Return for every back-end why it cannot run, or an empty string if it can."""
    unsplit = "" if spec.noisy and spec.clean else "needs a noisy and a clean copy"
    if device == "cpu":
        gpu = "needs a GPU"
        flex = "has no backward on a CPU"
        # with head_dim 2, torch's CPU kernel misreads the memory layout of rotated queries and keys
        pairs = "" if head_dim > 2 else "needs head_dim above 2"
        return {
            "cudnn": gpu,
            "flash": pairs,
            "efficient": gpu,
            "flex": flex,
            "split": unsplit,
            "matmul": "",
            "dense": "",
        }
    if device == "mps":  # torch has one kernel of its own there, which cannot be selected; the reference always works
        nvidia = dict.fromkeys(("cudnn", "flash", "efficient", "flex", "split"), "needs an NVIDIA GPU")
        return {**nvidia, "matmul": "is for CPUs", "dense": ""}
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
        "split": unsplit or power,  # its larger part runs in flex
        "matmul": "is for CPUs",
        "dense": "",
    }


def select(
    requested: str,
    spec: MaskSpec,
    *,
    device: str,
    dtype: torch.dtype,
    shape: Shape,
    context_backend: str | None = None,
) -> Selection:
    """Return the back-end asked for, or with `auto` the fastest at the run's own shape [B, H, T, K].

    On a GPU it is measured; on later starts the measurement is read from the cache. With a `context_backend` rows are
    split over ranks; few back-ends can do that, and the first of BACKENDS is taken without a measurement.
    """
    able = candidates(spec, device, dtype, shape[-1])
    if context_backend is not None:
        able = part_candidates(spec, device, dtype, shape[-1], context_backend)
        if not any(not why for why in able.values()):
            fix = "Use parallel.context_backend=gather."
            raise UserError(f"ring {next(iter(able.values()))}.", where="parallel.context_backend", fix=fix)
    if requested != "auto":
        if able[requested]:
            working = ", ".join(name for name, why in able.items() if not why)
            fix = f"Use model.attention=auto, or one of {working}."
            raise UserError(f"model.attention={requested} {able[requested]}.", where="model.attention", fix=fix)
        return Selection(requested, "as asked")
    if device == "cuda" and context_backend is not None:
        order = ("flash", "cudnn", "flex", "efficient", "dense")
        return Selection(next(name for name in order if not able[name]), "rows are split over ranks; not measured")
    if device == "cpu":
        if shape[2] <= _MOST_POSITIONS:
            return Selection("matmul", "faster than torch's fused CPU kernel up to 2,048 positions")
        return Selection("dense", f"flash: {why}") if (why := able["flash"]) else Selection("flash", _FUSED_CPU)
    if device == "mps":
        return Selection("dense", "the reference: redline has no faster one for MPS")
    able_here = [name for name in BACKENDS if name != "dense" and not able[name]]
    ranking = _recall_ranking(able_here, spec, dtype, shape) or _measure_ranking(able_here, spec, dtype, shape)
    failed = {**{name: why for name, why in able.items() if why}, **ranking.failed}
    if not ranking.ms and ranking.untimed:  # BACKENDS has the fastest first, as measured on an H200
        return Selection(ranking.untimed[0], f"runs, but {failed[ranking.untimed[0]]}")
    if not ranking.ms:
        return Selection("dense", "; ".join(f"{n}: {w}" for n, w in failed.items()))
    best = min(ranking.ms, key=ranking.ms.__getitem__)
    measured = ", ".join(f"{n} {t:.2f}" for n, t in sorted(ranking.ms.items(), key=lambda item: item[1]))
    # not worth a word: these are not expected to run
    expected = ("dense", "matmul") if spec.blocks else ("dense", "matmul", "split")
    failures = "".join(f"; {n}: {w}" for n, w in failed.items() if n not in expected)
    when = f", as measured on {ranking.date}" if ranking.date else ""
    return Selection(best, f"forward+backward ms at {'×'.join(map(str, shape))}{when}: {measured}{failures}")


@dataclass(frozen=True)
class Ranking:
    """The milliseconds of every back-end that ran, and the errors of those that did not."""

    ms: dict[str, float]
    failed: dict[str, str]
    date: str = ""  # of the measurement, if it comes from the cache
    untimed: tuple[str, ...] = ()  # back-ends that ran, but on a host too slow to time them


def _measure_ranking(names: list[str], spec: MaskSpec, dtype: torch.dtype, shape: Shape) -> Ranking:
    times, failed, untimed, cacheable = {}, {}, [], True
    for name in names:
        try:
            with ignore_warnings():
                times[name] = measure(name, spec, dtype=dtype, shape=shape)
        except Exception as error:  # kernels refuse shapes with all kinds of errors; the others can still be used
            failed[name] = str(error).splitlines()[0][:80] if str(error) else type(error).__name__
            # Later there may be enough memory, or a host that is not busy.
            cacheable &= not isinstance(error, torch.OutOfMemoryError | TimingError)
            if isinstance(error, TimingError):
                untimed.append(name)
    if times and cacheable:
        ms = {name: round(value, 4) for name, value in times.items()}
        store_measurement(ATTENTION, _ranking_key(spec, dtype, shape), {"ms": ms, "failed": failed})
    return Ranking(times, failed, untimed=tuple(untimed))


def _recall_ranking(names: list[str], spec: MaskSpec, dtype: torch.dtype, shape: Shape) -> Ranking | None:
    """Return what an earlier start measured on this machine, if it tried the same back-ends."""
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
    """Return the milliseconds of forward and backward at this shape, with documents of a quarter of a row."""
    B, H, T, K = shape
    # views of one merged projection, as in the model: strides matter to some kernels
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
