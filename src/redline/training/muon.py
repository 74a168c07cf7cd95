"""Muon (kellerjordan.github.io/posts/muon) and NorMuon (arXiv 2510.05491), gated by a device flag.

`Muon` updates matrices that this process holds in full, `ShardedMuon` those of which each rank holds rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from redline.jobs.objective import ParamGroup
from redline.kernels.dispatch import op, triton_compiles_for
from redline.recipe.schema import Train
from redline.training.low_bit import Gate

if TYPE_CHECKING:
    from redline.training.parallel import FSDP

FIRST_MOMENTUM = 0.85  # at step 0 of a momentum warm-up

NORM_MARGIN = 1.01
# Coefficients (a, b, c) of Polar Express (arXiv 2505.16932), by the number of Newton-Schulz steps: odd quintic
# polynomials a·x + b·x³ + c·x⁵, each the best approximation of 1 on the interval that the steps before it leave.
# They were computed by the paper's method, a Remez exchange for each, for singular values between
# SMALLEST_SINGULAR_VALUE of the norm and the norm. No polynomial is fitted below 0.0241 of the end of its interval, and
# all but the last are scaled down by NORM_MARGIN to leave room for rounding in bf16.
# Smallest singular value, relative to the norm, that so many steps bring to within 1 ± 0.3, 1 ± 0.23 and 1 ± 0.15.
SMALLEST_SINGULAR_VALUE = {3: 1e-2, 4: 3e-3, 5: 1e-3}
Coefficients = tuple[tuple[float, float, float], ...]
POLAR_EXPRESS: dict[int, Coefficients] = {
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
_NORM_EPS = 1e-12  # added to norms
_MIN_SQUARE = 1e-30  # lower bound of squares before a division


@dataclass(frozen=True)
class _Matrix:
    """One matrix to orthogonalise: all rows of a parameter, or one of several matrices that are stored merged in it."""

    name: str
    parameter: nn.Parameter
    start: int
    rows: int

    def rows_of(self, tensor: Tensor | None) -> Tensor:
        """Return this matrix's rows of a tensor with the shape of the parameter."""
        assert tensor is not None
        return tensor.narrow(0, self.start, self.rows)


class Muon:
    """Update matrices with orthogonalised momentum. NorMuon also normalises the rows of the update.

    Matrices that are stored merged are orthogonalised one by one. Matrices of one shape are processed as one batch: a
    few large kernels instead of many small ones.
    """

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self.lr, self.weight_decay, self.cautious = train.muon_lr, train.weight_decay, train.cautious
        self.momentum, self.warmup, self.beta2 = train.muon_momentum, train.muon_momentum_warmup, train.muon_beta2
        self.ns_coefficients = POLAR_EXPRESS[train.muon_steps]
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
            self._descend([matrix.rows_of(matrix.parameter) for matrix in batch], update, scales, gate, factor, shape)

    def _update(self, shape: torch.Size, gate: Gate, beta: float) -> tuple[Tensor, Tensor | None]:
        """Return the update of all matrices of this shape, and NorMuon's factor for each of their rows."""
        divisor, bad = gate
        gradients = [matrix.rows_of(matrix.parameter.grad) for matrix in self.batches[shape]]
        total, squares = nesterov_(gradients, self.first[shape], divisor, bad, beta)
        update = orthogonalize(total, squares, self.ns_coefficients)
        return update, self._scales(shape, update, bad)

    def _descend(
        self, weights: list[Tensor], update: Tensor, scales: Tensor | None, gate: Gate, factor: float, shape: torch.Size
    ) -> None:
        """Apply the update to the weights of matrices of this shape (or, if sharded, to some rows of each)."""
        lr = self.lr * factor
        rate, decay = lr * max(1.0, shape[0] / shape[1]) ** 0.5, lr * self.weight_decay
        descend_(weights, update, scales, gate[1], rate=rate, decay=decay, cautious=self.cautious)

    def _scales(self, shape: torch.Size, update: Tensor, bad: Tensor) -> Tensor | None:
        """Return NorMuon's factor for each row, or None for Muon.

        Rows with a large second moment get smaller, and the matrix keeps its norm. The second moments need no bias
        correction: it would be the same for all rows, and restoring the norm cancels it.
        """
        if not self.second:
            return None
        second, squares = self.second[shape], torch.linalg.vector_norm(update, dim=-1, dtype=torch.float32).square()
        moved = second.lerp(squares / shape[1], 1.0 - self.beta2)
        second.copy_(torch.where(bad > 0, second, moved))
        scales = moved.clamp_min(_MIN_SQUARE).rsqrt()
        norm, scaled = squares.sum(-1, keepdim=True), (squares * scales.square()).sum(-1, keepdim=True)
        return scales * (norm / scaled.clamp_min(_MIN_SQUARE)).sqrt()

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
    """Return the momentum at a step: it rises linearly from FIRST_MOMENTUM during the warm-up."""
    if step >= warmup:
        return momentum
    return FIRST_MOMENTUM + (momentum - FIRST_MOMENTUM) * step / warmup


