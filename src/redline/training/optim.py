"""The optimizers (AdamW, 8-bit AdamW, Muon and NorMuon), and the moving average of the weights.

Every write is gated by a device flag: a bad step (loss or gradient not finite) changes nothing, and the host does not
have to wait for the GPU to find out.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from redline.errors import UserError, install_hint
from redline.jobs.objective import ParamGroup
from redline.kernels.muon import descend_, gram, nesterov_, square
from redline.planning.memory import LOW_BIT, LOW_BIT_BLOCK, LOW_BIT_FROM, MUON
from redline.recipe.schema import Train

if TYPE_CHECKING:
    from redline.training.fsdp import FSDP


# ----------------------------------------------------------------------------------------------------
# 8-bit AdamW with the kernels of bitsandbytes (arXiv 2110.02861): 2 bytes of moments per parameter instead of 8.


Gate = tuple[Tensor, Tensor]  # (the divisor of the gradients, 1.0 if the step must change nothing), on the device

# The step count passed to the kernel: so large that its bias correction is 1. `Adam8bit` applies its own.
_MANY_STEPS = 1 << 30
_MAX_BATCH = 1 << 26  # values that are updated by one launch
_PAGED_FROM = 100_000  # values; as in bitsandbytes, smaller states stay in ordinary memory


def is_large(group: ParamGroup, name: str) -> bool:
    """Return whether the moments are worth quantising. Small tensors save little and need the precision most.

    What counts is the size of the whole parameter, of which this rank may hold a few rows.
    """
    parameter, rows = group.parameters[name], sum(group.splits[name])
    return rows * (parameter.numel() // parameter.shape[0]) >= LOW_BIT_FROM


class Adam8bit:
    """The blockwise 8-bit update of bitsandbytes, gated by a device flag.

    The kernel takes its step count from the host, which does not know yet whether the step is bad. So the kernel runs
    on copies: of the quantised moments, and of a zero weight, which then holds the bare update −lr·m/(√v + eps). The
    device flag then decides whether the copies are used. The bias correction √(1−β₂ᵗ)/(1−β₁ᵗ) comes from a step count
    on the device that is gated too. (Compared with textbook AdamW, eps is larger by 1/√(1−β₂ᵗ), which is soon 1.)

    Small parameters are concatenated and updated together: with one launch for each of the hundreds of matrices of an
    adapter, launching would take longer than the work.
    """

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self._bnb = _bitsandbytes()
        self.betas, self.eps = train.betas, train.eps
        by_options: dict[tuple[float, float, torch.dtype], dict[str, nn.Parameter]] = {}
        for group in groups:
            rate, decay = train.role_lr(group.role), 0.0 if group.role == "scalar" else train.weight_decay
            for name, parameter in group.parameters.items():
                by_options.setdefault((rate, decay, parameter.dtype), {})[name] = parameter
        device = next(parameter.device for group in groups for parameter in group.parameters.values())
        paged = train.optimizer.startswith("paged") and device.type == "cuda"
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.maps = [self._bnb.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]
        self.batches = [
            _ParameterBatch(part, rate, decay, self._bnb, paged)
            for (rate, decay, _), named in by_options.items()
            for part in _split(named)
        ]

    @torch.no_grad()
    def step(self, factor: float, gate: Gate, momentum: float | None = None) -> None:
        divisor, bad = gate
        stop = bad > 0
        torch.where(stop, self.count, self.count + 1, out=self.count)
        beta1, beta2 = self.betas[0] if momentum is None else momentum, self.betas[1]
        correction = ((1 - beta2**self.count).sqrt() / (1 - beta1**self.count)).float()
        for batch in self.batches:
            lr, values = batch.rate * factor, batch.concatenate(batch.parameters)
            update, codes, scales = torch.zeros_like(values), batch.codes.clone(), batch.scales.clone()
            self._update(batch.concatenate(batch.gradients()) / divisor, update, codes, scales, lr, (beta1, beta2))
            updated = torch.addcmul(values * (1.0 - lr * batch.decay), update, correction)
            batch.write(torch.where(stop, values, updated, out=values))
            torch.where(stop, batch.codes, codes, out=batch.codes)
            torch.where(stop, batch.scales, scales, out=batch.scales)

    def _update(
        self, gradient: Tensor, update: Tensor, codes: Tensor, scales: Tensor, lr: float, betas: tuple[float, float]
    ) -> None:
        self._bnb.optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            update,
            *codes,
            *betas,
            0.0,  # beta3 and alpha belong to AdEMAMix
            0.0,
            self.eps,
            _MANY_STEPS,
            lr,
            *self.maps,
            *scales,
        )

    def tensors(self) -> dict[str, Tensor]:
        moments = {key: tensor for batch in self.batches for key, tensor in batch.tensors().items()}
        return {"adam_8bit.step": self.count, **moments}


def _split(named: dict[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """Yield batches of at most _MAX_BATCH values, in order. `step` copies a batch, so its size costs memory."""
    part: dict[str, nn.Parameter] = {}
    for name, parameter in named.items():
        if part and sum(p.numel() for p in part.values()) + parameter.numel() > _MAX_BATCH:
            yield part
            part = {}
        part[name] = parameter
    if part:
        yield part


class _ParameterBatch:
    """Parameters that are updated together, and their quantised moments.

    The parameters are concatenated, each padded to blocks of 256 values. Both moments are stored as one byte per value
    (`codes`) and one scale per block (`scales`).
    """

    def __init__(self, named: dict[str, nn.Parameter], rate: float, decay: float, bnb: Any, paged: bool) -> None:
        self.names: list[str] = list(named)
        self.parameters: list[Tensor] = list(named.values())
        self.rate, self.decay = rate, decay
        device = self.parameters[0].device
        blocks = [-(-parameter.numel() // LOW_BIT_BLOCK) for parameter in self.parameters]
        self.first_block = [0, *accumulate(blocks)]  # of each parameter, and the number of blocks
        self.padding = [
            torch.zeros(count * LOW_BIT_BLOCK - parameter.numel(), dtype=parameter.dtype, device=device)
            for count, parameter in zip(blocks, self.parameters, strict=True)
        ]
        shape = (2, self.first_block[-1] * LOW_BIT_BLOCK)
        self.pages: Tensor | None = None
        if paged and shape[1] >= _PAGED_FROM:
            self.pages = bnb.get_paged(*shape, dtype=torch.uint8, device=device)
            self.codes = _as_cuda_tensor(self.pages, device).zero_()
        else:
            self.codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(2, self.first_block[-1], device=device)

    def gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.parameters]
        assert all(gradient is not None for gradient in gradients)
        return [gradient for gradient in gradients if gradient is not None]

    def concatenate(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return one flat padded tensor: a copy, unless there is a single tensor that needs no padding."""
        parts = (part for tensor, pad in zip(tensors, self.padding, strict=True) for part in (tensor.flatten(), pad))
        filled = [part for part in parts if len(part)]
        return filled[0] if len(filled) == 1 else torch.cat(filled)

    def write(self, values: Tensor) -> None:
        """Copy concatenated values back into the parameters."""
        torch._foreach_copy_(self.parameters, [self._view(index, values) for index in range(len(self.parameters))])

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments of each parameter by its name, as views."""
        views = {}
        for index, name in enumerate(self.names):
            blocks = slice(self.first_block[index], self.first_block[index + 1])
            for row, key in enumerate(("exp_avg", "exp_avg_sq")):
                views[f"{name}.{key}_8bit"] = self._view(index, self.codes[row])
                views[f"{name}.{key}_scale"] = self.scales[row, blocks]
        return views

    def _view(self, index: int, flat: Tensor) -> Tensor:
        """Return the part of a concatenated tensor that belongs to one parameter, in its shape."""
        parameter, begin = self.parameters[index], self.first_block[index] * LOW_BIT_BLOCK
        return flat[begin : begin + parameter.numel()].view(parameter.shape)


# The two tensors of a quantised moment, and whether its values have a sign.
MOMENTS_8BIT = {"exp_avg": True, "exp_avg_sq": False}


def blocks_of(values: int) -> int:
    """Return the number of blocks, and so of scales, of so many values."""
    return -(-values // LOW_BIT_BLOCK)


def quantised_anew(
    codes: Tensor, scales: Tensor, starts: Sequence[int], first: int, count: int, *, signed: bool
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of `count` values from `first` on, in blocks that begin there.

    `codes` are all values of a parameter, and `starts` where each rank began to count blocks that it saved. Blocks that
    are the same before and after keep every bit.
    """
    levels = _bitsandbytes().create_dynamic_map(signed=signed).to(codes.device)
    sizes = [end - start for start, end in pairwise([*starts, codes.numel()])]
    parts = zip(scales.split([blocks_of(size) for size in sizes]), sizes, strict=True)
    part = slice(first, first + count)
    scale = torch.cat([own.repeat_interleave(LOW_BIT_BLOCK)[:size] for own, size in parts])[part]
    before = codes.flatten()[part]
    values = levels[before.long()] * scale
    # The largest magnitude of a block is its scale. Of a signed moment it may be −scale, for which there is no level:
    # the lowest is −0.993.
    magnitudes = torch.where(before == 0, scale, values.abs()) if signed else values
    largest = _in_blocks(magnitudes).amax(1)
    shares = _in_blocks(values) / torch.where(largest > 0, largest, 1.0)[:, None]
    found = torch.bucketize(shares, (levels[:-1] + levels[1:]) / 2).to(torch.uint8)
    return found.flatten()[:count], largest


