"""How a step is shared: by one process, or by several that each hold the whole model (DDP). Shares of it: `shards.py`.

Every rank has its places of the global batch, and its gradients are parts of one sum. They are all-reduced while the
backward of a step's last micro-batch still runs: in buckets, as soon as the last gradient of one is there. Hooks on
the parameters do that, so it does not matter how an objective calls its model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from redline.jobs.objective import Objective, ParamGroup
from redline.models.layers import ShardedBlock
from redline.planning.communication import BUCKET
from redline.recipe.schema import Train
from redline.training.distributed import Ranks
from redline.training.heartbeat import HEARTBEAT
from redline.training.muon import Muon, ShardedMuon, first_row


@dataclass
class Traffic:
    """Bytes that this process has handed to collectives since the last look: whole tensors, not what a ring sends."""

    reduced: int = 0  # all-reduced
    gathered: int = 0  # all-gathered, as they come out
    scattered: int = 0  # reduce-scattered, as they go in
    exchanged: int = 0  # sent to the ranks that orthogonalise, and back

    def look(self) -> Traffic:
        """What it was; counting begins anew."""
        seen = Traffic(**vars(self))
        self.reduced = self.gathered = self.scattered = self.exchanged = 0
        return seen


@dataclass(frozen=True)
class ShardSpec:
    """Where a tensor lies in the whole that several ranks hold together: rows from `start` on, of `shape`."""

    shape: tuple[int, ...]
    start: int = 0


class ParallelStrategy:
    """One process: nothing is shared."""

    sharded = False

    def __init__(self, ranks: Ranks, objective: Objective) -> None:
        self.ranks, self.objective, self.traffic = ranks, objective, Traffic()

    @property
    def model(self) -> nn.Module:
        return self.objective.model

    def parameters(self) -> dict[str, nn.Parameter]:
        """What this rank updates, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def groups(self) -> list[ParamGroup]:
        return self.objective.param_groups()

    def muon(self, groups: Sequence[ParamGroup], train: Train) -> Muon:
        return Muon(groups, train)

    def before(self, last: bool) -> None:
        """A micro-batch begins; after the last one of a step gradients are summed over the ranks."""

    def after(self) -> None:
        """The step's gradients are complete when this returns (on a GPU: for what is queued after it)."""

    def total(self, values: Tensor) -> Tensor:
        """Summed over the ranks."""
        return values

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """In here a step is this rank's own, where that can be: a rehearsal may fail in one and not in another."""
        yield

    def rest(self) -> None:
        """After forwards without a backward."""

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def places(self, tensors: Mapping[str, Tensor]) -> dict[str, ShardSpec]:
        return {name: ShardSpec(tuple(tensor.shape)) for name, tensor in tensors.items()}


@dataclass
class _Bucket:
    parameters: list[nn.Parameter] = field(default_factory=list)
    bytes: int = 0
    waiting: int = 0  # gradients that are not there yet


class DDP(ParallelStrategy):
    """The whole model in each rank; gradients are all-reduced once a step."""

    def __init__(self, ranks: Ranks, objective: Objective) -> None:
        super().__init__(ranks, objective)
        self._buckets = buckets(list(self.parameters().values()))
        self._of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0
        self._armed = self._apart = False
        self._flying: list[dist.Work] = []
        for parameter in self.parameters().values():
            dist.broadcast(parameter.data, 0)  # they are alike already, unless a node has other files
            parameter.register_post_accumulate_grad_hook(self._ready)

    def before(self, last: bool) -> None:
        self._armed = last and not self._apart
        if self._armed:
            self._next = 0
            for bucket in self._buckets:
                bucket.waiting = len(bucket.parameters)

    def _ready(self, parameter: Tensor) -> None:
        if self._armed:
            self._of[id(parameter)].waiting -= 1
            # in order, so that all ranks send the same ones, whichever gradient happens to be early
            while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
                self._reduce()

    def _reduce(self) -> None:
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
        self._flying.append(work)

    def after(self) -> None:
        if self._armed:
            while self._next < len(self._buckets):  # what this batch did not touch
                self._reduce()
            with HEARTBEAT.waiting():
                for work in self._flying:
                    work.wait()
        self._flying.clear()
        self._armed = False

    def total(self, values: Tensor) -> Tensor:
        if not self._apart:
            dist.all_reduce(values)
        return values

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._apart = True
        try:
            yield
        finally:
            self._apart = False


def parallelize(mode: str, ranks: Ranks, objective: Objective) -> ParallelStrategy:
    """As asked for, once the objective has built its model."""
    if not ranks.joined:
        return ParallelStrategy(ranks, objective)
    if mode == "fsdp":
        return FSDP(ranks, objective)
    return DDP(ranks, objective)


def build_on_all_ranks(objective: Objective, device: torch.device, ranks: Ranks, *, decided: bool) -> None:
    """What the first rank chooses by measurement, the others take over; unless a checkpoint has decided for all."""
    if ranks.is_main or decided:
        objective.build(device)
    if not decided:
        state = ranks.broadcast(objective.state() if ranks.is_main else None)
        if not ranks.is_main:
            objective.load_state(state)
            objective.build(device)