def orthogonalize(x_NRC: Tensor, squares_N: Tensor, ns_coefficients: Coefficients = POLAR_EXPRESS[5]) -> Tensor:
    """Return approximately U·Vᵀ of each matrix U·S·Vᵀ, given its squared norm.

    After five steps, singular values from 1e-3 of the norm upwards end within 1 ± 0.15. One step is
    x ← (a + b·G + c·G²)·x with the Gram matrix G of the smaller side. Written as c·(G + b/2c)² + (a − b²/4c), the
    polynomial takes two symmetric matmuls with an addition on the diagonal each, and x is only read by matmuls.
    """
    norm = squares_N.sqrt() * NORM_MARGIN + _NORM_EPS
    x = x_NRC * norm.reciprocal().to(x_NRC.dtype)[:, None, None]
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in ns_coefficients:
        shifted = gram(x, tall=tall, diagonal=b / (2 * c))
        polynomial = square(shifted, factor=c, diagonal=a - b * b / (4 * c))
        x = x @ polynomial if tall else polynomial @ x
    return x


# ----------------------------------------------------------------------------------------------------
# Muon with FSDP, where each rank holds rows of every matrix.
#
# Orthogonalising needs the full matrix. So every matrix has an owner: the owner receives the rows of the gradient from
# all ranks, keeps the momentum of the full matrix, and sends the rows of the update back. Owners are chosen so that all
# ranks have about the same amount of work. A step costs two all-to-all exchanges, and no work is done twice.