def _in_blocks(values: Tensor) -> Tensor:
    return nn.functional.pad(values, (0, -values.numel() % LOW_BIT_BLOCK)).view(-1, LOW_BIT_BLOCK)


class _ManagedMemory:
    """CUDA managed memory as an array. The driver moves its pages to the GPU and, under memory pressure, back."""

    def __init__(self, pages: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(pages.shape),
            "typestr": "|u1",
            "data": (pages.data_ptr(), False),
            "version": 3,
        }


def _as_cuda_tensor(pages: Tensor, device: torch.device) -> Tensor:
    """Return managed memory, which bitsandbytes hands out as a CPU tensor, as a CUDA tensor without a copy."""
    return torch.as_tensor(_ManagedMemory(pages), device=device)


def _bitsandbytes() -> ModuleType:
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)  # its warnings about missing inference kernels do not concern training
    try:
        from bitsandbytes import functional
    except ImportError:
        fix = f"Install it with {install_hint('low-bit')}, or use train.optimizer=adamw."
        raise UserError("8-bit moments need the package bitsandbytes.", where="train.optimizer", fix=fix) from None
    finally:
        log.setLevel(level)
    return functional


# ----------------------------------------------------------------------------------------------------
# Muon (kellerjordan.github.io/posts/muon) and NorMuon (arXiv 2510.05491).
#
# `Muon` updates matrices that this process holds in full, `ShardedMuon` those of which each rank holds rows.


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
        # Without bf16 in hardware a CPU would emulate it, and train.precision=auto chooses float32 there.
        on_cpu = all(p.device.type == "cpu" for group in groups for p in group.parameters.values())
        self.dtype = torch.float32 if on_cpu and train.precision != "bf16" else torch.bfloat16
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
        total, squares = nesterov_(gradients, self.first[shape], divisor, bad, beta, self.dtype)
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
        self.parallel, self.rank, self.size = parallel, parallel.shards.rank, parallel.shards.size
        full = {name: p for group in groups for name, p in group.parameters.items()}
        self.shapes = {name: p.shape for name, p in full.items()}
        self.splits = {name: rows for group in groups for name, rows in group.splits.items()}
        self.owner = assign_owners({name: p.numel() for name, p in full.items()}, self.size)
        owned = [name for name in full if self.owner[name] == self.rank]
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
        first, last = self._row_range(name, self.rank)
        start = 0
        for rows in self.splits[name]:
            begin, end = max(start, first), min(start + rows, last)
            if begin < end:
                yield torch.Size((rows, self.shapes[name][1])), slice(begin - first, end - first)
            start += rows

    def _row_range(self, name: str, rank: int) -> tuple[int, int]:
        rows = self.shapes[name][0]
        return first_row(rows, rank, self.size), first_row(rows, rank + 1, self.size)

    def _shard_size(self, name: str, rank: int) -> int:
        """Return the number of values that a rank holds of a parameter."""
        first, last = self._row_range(name, rank)
        return (last - first) * self.shapes[name][1]

    def _owned_by(self, rank: int) -> list[str]:
        return [name for name in self.shapes if self.owner[name] == rank]

    def _gather_gradients(self) -> dict[str, Tensor]:
        """Return the full gradients of the matrices that this rank owns."""
        own, size, rows = self.rank, self.size, self.parallel.parameters()
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
        own, size = self.rank, self.size
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
        dist.all_to_all_single(received, sent, received_counts, counts, group=self.parallel.shards.group)
        self.parallel.traffic.exchanged += sent.nbytes
        return list(received.split(received_counts))


