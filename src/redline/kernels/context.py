"""Context parallelism: a rank's part of each row, and the exchange of keys and values between the ranks of a row.

Every rank computes its own positions. For attention it gathers the keys and values of all positions, and in the
backward pass their gradients are summed back to the ranks that computed them. `Attention` in kernels/attention.py
computes with what is gathered here; the division of a row is `Split` in planning/context.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from redline.planning.context import Split

# ----------------------------------------------------------------------------------------------------
# The ranks that share a row.


@dataclass
class ContextGroup:
    """The ranks that share each row, seen from one of them. Bytes are those of whole tensors, as in `Traffic`."""

    rank: int
    size: int
    group: Any  # torch's process group
    backend: str = "gather"
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # marks this rank as waiting for the others
    gathered: int = 0
    scattered: int = 0
    _local_only: bool = False

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated along the first dimension."""
        whole = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        if self._local_only:
            return whole.view(self.size, *x.shape).copy_(x).flatten(0, 1)
        self.gathered += whole.nbytes
        with self.waiting():
            # older versions of torch have the second name only
            (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(whole, x, group=self.group)
        return whole

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum the tensors of all ranks; return this rank's share of the first dimension."""
        share = x.shape[0] // self.size
        if self._local_only:
            return x[self.rank * share : (self.rank + 1) * share].clone()
        self.scattered += x.nbytes
        part = x.new_empty(share, *x.shape[1:])
        with self.waiting():
            (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(part, x, group=self.group)
        return part

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum the tensors of all ranks, in place."""
        if not self._local_only:
            with self.waiting():
                dist.all_reduce(x, group=self.group)
        return x

    @contextmanager
    def local_only(self) -> Iterator[None]:
        """Exchange nothing: tensors have the sizes of a step, but every part of them is this rank's own.

        A dry run may run out of memory on one rank only, and the others would wait in a collective for ever.
        """
        self._local_only = True
        try:
            yield
        finally:
            self._local_only = False


def join_context(rank: int, world: int, size: int, backend: str, waiting: Any = nullcontext) -> ContextGroup:
    """Return the group of this rank. Groups are consecutive ranks, which a launcher puts on one node."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]  # on every rank
    return ContextGroup(rank % size, size, groups[rank // size], backend, waiting)


# ----------------------------------------------------------------------------------------------------
# A rank's part of the rows.


class Part:
    """The positions of a row that a rank computes, and the exchange with the ranks that compute the others."""

    def __init__(self, split: Split, group: ContextGroup, device: torch.device) -> None:
        self.split, self.group = split, group
        self.chunks = split.chunks(group.rank)
        self.columns = np.array(split.positions(group.rank), dtype=np.int64)
        ranked = np.concatenate([split.positions(rank) for rank in range(split.ranks)])
        self.positions_T = torch.from_numpy(self.columns).to(device)
        self._ranked_T = torch.from_numpy(ranked).to(device)  # positions in the order in which gathered tensors lie
        self._order_T = torch.from_numpy(np.argsort(ranked)).to(device)  # the inverse

    @property
    def length(self) -> int:
        """The positions of a whole row."""
        return self.split.length

    @property
    def share(self) -> int:
        """The positions that this rank computes."""
        return self.split.share

    @cached_property
    def _place(self) -> np.ndarray:
        """For each position of a row, its place in this rank's part, or −1."""
        place = np.full(self.length, -1, dtype=np.int64)
        place[self.columns] = np.arange(self.share)
        return place

    def scored(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of these positions of the flattened batch are this rank's, and where its own batch has them."""
        row, column = np.divmod(positions, self.length)
        mine = np.flatnonzero(self._place[column] >= 0)
        return mine, row[mine] * self.share + self._place[column[mine]]

    def whole(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all positions of the rows, in order, from those of this rank [B, H, T, K]."""
        keys, values = _Gather.apply(k, v, self)
        return keys, values

    def exclude_from_compilation(self) -> None:
        """Let torch.compile break its graphs at the exchange: it would compile anew for each count of bytes."""
        for name in ("whole", "ring"):
            setattr(self, name, torch.compiler.disable(getattr(self, name)))

    def ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention by torch's ring: keys and values pass from rank to rank and are never gathered."""
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor.experimental._context_parallel._attention import _enable_cp_dtensor_dispatcher

        _enable_cp_dtensor_dispatcher()
        shards = [DTensor.from_local(x.contiguous(), self._mesh, [Shard(2)], run_check=False) for x in (q, k, v)]
        # torch pairs the first and the last chunks of a row as `Split` does, so no position has to move.
        out = F.scaled_dot_product_attention(shards[0], shards[1], shards[2], is_causal=True)
        assert isinstance(out, DTensor)
        return out.to_local()

    @cached_property
    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group.group, self.positions_T.device.type)


class _Gather(torch.autograd.Function):
    """Keys and values of this rank → of the whole rows, in one message; their gradients → summed, those of this rank.

    Messages hold positions first, so that the ranks' parts lie one after another in memory.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        ctx.part = part
        whole = part.group.all_gather(_pack(k, v))
        # One pass puts the positions in order and the rows first, as kernels for documents of any length want them.
        rows = whole.permute(1, 2, 0, 3, 4).index_select(2, part._order_T)  # [2, B, T, H, K]
        return rows[0].transpose(1, 2), rows[1].transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, g_k: Tensor, g_v: Tensor) -> Any:
        part: Part = ctx.part
        own = part.group.reduce_scatter(_pack(g_k, g_v)[part._ranked_T])
        return own[:, 0].permute(1, 2, 0, 3), own[:, 1].permute(1, 2, 0, 3), None


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Return both as one tensor [T, 2, B, H, K]."""
    B, H, T, K = k.shape
    both = k.new_empty(T, 2, B, H, K)
    both[:, 0].copy_(k.permute(2, 0, 1, 3))
    both[:, 1].copy_(v.permute(2, 0, 1, 3))
    return both


# ----------------------------------------------------------------------------------------------------
# Tables for kernels that take documents of any length.


def varlen_tables(starts: np.ndarray, rows: int, length: int, chunk: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the cumulative lengths of queries and of keys for one chunk of each row.

    `starts` are the cumulative lengths of the documents over the flattened batch. These kernels align the last query
    of a document with its last key, so the document that reaches beyond the chunk is cut at the chunk's end. Keys
    before the chunk's documents or behind its end are documents without queries.
    """
    first, end = chunk
    cuts = np.arange(rows) * length + end
    keys = np.union1d(starts, cuts)
    row, column = np.divmod(keys, length)
    queries = row * (end - first) + np.clip(column - first, 0, end - first)
    return queries.astype(np.int32), keys.astype(np.int32)


def pad_tables(tables: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
    """Repeat the last entry of each table, which adds empty documents, up to `size` entries."""
    return [np.concatenate((table, np.full(size - len(table), table[-1], dtype=table.dtype))) for table in tables]
