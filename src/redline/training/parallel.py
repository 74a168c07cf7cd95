"""How ranks share a step: one process alone, the whole model on every rank (DDP), or shards of it (FSDP).

Every rank computes its positions of the global batch, and its gradients are parts of one sum over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from redline.jobs.objective import Objective, ParamGroup
from redline.models.decoder import ShardedBlock
from redline.planning.communication import BUCKET
from redline.recipe.schema import Train
from redline.training.control import HEARTBEAT
from redline.training.distributed import Ranks
from redline.training.optim import Muon, ShardedMuon, first_row

if TYPE_CHECKING:
    # Only FSDP imports these: they bring in 640 modules (sympy among them), 0.05 GiB that `redline plan` does not count
    # for a run on a CPU.
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


@dataclass
class Traffic:
    """Bytes of the tensors that this process has passed to collectives (not the bytes that a ring then sends)."""

    reduced: int = 0  # inputs of all-reduce
    gathered: int = 0  # outputs of all-gather
    scattered: int = 0  # inputs of reduce-scatter
    exchanged: int = 0  # of Muon: gradients to the ranks that orthogonalise them, and updates back

    def pop(self) -> Traffic:
        """Return the counts and reset them."""
        counts = Traffic(**vars(self))
        self.reduced = self.gathered = self.scattered = self.exchanged = 0
        return counts


@dataclass(frozen=True)
class ShardSpec:
    """Which rows of a full tensor this rank holds: those from `start` on. `shape` is the full tensor's."""

    shape: tuple[int, ...]
    start: int = 0