def first_row(rows: int, rank: int, size: int) -> int:
    """Return the first of `rows` that a rank holds. All ranks hold equally many, except the last ones."""
    return min(rows, rank * -(-rows // size))


def assign_owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the owner of each matrix: the largest first, each to the rank with the least work so far."""
    loads, owners = [0] * ranks, {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += size
    return owners


class ShardedMuon(Muon):
    """Muon for parameters of which each rank holds rows. `groups` has the full parameters (DTensors)."""

    def __init__(self, groups: Sequence[ParamGroup], train: Train, parallel: FSDP) -> None:
        self.parallel, ranks = parallel, parallel.ranks
        full = {name: p for group in groups for name, p in group.parameters.items()}
        self.shapes = {name: p.shape for name, p in full.items()}
        self.splits = {name: rows for group in groups for name, rows in group.splits.items()}
        self.owner = assign_owners({name: p.numel() for name, p in full.items()}, ranks.size)
        owned = [name for name in full if self.owner[name] == ranks.rank]
        device = next(iter(parallel.parameters().values())).device
        # Placeholders for the full matrices that this rank owns: they get a shape and a gradient, but no memory for
        # weights, whose rows stay on all ranks.
        self.placeholders = {n: nn.Parameter(torch.zeros(1, device=device).expand(self.shapes[n])) for n in owned}
        owned_groups = [
            replace(group, parameters={n: self.placeholders[n] for n in group.parameters if n in self.placeholders})
            for group in groups
        ]
        super().__init__(owned_groups, train)

    @torch.no_grad()
    def step(self, factor: float, gate: Gate, step: int, momentum: float | None = None) -> None:
        for name, gradient in self._gather_gradients().items():
            self.placeholders[name].grad = gradient
        updates = {name: torch.empty(p.shape, device=p.device) for name, p in self.placeholders.items()}
        beta = momentum_at(step, self.momentum, self.warmup) if momentum is None else momentum
        for shape, batch in self.batches.items():
            update, scales = self._update(shape, gate, beta)
            scaled = update.float() if scales is None else scales[..., None] * update.float()
            for matrix, matrix_update in zip(batch, scaled.unbind(), strict=True):
                matrix.rows_of(updates[matrix.name]).copy_(matrix_update)
        for placeholder in self.placeholders.values():
            placeholder.grad = None
        rows = self.parallel.parameters()
        for name, update in self._scatter_updates(updates).items():
            if name in rows:
                for shape, part in self._merged_matrices(name):
                    self._descend([rows[name][part]], update[part][None], None, gate, factor, shape)

    def _merged_matrices(self, name: str) -> Iterator[tuple[torch.Size, slice]]:
        """Yield the shape of each matrix in a parameter, and which of this rank's rows belong to it."""
        first, last = self._row_range(name, self.parallel.ranks.rank)
        start = 0
        for rows in self.splits[name]:
            begin, end = max(start, first), min(start + rows, last)
            if begin < end:
                yield torch.Size((rows, self.shapes[name][1])), slice(begin - first, end - first)
            start += rows

    def _row_range(self, name: str, rank: int) -> tuple[int, int]:
        rows, size = self.shapes[name][0], self.parallel.ranks.size
        return first_row(rows, rank, size), first_row(rows, rank + 1, size)

    def _shard_size(self, name: str, rank: int) -> int:
        """Return the number of values that a rank holds of a parameter."""
        first, last = self._row_range(name, rank)
        return (last - first) * self.shapes[name][1]

    def _owned_by(self, rank: int) -> list[str]:
        return [name for name in self.shapes if self.owner[name] == rank]

    def _gather_gradients(self) -> dict[str, Tensor]:
        """Return the full gradients of the matrices that this rank owns."""
        own, size, rows = self.parallel.ranks.rank, self.parallel.ranks.size, self.parallel.parameters()
        sent = [rows[n].grad for rank in range(size) for n in self._owned_by(rank) if n in rows]
        counts = [sum(self._shard_size(n, own) for n in self._owned_by(rank)) for rank in range(size)]
        received_counts = [sum(self._shard_size(n, rank) for n in self._owned_by(own)) for rank in range(size)]
        parts = self._all_to_all(sent, counts, received_counts)
        shards: dict[str, list[Tensor]] = {name: [] for name in self._owned_by(own)}
        for rank, part in enumerate(parts):
            pieces = part.split([self._shard_size(n, rank) for n in self._owned_by(own)])
            for name, piece in zip(self._owned_by(own), pieces, strict=True):
                shards[name].append(piece)
        return {name: torch.cat(pieces).view(self.shapes[name]) for name, pieces in shards.items()}

    def _scatter_updates(self, updates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Send the updates of the matrices that this rank owns; return this rank's rows of all updates."""
        own, size = self.parallel.ranks.rank, self.parallel.ranks.size
        sent = [updates[n][slice(*self._row_range(n, rank))] for rank in range(size) for n in self._owned_by(own)]
        counts = [sum(self._shard_size(n, rank) for n in self._owned_by(own)) for rank in range(size)]
        received_counts = [sum(self._shard_size(n, own) for n in self._owned_by(rank)) for rank in range(size)]
        rows = {}
        for rank, part in enumerate(self._all_to_all(sent, counts, received_counts)):
            pieces = part.split([self._shard_size(n, own) for n in self._owned_by(rank)])
            for name, piece in zip(self._owned_by(rank), pieces, strict=True):
                rows[name] = piece.view(-1, self.shapes[name][1])
        return rows

    def _all_to_all(
        self, tensors: Sequence[Tensor | None], counts: list[int], received_counts: list[int]
    ) -> list[Tensor]:
        """Send `counts` values to each rank; return the `received_counts` values from each."""
        device = next(iter(self.parallel.parameters().values())).device
        sent = torch.cat([torch.zeros(0, device=device), *(t.reshape(-1) for t in tensors if t is not None)])
        received = torch.empty(sum(received_counts), device=device)
        dist.all_to_all_single(received, sent, received_counts, counts)
        self.parallel.traffic.exchanged += sent.nbytes
        return list(received.split(received_counts))


# ----------------------------------------------------------------------------------------------------
# Muon's passes over gradients and weights, and the matrix products of its orthogonalisation.


def by_triton(device: torch.device) -> bool:
    """Return whether Triton serves Muon on this device. Before Ampere, GPUs have no bf16 units."""
    return triton_compiles_for(device, (8, 0))


# ----------------------------------------------------------------------------------------------------
# Before and after the orthogonalisation.


@op(triton="muon:nesterov_", uses_triton=lambda _, momentum_NRC, *__: by_triton(momentum_NRC.device))
def nesterov_(
    gradients: Sequence[Tensor], momentum_NRC: Tensor, divisor: Tensor, bad: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Move the momentum towards gradient/divisor. Return Nesterov's sum [N, R, C] (bf16 on a GPU) and its squared
    norms [N].
    """
    gradient = torch.stack(list(gradients)) / divisor
    moved = momentum_NRC.lerp(gradient, 1.0 - beta)
    momentum_NRC.copy_(torch.where(bad > 0, momentum_NRC, moved))
    total = gradient.lerp(moved, beta)
    squares = total.square().sum((-2, -1))
    return (total.bfloat16() if total.is_cuda else total), squares


@op(triton="muon:descend_", uses_triton=lambda _, update_NRC, *__, **___: by_triton(update_NRC.device))
def descend_(
    weights: Sequence[Tensor],
    update_NRC: Tensor,
    scales_NR: Tensor | None,
    bad: Tensor,
    *,
    rate: float,
    decay: float,
    cautious: bool,
) -> None:
    """Set weight ← weight·(1 − decay) − rate·scale·update. With `cautious`, decay only where weight and update have
    the same sign.
    """
    before, update = torch.stack(list(weights)), update_NRC.float()
    kept = torch.where(before * update >= 0, 1.0 - decay, 1.0) if cautious else 1.0 - decay
    update = update if scales_NR is None else scales_NR[..., None] * update
    after = torch.where(bad > 0, before, before * kept - rate * update)
    for weight, moved in zip(weights, after.unbind(), strict=True):
        weight.copy_(moved)


# ----------------------------------------------------------------------------------------------------
# Products with a symmetric result, of which Triton computes half of the tiles: X·Xᵀ or Xᵀ·X, and the square of a
# symmetric matrix, each plus a multiple of the identity. The Newton-Schulz polynomials are made of these.


def _in_bf16_on_a_gpu(x: Tensor, **_: Any) -> bool:
    # float32 goes to torch, which follows the user's setting for the precision of float32 matmuls
    return x.dtype == torch.bfloat16 and by_triton(x.device)


@op(triton="muon:gram", uses_triton=_in_bf16_on_a_gpu)
def gram(x_NRC: Tensor, *, tall: bool, diagonal: float) -> Tensor:
    """Return X·Xᵀ + diagonal·I [N, R, R] of each matrix, or with `tall` Xᵀ·X + diagonal·I [N, C, C]."""
    product = x_NRC.mT @ x_NRC if tall else x_NRC @ x_NRC.mT
    product.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return product


@op(triton="muon:square", uses_triton=_in_bf16_on_a_gpu)
def square(g_NKK: Tensor, *, factor: float, diagonal: float) -> Tensor:
    """Return factor·G² + diagonal·I of each symmetric matrix."""
    product = torch.empty_like(g_NKK).baddbmm_(g_NKK, g_NKK, beta=0, alpha=factor)
    product.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return product