def buckets(parameters: Sequence[nn.Parameter], size: int = BUCKET) -> list[_Bucket]:
    """Of about this many bytes, in the order in which a backward makes gradients: the last parameters first."""
    found = [_Bucket()]
    for parameter in reversed(parameters):
        last = found[-1]
        if last.parameters and (last.bytes + parameter.nbytes > size or last.parameters[0].dtype != parameter.dtype):
            last = _Bucket()
            found.append(last)
        last.parameters.append(parameter)
        last.bytes += parameter.nbytes
    return found


# ----------------------------------------------------------------------------------------------------
# Shares of the model in each rank (FSDP2): weights, gradients, moments and averages are kept once in all.
#
# torch's `fully_shard` gathers a block's weights when it runs and scatters its gradients behind its backward. Each rank
# keeps rows of every tensor. To all the rest of the trainer these are plain tensors: `parameters()` are views of the
# rows, so that AdamW, averages, checkpoints and the gate need not know of anything else.


class FSDP(ParallelStrategy):
    sharded = True

    def __init__(self, ranks: Ranks, objective: Objective) -> None:
        super().__init__(ranks, objective)
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, 0)  # each rank keeps its rows of what all of them have alike
        mesh = init_device_mesh(next(self.model.parameters()).device.type, (ranks.size,))
        for block in blocks(self.model):
            fully_shard(block, mesh=mesh)
            for method in block.entry_points if isinstance(block, ShardedBlock) else ():
                register_fsdp_forward_method(block, method)
        fully_shard(self.model, mesh=mesh)
        self.root = cast(FSDPModule, self.model)
        for unit in self._units():
            unit.set_gradient_divide_factor(1.0)  # parts of one sum, not of a mean
            unit.set_custom_all_gather(cast(Any, _Gather(self.traffic)))
            unit.set_custom_reduce_scatter(cast(Any, _Scatter(self.traffic)))
        self.whole = {n: cast(DTensor, p) for n, p in self.model.named_parameters() if p.requires_grad}
        rows = {name: cast(DTensor, p.detach()).to_local() for name, p in self.whole.items()}
        # a rank beyond a tensor's rows has none of it
        self._rows = {name: nn.Parameter(local) for name, local in rows.items() if local.numel()}

    def _units(self) -> Iterator[FSDPModule]:
        return (module for module in self.model.modules() if isinstance(module, FSDPModule))

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._rows

    def groups(self) -> list[ParamGroup]:
        """Of this rank's rows, be there none: its part in what all do together is still to be played."""
        return [
            replace(group, parameters={n: self._rows[n] for n in group.parameters if n in self._rows})
            for group in self.objective.param_groups()
        ]

    def muon(self, groups: Sequence[ParamGroup], train: Train) -> Muon:
        return ShardedMuon([g for g in self.objective.param_groups() if g.role == "matrix"], train, self)

    def before(self, last: bool) -> None:
        self.root.set_requires_gradient_sync(last)

    def after(self) -> None:
        for name, parameter in self.whole.items():
            if name in self._rows:
                gradient = parameter.grad
                self._rows[name].grad = None if gradient is None else cast(DTensor, gradient).to_local()

    def total(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        squares = torch.stack(torch._foreach_norm(list(gradients))).square().sum()
        return self.total(squares).sqrt()

    def rest(self) -> None:
        """The root keeps its weights gathered after a forward, for a backward that does not come here."""
        for unit in self._units():
            unit.reshard()

    def clear(self) -> None:
        for parameter in (*self.whole.values(), *self._rows.values()):
            parameter.grad = None

    def places(self, tensors: Mapping[str, Tensor]) -> dict[str, ShardSpec]:
        """Of what lies beside a parameter's rows, by the name it begins with; anything else is whole."""
        return {name: self._place(name, tensor) for name, tensor in tensors.items()}

    def _place(self, name: str, tensor: Tensor) -> ShardSpec:
        base = name if name in self._rows else name.rpartition(".")[0]
        rows = self._rows.get(base)
        if rows is None or tensor.shape != rows.shape:
            return ShardSpec(tuple(tensor.shape))
        whole = self.whole[base]
        return ShardSpec(tuple(whole.shape), first_row(whole.shape[0], self.ranks.rank, self.ranks.size))


def blocks(model: nn.Module) -> list[nn.Module]:
    """What is gathered at once: modules in a list, if they have parts; tables are the model's own."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [child for found in lists for child in found if any(True for _ in child.children())]


class _Gather:
    """torch's all-gather, counted."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.traffic.gathered += output_tensor.nbytes
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # as torch called it before
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Gather):
    """torch's reduce-scatter, counted."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.traffic.scattered += input_tensor.nbytes
        # a plain sum, whatever way of dividing by one torch would choose: gloo knows no other
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(output_tensor, input_tensor, group=group, async_op=async_op)