class ParallelStrategy:
    """One process: no communication. The subclasses replace what several ranks do differently."""

    sharded = False  # whether each rank holds only rows of the parameters

    def __init__(self, ranks: Ranks, objective: Objective) -> None:
        self.ranks, self.objective, self.traffic = ranks, objective, Traffic()

    @property
    def model(self) -> nn.Module:
        return self.objective.model

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters (or rows of them) that this rank updates, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def groups(self) -> list[ParamGroup]:
        return self.objective.param_groups()

    def make_muon(self, groups: Sequence[ParamGroup], train: Train) -> Muon:
        return Muon(groups, train)

    def begin_micro_batch(self, last: bool) -> None:
        """Prepare for a forward and backward. The backward of the last micro-batch sums gradients over the ranks."""

    def end_backward(self) -> None:
        """Wait until the step's gradients are complete (on a GPU: for the kernels that are queued after this call)."""

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the ranks."""
        return values

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))

    @contextmanager
    def local_only(self) -> Iterator[None]:
        """Switch off the collectives of a step, if the strategy can.

        A dry run may run out of memory on one rank only, and the others would then wait in a collective for ever.
        """
        yield

    def reshard(self) -> None:
        """Free gathered weights after forward passes that no backward follows."""

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def shard_specs(self, tensors: Mapping[str, Tensor]) -> dict[str, ShardSpec]:
        """Return where each of these tensors (parameters, moments, averages) lies in its full tensor."""
        return {name: ShardSpec(tuple(tensor.shape)) for name, tensor in tensors.items()}


def parallelize(mode: str, ranks: Ranks, objective: Objective) -> ParallelStrategy:
    """Return the strategy for `parallel.mode`. The objective has built its model already."""
    if not ranks.joined:
        return ParallelStrategy(ranks, objective)
    if mode == "fsdp":
        return FSDP(ranks, objective)
    return DDP(ranks, objective)


def build_on_all_ranks(objective: Objective, device: torch.device, ranks: Ranks, *, restored: bool) -> None:
    """Build the model. What rank 0 chooses by measuring, the other ranks take over.

    Their measurements could differ a little, and then the ranks would run different kernels. With `restored`, the
    choices of a checkpoint have been loaded on every rank and nothing is measured.
    """
    if ranks.is_main or restored:
        objective.build(device)
    if not restored:
        state = ranks.broadcast(objective.state() if ranks.is_main else None)
        if not ranks.is_main:
            objective.load_state(state)
            objective.build(device)


# ----------------------------------------------------------------------------------------------------
# DDP: the whole model on every rank.
#
# Gradients are all-reduced while the backward of a step's last micro-batch still runs: in buckets, each as soon as its
# last gradient is computed. Hooks on the parameters start it, so it does not matter how an objective calls its model.


@dataclass
class _Bucket:
    parameters: list[nn.Parameter] = field(default_factory=list)
    bytes: int = 0
    missing: int = 0  # gradients that this backward has not computed yet


class DDP(ParallelStrategy):
    """The whole model on each rank. Gradients are all-reduced once a step."""

    def __init__(self, ranks: Ranks, objective: Objective) -> None:
        super().__init__(ranks, objective)
        self._buckets = buckets(list(self.parameters().values()))
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0  # bucket to reduce
        self._reducing = False  # this backward sums its gradients over the ranks
        self._local_only = False
        self._pending: list[dist.Work] = []
        for parameter in self.parameters().values():
            # All ranks have the same weights already, unless a node has other files (of a base model, for example).
            dist.broadcast(parameter.data, 0)
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    def begin_micro_batch(self, last: bool) -> None:
        self._reducing = last and not self._local_only
        if self._reducing:
            self._next = 0
            for bucket in self._buckets:
                bucket.missing = len(bucket.parameters)

    def _gradient_ready(self, parameter: Tensor) -> None:
        if self._reducing:
            self._bucket_of[id(parameter)].missing -= 1
            # Buckets are reduced in order: all ranks must call their collectives in the same order, and gradients may
            # be computed in a different order on each rank.
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        parts = flat.split([p.numel() for p in bucket.parameters])
        for parameter, part in zip(bucket.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.traffic.reduced += flat.nbytes
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self._pending.append(work)

    def end_backward(self) -> None:
        if self._reducing:
            while self._next < len(self._buckets):  # buckets with parameters that this batch did not use
                self._reduce_next()
            with HEARTBEAT.waiting():
                for work in self._pending:
                    work.wait()
        self._pending.clear()
        self._reducing = False

    def all_reduce(self, values: Tensor) -> Tensor:
        if not self._local_only:
            dist.all_reduce(values)
        return values

    @contextmanager
    def local_only(self) -> Iterator[None]:
        self._local_only = True
        try:
            yield
        finally:
            self._local_only = False


def buckets(parameters: Sequence[nn.Parameter], size: int = BUCKET) -> list[_Bucket]:
    """Group parameters into buckets of about `size` bytes and one dtype each.

    The last parameters come first, because a backward computes their gradients first.
    """
    result = [_Bucket()]
    for parameter in reversed(parameters):
        last = result[-1]
        if last.parameters and (last.bytes + parameter.nbytes > size or last.parameters[0].dtype != parameter.dtype):
            last = _Bucket()
            result.append(last)
        last.parameters.append(parameter)
        last.bytes += parameter.nbytes
    return result


# ----------------------------------------------------------------------------------------------------
# FSDP2: each rank holds rows of every tensor, of weights, gradients, moments and averages.
#
# torch's `fully_shard` gathers the weights of a block when it runs and reduce-scatters its gradients after its
# backward. The rest of the trainer sees plain tensors: `parameters()` are views of this rank's rows, so that AdamW,
# averages, checkpoints and the gate need no code for DTensors.


class FSDP(ParallelStrategy):
    sharded = True

    def __init__(self, ranks: Ranks, objective: Objective) -> None:
        super().__init__(ranks, objective)
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, 0)  # shards of one model, even if a node has other files
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(next(self.model.parameters()).device.type, (ranks.size,))
        for block in blocks(self.model):
            fully_shard(block, mesh=mesh)
            for method in block.entry_points if isinstance(block, ShardedBlock) else ():
                register_fsdp_forward_method(block, method)
        fully_shard(self.model, mesh=mesh)
        self.root = cast("FSDPModule", self.model)
        for unit in self._units():
            unit.set_gradient_divide_factor(1.0)  # gradients are parts of one sum, not of a mean
            unit.set_custom_all_gather(cast(Any, _CountedAllGather(self.traffic)))
            unit.set_custom_reduce_scatter(cast(Any, _CountedReduceScatter(self.traffic)))
        self.dtensors = {n: cast("DTensor", p) for n, p in self.model.named_parameters() if p.requires_grad}
        rows = {name: cast("DTensor", p.detach()).to_local() for name, p in self.dtensors.items()}
        # A tensor with fewer rows than ranks leaves some ranks without any.
        self._rows = {name: nn.Parameter(local) for name, local in rows.items() if local.numel()}

    def _units(self) -> Iterator[FSDPModule]:
        from torch.distributed.fsdp import FSDPModule

        return (module for module in self.model.modules() if isinstance(module, FSDPModule))

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._rows

    def groups(self) -> list[ParamGroup]:
        """Return the groups with this rank's rows.

        A group without rows stays: the rank still takes part in the collectives of its optimizer.
        """
        return [
            replace(group, parameters={n: self._rows[n] for n in group.parameters if n in self._rows})
            for group in self.objective.param_groups()
        ]

    def make_muon(self, groups: Sequence[ParamGroup], train: Train) -> Muon:
        return ShardedMuon([g for g in self.objective.param_groups() if g.role == "matrix"], train, self)

    def begin_micro_batch(self, last: bool) -> None:
        self.root.set_requires_gradient_sync(last)

    def end_backward(self) -> None:
        for name, parameter in self.dtensors.items():
            if name in self._rows:
                gradient = parameter.grad
                self._rows[name].grad = None if gradient is None else cast("DTensor", gradient).to_local()

    def all_reduce(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        squares = torch.stack(torch._foreach_norm(list(gradients))).square().sum()
        return self.all_reduce(squares).sqrt()

    def reshard(self) -> None:
        """Shard the weights again after an evaluation.

        After a forward the root module keeps its weights gathered for the backward, which an evaluation does not run.
        """
        for unit in self._units():
            unit.reshard()

    def clear(self) -> None:
        for parameter in (*self.dtensors.values(), *self._rows.values()):
            parameter.grad = None

    def shard_specs(self, tensors: Mapping[str, Tensor]) -> dict[str, ShardSpec]:
        return {name: self._shard_spec(name, tensor) for name, tensor in tensors.items()}

    def _shard_spec(self, name: str, tensor: Tensor) -> ShardSpec:
        # Moments and averages are named after their parameter and have the shape of its rows; other tensors (step
        # counts, loss scale) are the same on every rank.
        base = name if name in self._rows else name.rpartition(".")[0]
        rows = self._rows.get(base)
        if rows is None or tensor.shape != rows.shape:
            return ShardSpec(tuple(tensor.shape))
        full = self.dtensors[base]
        return ShardSpec(tuple(full.shape), first_row(full.shape[0], self.ranks.rank, self.ranks.size))


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP gathers one at a time: transformer blocks, which are items of a ModuleList.

    Items without submodules (single embeddings or norms) stay with the root module.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [child for items in lists for child in items if any(True for _ in child.children())]


class _CountedAllGather:
    """torch's all-gather that counts its bytes."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.traffic.gathered += output_tensor.nbytes
        # older versions of torch have the second name only
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _CountedReduceScatter(_CountedAllGather):
    """torch's reduce-scatter that counts its bytes and always sums."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.traffic.scattered += input_tensor.nbytes
        # Ignore `op`: with a divide factor of 1 torch may pass another op than SUM, which gloo does not support.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(output_tensor, input_tensor, group=group, async_op=async_op)