# ----------------------------------------------------------------------------------------------------
# AdamW, the optimizer of a run, and the moving average.


MakeMuon = Callable[[Sequence[ParamGroup], Train], Muon]


class Adam:
    """torch's fused AdamW kernel, called directly.

    `torch.optim.AdamW` would import torch's compiler, which takes seconds, and creates its state only in the first
    step. Here the state exists, with names to save it by, from the start.
    """

    def __init__(self, groups: Sequence[ParamGroup], train: Train) -> None:
        self.betas, self.eps = train.betas, train.eps
        # parameters that one kernel call updates together, by (learning rate, weight decay, dtype)
        self.groups: dict[tuple[float, float, torch.dtype], list[_Moments]] = defaultdict(list)
        for group in groups:
            rate, decay = train.role_lr(group.role), 0.0 if group.role == "scalar" else train.weight_decay
            for name, parameter in group.parameters.items():
                self.groups[rate, decay, parameter.dtype].append(_Moments(name, parameter))

    @torch.no_grad()
    def step(self, factor: float, gate: Gate, momentum: float | None = None) -> None:
        divisor, bad = gate
        for (rate, decay, _), moments in self.groups.items():
            used = [m for m in moments if m.parameter.grad is not None]
            if not used:
                continue
            steps = [m.step for m in used]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [m.parameter for m in used],
                [m.parameter.grad for m in used],  # type: ignore[misc]
                [m.first for m in used],
                [m.second for m in used],
                [],
                steps,
                lr=rate * factor,
                beta1=self.betas[0] if momentum is None else momentum,
                beta2=self.betas[1],
                weight_decay=decay,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,  # both are read on the device
                found_inf=bad,
            )
            torch._foreach_sub_(steps, [bad] * len(steps))

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Restore the step counts on exit.

        `step` counts before the kernel runs and takes that back after a bad step. A signal in between would raise, and
        leave the count too high.
        """
        counts = [(m.step, m.step.clone()) for moments in self.groups.values() for m in moments]
        try:
            yield
        finally:
            for step, before in counts:
                step.copy_(before)

    def tensors(self) -> dict[str, Tensor]:
        every = (m for moments in self.groups.values() for m in moments)
        return {f"{m.name}.{key}": value for m in every for key, value in m.tensors().items()}


class _Moments:
    """AdamW's state of one parameter."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        self.first, self.second = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def tensors(self) -> dict[str, Tensor]:
        return {"step": self.step, "exp_avg": self.first, "exp_avg_sq": self.second}


