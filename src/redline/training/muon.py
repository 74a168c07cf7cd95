"""Muon (kellerjordan.github.io/posts/muon) and NorMuon (arXiv 2510.05491), gated by a device flag like all the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from redline.jobs.objective import ParamGroup
from redline.kernels.muon import descend_, gram, nesterov_, square
from redline.recipe.schema import Train
from redline.training.low_bit import Gate

if TYPE_CHECKING:
    from redline.training.parallel import FSDP


FIRST_MOMENTUM = 0.85  # where a warm-up of the momentum begins

SAFETY = 1.01
# Polar Express (arXiv 2505.16932): odd quintics a·x + b·x³ + c·x⁵, each the best towards 1 on the interval that those
# before it leave. Computed by the paper's method: a Remez exchange for each, for singular values from REACHED of the
# norm up to all of it; none is fitted below 0.0241 of its interval's end; all but the last shrunk by SAFETY, for bf16.
REACHED = {3: 1e-2, 4: 3e-3, 5: 1e-3}  # by their number: what they bring to within 1 ± 0.3, 0.23 and 0.15
Quintics = tuple[tuple[float, float, float], ...]
POLAR_EXPRESS: dict[int, Quintics] = {
    3: (
        (7.910064394, -22.07722893, 15.86774275),
        (3.607357616, -2.646677719, 0.5110407529),
        (2.671285614, -1.985331095, 0.4535242554),
    ),
    4: (
        (8.13751621, -22.71205383, 16.32401551),
        (3.965130214, -2.836197955, 0.5224222592),
        (3.488704173, -2.562188406, 0.5016272721),
        (2.511563125, -1.852478799, 0.4388359849),
    ),
    5: (
        (8.204949302, -22.90026163, 16.4592876),
        (4.066293239, -2.860946323, 0.5183543801),
        (3.909510766, -2.82315236, 0.524991495),
        (3.285615881, -2.415339854, 0.4852982729),
        (2.300697441, -1.668944738, 0.4188117164),
    ),
}
_SMALLEST = 1e-12  # beside smaller norms
_TINY = 1e-30  # in place of smaller squares


@dataclass(frozen=True)
class _Matrix:
    """Rows of a parameter: all of them, or one of the matrices that it holds merged."""

    name: str
    parameter: nn.Parameter
    start: int
    rows: int

    def of(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return tensor.narrow(0, self.start, self.rows)


class Muon:
    """Momentum, orthogonalised; NorMuon evens out the rows of what comes out.

    Matrices that are stored merged are orthogonalised one by one. All of one shape are kept and worked on as one
    batch: a few large kernels instead of many small ones.
    """

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self.lr, self.weight_decay, self.cautious = train.muon_lr, train.weight_decay, train.cautious
        self.momentum, self.warmup, self.beta2 = train.muon_momentum, train.muon_momentum_warmup, train.muon_beta2
        self.quintics = POLAR_EXPRESS[train.muon_steps]
        self.batches: dict[torch.Size, list[_Matrix]] = defaultdict(list)
        for group in groups:
            for name, parameter in group.parameters.items():
                start = 0
                for rows in group.splits[name]:
                    shape = torch.Size((rows, parameter.shape[1]))
                    self.batches[shape].append(_Matrix(name, parameter, start, rows))
                    start += rows
        self.first = {shape: _zeros(batch, *shape) for shape, batch in self.batches.items()}
        normed = train.optimizer == "normuon"
        self.second = {shape: _zeros(batch, shape[0]) for shape, batch in self.batches.items()} if normed else {}

    @torch.no_grad()
    def step(self, factor: float, gate: Gate, step: int, momentum: float | None = None) -> None:
        beta = momentum_at(step, self.momentum, self.warmup) if momentum is None else momentum
        for shape, batch in self.batches.items():
            update, scales = self._update(shape, gate, beta)
            self._descend([matrix.of(matrix.parameter) for matrix in batch], update, scales, gate, factor, shape)

    def _update(self, shape: torch.Size, gate: Gate, beta: float) -> tuple[Tensor, Tensor | None]:
        """Of all matrices of this shape, with a factor for each of their rows."""
        divisor, bad = gate
        gradients = [matrix.of(matrix.parameter.grad) for matrix in self.batches[shape]]
        total, squares = nesterov_(gradients, self.first[shape], divisor, bad, beta)
        update = orthogonalize(total, squares, self.quintics)
        return update, self._scales(shape, update, bad)

    def _descend(
        self, weights: list[Tensor], update: Tensor, scales: Tensor | None, gate: Gate, factor: float, shape: torch.Size
    ) -> None:
        """Weights of matrices of this shape, or the same rows of each."""
        lr = self.lr * factor
        rate, decay = lr * max(1.0, shape[0] / shape[1]) ** 0.5, lr * self.weight_decay
        descend_(weights, update, scales, gate[1], rate=rate, decay=decay, cautious=self.cautious)

    def _scales(self, shape: torch.Size, update: Tensor, bad: Tensor) -> Tensor | None:
        """NorMuon's factor of each row: rows that were long get shorter, and the whole keeps its norm.

        The moments need no correction for beginning at zero: it would be the same for all rows, and fall out.
        """
        if not self.second:
            return None
        second, squares = self.second[shape], torch.linalg.vector_norm(update, dim=-1, dtype=torch.float32).square()
        moved = second.lerp(squares / shape[1], 1.0 - self.beta2)
        second.copy_(torch.where(bad > 0, second, moved))
        scales = moved.clamp_min(_TINY).rsqrt()
        norm, scaled = squares.sum(-1, keepdim=True), (squares * scales.square()).sum(-1, keepdim=True)
        return scales * (norm / scaled.clamp_min(_TINY)).sqrt()

    def tensors(self) -> dict[str, Tensor]:
        moments = {"momentum": self.first, "second_moment": self.second}
        return {
            f"{matrix.name}.{moment}.{matrix.start}": stacks[shape][i]
            for moment, stacks in moments.items()
            for shape in stacks
            for i, matrix in enumerate(self.batches[shape])
        }


def _zeros(batch: list[_Matrix], *shape: int) -> Tensor:
    return torch.zeros(len(batch), *shape, device=batch[0].parameter.device)


def momentum_at(step: int, momentum: float, warmup: int) -> float:
    """In a warm-up it rises on a line from FIRST_MOMENTUM, which step 0 has."""
    if step >= warmup:
        return momentum
    return FIRST_MOMENTUM + (momentum - FIRST_MOMENTUM) * step / warmup


def orthogonalize(x_NRC: Tensor, squares_N: Tensor, quintics: Quintics = POLAR_EXPRESS[5]) -> Tensor:
    """U·Vᵀ of each matrix with that squared norm, roughly: by five, singular values from 1e-3 of it end in 1 ± 0.15.

    One quintic is x ← (a + b·G + c·G²)·x with the Gram matrix G of the smaller side. As c·(G + b/2c)² + (a − b²/4c) it
    takes two symmetric matmuls, with a sum on the diagonal each, and the large x is touched by matmuls alone.
    """
    norm = squares_N.sqrt() * SAFETY + _SMALLEST
    x = x_NRC * norm.reciprocal().to(x_NRC.dtype)[:, None, None]
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in quintics:
        shifted = gram(x, tall=tall, diagonal=b / (2 * c))
        polynomial = square(shifted, factor=c, diagonal=a - b * b / (4 * c))
        x = x @ polynomial if tall else polynomial @ x
    return x


# ----------------------------------------------------------------------------------------------------
# Muon where each rank holds rows of every matrix.
#
# Orthogonalising takes a whole matrix. So every matrix has an owner, which gets the rows of its gradient from all
# ranks, keeps its momentum whole, and sends the rows of the update back. Owners are chosen so that all have about as
# much to do; a step costs two exchanges, and no rank computes what another does.


def first_row(rows: int, rank: int, size: int) -> int:
    """Of a rank's share of so many rows: shares are equal, but for the last ones."""
    return min(rows, rank * -(-rows // size))


def assign_owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The largest first, each to the rank that has least so far."""
    loads, found = [0] * ranks, {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        found[name] = loads.index(min(loads))
        loads[found[name]] += size
    return found


class ShardedMuon(Muon):
    """`groups` are of whole matrices, as the ranks hold them together."""

    def __init__(self, groups: Sequence[ParamGroup], train: Train, parallel: FSDP) -> None:
        self.parallel, ranks = parallel, parallel.ranks
        whole = {name: p for group in groups for name, p in group.parameters.items()}
        self.shapes = {name: p.shape for name, p in whole.items()}
        self.splits = {name: rows for group in groups for name, rows in group.splits.items()}
        self.owner = assign_owners({name: p.numel() for name, p in whole.items()}, ranks.size)
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
