"""Shares of the model in each rank (FSDP2): weights, gradients, moments and averages are kept once in all.

torch's `fully_shard` gathers a block's weights when it runs and scatters its gradients behind its backward. Each rank
keeps rows of every tensor. To all the rest of the trainer these are plain tensors: `parameters()` are views of the
rows, so that AdamW, averages, checkpoints and the gate need not know of anything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from redline.objectives.base import Objective, ParamGroup
from redline.recipe.schema import Train
from redline.train.muon import Muon
from redline.train.muon_shards import ShardedMuon, first_row
from redline.train.parallel import Parallel, Place, Traffic
from redline.train.ranks import Ranks


class Shards(Parallel):
    sharded = True

    def __init__(self, ranks: Ranks, objective: Objective) -> None:
        super().__init__(ranks, objective)
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, 0)  # each rank keeps its rows of what all of them have alike
        mesh = init_device_mesh(next(self.model.parameters()).device.type, (ranks.size,))
        for block in blocks(self.model):
            fully_shard(block, mesh=mesh)
            if hasattr(block, "extend"):  # how a block reads new tokens after those in a cache
                register_fsdp_forward_method(block, "extend")
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

    def places(self, tensors: Mapping[str, Tensor]) -> dict[str, Place]:
        """Of what lies beside a parameter's rows, by the name it begins with; anything else is whole."""
        return {name: self._place(name, tensor) for name, tensor in tensors.items()}

    def _place(self, name: str, tensor: Tensor) -> Place:
        base = name if name in self._rows else name.rpartition(".")[0]
        rows = self._rows.get(base)
        if rows is None or tensor.shape != rows.shape:
            return Place(tuple(tensor.shape))
        whole = self.whole[base]
        return Place(tuple(whole.shape), first_row(whole.shape[0], self.ranks.rank, self.ranks.size))


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
