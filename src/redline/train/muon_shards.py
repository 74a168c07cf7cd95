"""Muon where each rank holds rows of every matrix.

Orthogonalising takes a whole matrix. So every matrix has an owner, which gets the rows of its gradient from all ranks,
keeps its momentum whole, and sends the rows of the update back. Owners are chosen so that all have about as much to do;
a step costs two exchanges, and no rank computes what another does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from redline.objectives.base import ParamGroup
from redline.recipe.schema import Train
from redline.train.low_bit import Gate
from redline.train.muon import Muon, momentum_at

if TYPE_CHECKING:
    from redline.train.shards import Shards


def first_row(rows: int, rank: int, size: int) -> int:
    """Of a rank's share of so many rows: shares are equal, but for the last ones."""
    return min(rows, rank * -(-rows // size))


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The largest first, each to the rank that has least so far."""
    loads, found = [0] * ranks, {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        found[name] = loads.index(min(loads))
        loads[found[name]] += size
    return found


class ShardedMuon(Muon):
    """`groups` are of whole matrices, as the ranks hold them together."""

    def __init__(self, groups: Sequence[ParamGroup], train: Train, parallel: Shards) -> None:
        self.parallel, ranks = parallel, parallel.ranks
        whole = {name: p for group in groups for name, p in group.parameters.items()}
        self.shapes = {name: p.shape for name, p in whole.items()}
        self.splits = {name: rows for group in groups for name, rows in group.splits.items()}
        self.owner = owners({name: p.numel() for name, p in whole.items()}, ranks.size)
        mine = [name for name in whole if self.owner[name] == ranks.rank]
        device = next(iter(parallel.parameters().values())).device
        # they have a shape and a gradient, and no values: those are everyone's rows
        self.stands = {n: nn.Parameter(torch.zeros(1, device=device).expand(self.shapes[n])) for n in mine}
        owned = [
            replace(group, parameters={n: self.stands[n] for n in group.parameters if n in self.stands})
            for group in groups
        ]
        super().__init__(owned, train)

    @torch.no_grad()
    def step(self, factor: float, gate: Gate, step: int, momentum: float | None = None) -> None:
        for name, gradient in self._to_owners().items():
            self.stands[name].grad = gradient
        updates = {name: torch.empty(stand.shape, device=stand.device) for name, stand in self.stands.items()}
        beta = momentum_at(step, self.momentum, self.warmup) if momentum is None else momentum
        for shape, batch in self.batches.items():
            update, scales = self._update(shape, gate, beta)
            scaled = update.float() if scales is None else scales[..., None] * update.float()
            for matrix, one in zip(batch, scaled.unbind(), strict=True):
                matrix.of(updates[matrix.name]).copy_(one)
        for stand in self.stands.values():
            stand.grad = None
        rows = self.parallel.parameters()
        for name, update in self._to_rows(updates).items():
            if name in rows:
                for shape, part in self._parts(name):
                    self._descend([rows[name][part]], update[part][None], None, gate, factor, shape)

    def _parts(self, name: str) -> Iterator[tuple[torch.Size, slice]]:
        """Which of this rank's rows of a parameter belong to which of the matrices merged in it."""
        first, last = self._range(name, self.parallel.ranks.rank)
        start = 0
        for rows in self.splits[name]:
            begin, end = max(start, first), min(start + rows, last)
            if begin < end:
                yield torch.Size((rows, self.shapes[name][1])), slice(begin - first, end - first)
            start += rows

    def _range(self, name: str, rank: int) -> tuple[int, int]:
        rows, size = self.shapes[name][0], self.parallel.ranks.size
        return first_row(rows, rank, size), first_row(rows, rank + 1, size)

    def _rows_of(self, name: str, rank: int) -> int:
        first, last = self._range(name, rank)
        return (last - first) * self.shapes[name][1]

    def _of(self, rank: int) -> list[str]:
        return [name for name in self.shapes if self.owner[name] == rank]

    def _to_owners(self) -> dict[str, Tensor]:
        """Whole gradients of the matrices that are this rank's."""
        own, size, rows = self.parallel.ranks.rank, self.parallel.ranks.size, self.parallel.parameters()
        sent = [rows[n].grad for rank in range(size) for n in self._of(rank) if n in rows]
        counts = [sum(self._rows_of(n, own) for n in self._of(rank)) for rank in range(size)]
        coming = [sum(self._rows_of(n, rank) for n in self._of(own)) for rank in range(size)]
        parts = self._exchange(sent, counts, coming)
        found: dict[str, list[Tensor]] = {name: [] for name in self._of(own)}
        for rank, part in enumerate(parts):
            pieces = part.split([self._rows_of(n, rank) for n in self._of(own)])
            for name, piece in zip(self._of(own), pieces, strict=True):
                found[name].append(piece)
        return {name: torch.cat(pieces).view(self.shapes[name]) for name, pieces in found.items()}

    def _to_rows(self, updates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's rows of all updates."""
        own, size = self.parallel.ranks.rank, self.parallel.ranks.size
        sent = [updates[n][slice(*self._range(n, rank))] for rank in range(size) for n in self._of(own)]
        counts = [sum(self._rows_of(n, rank) for n in self._of(own)) for rank in range(size)]
        coming = [sum(self._rows_of(n, own) for n in self._of(rank)) for rank in range(size)]
        found = {}
        for rank, part in enumerate(self._exchange(sent, counts, coming)):
            pieces = part.split([self._rows_of(n, own) for n in self._of(rank)])
            for name, piece in zip(self._of(rank), pieces, strict=True):
                found[name] = piece.view(-1, self.shapes[name][1])
        return found

    def _exchange(self, tensors: Sequence[Tensor | None], counts: list[int], coming: list[int]) -> list[Tensor]:
        """So many values to each rank, and so many from each."""
        device = next(iter(self.parallel.parameters().values())).device
        sent = torch.cat([torch.zeros(0, device=device), *(t.reshape(-1) for t in tensors if t is not None)])
        received = torch.empty(sum(coming), device=device)
        dist.all_to_all_single(received, sent, coming, counts)
        self.parallel.traffic.exchanged += sent.nbytes
        return list(received.split(coming))