class Optimizer:
    """AdamW for all parameters; or Muon for the hidden matrices (or 8-bit AdamW for the large tensors) and AdamW for
    the rest."""

    def __init__(self, groups: Sequence[ParamGroup], train: Train, make_muon: MakeMuon = Muon) -> None:
        hidden = [g for g in groups if g.role == "matrix" and train.optimizer in MUON]
        rest = [g for g in groups if g not in hidden]
        large: list[ParamGroup] = []
        if train.optimizer in LOW_BIT:
            large, rest = _select(rest, is_large), _select(rest, lambda group, name: not is_large(group, name))
        self.muon = make_muon(hidden, train) if hidden else None
        self.low_bit = Adam8bit(large, train) if large else None
        self.adam = Adam(rest, train) if rest else None

    def step(self, factor: float, gate: Gate, step: int = 0, momentum: float | None = None) -> None:
        """Take one step.

        `factor` multiplies every peak learning rate. `momentum`, if given, replaces AdamW's beta1 and Muon's momentum.
        `step` counts from the start of the run, over all resumes.
        """
        if self.muon:
            self.muon.step(factor, gate, step, momentum)
        if self.low_bit:
            self.low_bit.step(factor, gate, momentum)
        if self.adam:
            self.adam.step(factor, gate, momentum)

    def dry_run(self) -> AbstractContextManager[None]:
        """Return a context for a step that must change nothing, however it ends."""
        return self.adam.dry_run() if self.adam else nullcontext()

    def tensors(self) -> dict[str, Tensor]:
        parts = [part.tensors() for part in (self.muon, self.low_bit, self.adam) if part]
        return {name: tensor for part in parts for name, tensor in part.items()}


def _select(groups: Sequence[ParamGroup], wanted: Callable[[ParamGroup, str], bool]) -> list[ParamGroup]:
    """Return the groups with the wanted parameters only, without groups that have none."""
    selected = [replace(g, parameters={n: p for n, p in g.parameters.items() if wanted(g, n)}) for g in groups]
    return [group for group in selected if group.parameters]


class Ema:
    """An exponential moving average of the weights, which skips bad steps too.

    Early in a run the decay is smaller: with the full decay the average would still consist mostly of the initial
    weights.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], decay: float, in_place: bool = False) -> None:
        # With in_place, `swap` copies values: under FSDP torch holds views of the same memory, which an exchange of
        # tensors would not reach.
        self.decay, self.in_place = decay, in_place
        self.parameters = parameters
        self.average = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, bad: Tensor, step: int) -> None:
        stop, decay = bad > 0, min(self.decay, (1 + step) / (10 + step))
        for name, parameter in self.parameters.items():
            average = self.average[name]
            average.copy_(torch.where(stop, average, average.lerp(parameter, 1.0 - decay)))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the average and the weights. A second call undoes the first."""
        for name, parameter in self.parameters.items():
            if self.in_place:
                weights = parameter.clone()
                parameter.copy_(self.average[name])
                self.average[name].copy_(weights)
            else:
                parameter.data, self.average[name] = self.average[name], parameter.data
