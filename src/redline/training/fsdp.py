"""FSDP and HSDP: each rank holds rows of every tensor, of weights, gradients, moments and averages.

torch's `fully_shard` (FSDP2) gathers the weights of a block when it runs and reduce-scatters its gradients after its
backward. Under HSDP the ranks form groups: each group shards one copy of the model, and gradients are also all-reduced
between the groups.

The rest of the trainer sees plain tensors: `parameters()` are views of this rank's rows, so that AdamW, averages,
checkpoints and the gate need no code for DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from redline.errors import UserError
from redline.jobs.objective import Objective, ParamGroup
from redline.models.adapters import FrozenMatrix
from redline.models.decoder import Decoder, Linear, RMSNorm, ShardedBlock
from redline.planning.communication import WHOLE
from redline.recipe.schema import Parallel, Train
from redline.training.distributed import Ranks
from redline.training.optim import MOMENTS_8BIT, Muon, ShardedMuon, blocks_of, first_row
from redline.training.parallel import ParallelStrategy, ShardSpec, Traffic

if TYPE_CHECKING:
    # Imported only where a model is sharded: they bring in 640 modules (sympy among them), 0.05 GiB that `redline plan`
    # does not count for a run on a CPU.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# ----------------------------------------------------------------------------------------------------
# How a model is sharded: over which ranks, in which units, and in which precision it is gathered.

# Layers that convert their weights to the precision of their input: weights that are gathered in it give the same.
_CASTING = (Linear, RMSNorm, nn.Embedding, Decoder)


class Shards:
    """Shards the units of a model, while it is built or afterwards."""

    def __init__(self, options: Parallel, ranks: Ranks, objective: Objective) -> None:
        self.options, self.ranks, self.objective, self.traffic = options, ranks, objective, Traffic()
        self.size = ranks.size if options.mode == "fsdp" else int(options.shard_size)
        self.rank = ranks.rank % self.size  # in its group
        self.replicas = ranks.size // self.size  # groups
        self.reducing = True  # this backward all-reduces between the groups
        self.built_in_parts = False
        self._mesh: DeviceMesh | None = None

    @property
    def whole(self) -> bool:
        """Whether gradients are summed whole until the last micro-batch of a step, and only then scattered."""
        return self.options.accumulate == WHOLE

    def mesh(self, device: str) -> DeviceMesh:
        """Return the ranks as (replica, shard), or as one group of shards. The first call is made by all ranks."""
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            if self.options.mode == "fsdp":
                self._mesh = init_device_mesh(device, (self.size,), mesh_dim_names=("shard",))
            else:
                self._mesh = init_device_mesh(device, (self.replicas, self.size), mesh_dim_names=("replica", "shard"))
        return self._mesh

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share one copy of the model."""
        assert self._mesh is not None
        return self._mesh.get_group("shard")

    def build(self, device: torch.device) -> None:
        """Build the objective's model, and shard it block by block if the objective can build it in parts."""
        if not builds_in_parts(self.objective):
            self.objective.build(device)
            return
        self.built_in_parts = True
        for block in self.objective.build_in_parts(device):
            self.shard(block)

    def shard(self, unit: nn.Module) -> None:
        """Shard the parameters of a module as one unit, except those of units within it."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        for module in unit.modules():
            if isinstance(module, FrozenMatrix):
                module.as_parameters()
        dtype = self.gathered_dtype(unit)
        policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
        device = next(unit.parameters()).device
        fully_shard(unit, mesh=self.mesh(device.type), mp_policy=policy)
        for method in getattr(unit, "entry_points", ()):
            register_fsdp_forward_method(unit, method)

    def gathered_dtype(self, unit: nn.Module) -> torch.dtype | None:
        """Return the half precision in which a unit is gathered, or None if its tensors are gathered as they are.

        A frozen base is stored in the compute precision or in NF4 already. fp8 makes its operands of the whole weights.
        Layers that redline does not know may compute in float32.
        """
        precision = self.objective.recipe.train.precision
        if precision not in ("bf16", "fp16") or not any(p.requires_grad for p in unit.parameters()):
            return None
        if not isinstance(unit, ShardedBlock) and not self.objective.casts_weights:
            return None
        own = [m for m in _own_modules(unit) if next(m.parameters(recurse=False), None) is not None]
        if not all(isinstance(module, _CASTING) for module in own):
            return None
        return torch.bfloat16 if precision == "bf16" else torch.float16


def _own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a unit that no unit within it has sharded."""
    from torch.distributed.fsdp import FSDPModule

    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)


def builds_in_parts(objective: Objective) -> bool:
    """Return whether `build_in_parts` does what `build` does: not if a subclass has replaced `build` alone."""
    for kind in type(objective).__mro__:
        if {"build", "build_in_parts"} & vars(kind).keys():
            return kind is not Objective and "build_in_parts" in vars(kind)
    return False


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP gathers one at a time: transformer blocks, which are items of a ModuleList.

    Items without submodules (single embeddings or norms) stay with the root module.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [child for items in lists for child in items if any(True for _ in child.children())]


# ----------------------------------------------------------------------------------------------------
# The strategy.


class FSDP(ParallelStrategy):
    sharded = True

    def __init__(self, ranks: Ranks, objective: Objective, shards: Shards) -> None:
        super().__init__(ranks, objective)
        self.shards, self.traffic = shards, shards.traffic
        self.saves = ranks.rank < shards.size
        if shards.built_in_parts:
            _check_same_origin(ranks, objective)
        else:
            for parameter in self.model.parameters():
                dist.broadcast(parameter.data, 0)  # shards of one model, even if a node has other files
            for block in blocks(self.model):
                shards.shard(block)
        shards.shard(self.model)
        self.root = cast("FSDPModule", self.model)
        for unit in self._units():
            unit.set_gradient_divide_factor(1.0)  # gradients are parts of one sum, not of a mean
            unit.set_custom_all_gather(cast(Any, _CountedAllGather(self.traffic)))
            unit.set_custom_reduce_scatter(cast(Any, _CountedReduceScatter(shards)))
            if hasattr(unit, "set_reduce_scatter_unused_params"):  # since torch 2.13
                # Otherwise ranks whose micro-batches use different parameters would send messages of different sizes.
                unit.set_reduce_scatter_unused_params(True)
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
        if self.shards.whole:
            self.root.set_requires_gradient_sync(last)
        elif self.shards.replicas > 1:
            self.root.set_requires_all_reduce(last)  # sums of earlier micro-batches stay within the group
            self.shards.reducing = last

    def end_backward(self) -> None:
        for name, parameter in self.dtensors.items():
            if name in self._rows:
                gradient = parameter.grad
                self._rows[name].grad = None if gradient is None else cast("DTensor", gradient).to_local()

    def all_reduce(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def grad_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        squares = torch.zeros((), device=next(self.model.parameters()).device)
        if gradients:  # a small model may leave a rank without rows
            squares = torch.stack(torch._foreach_norm(list(gradients))).square().sum()
        dist.all_reduce(squares, group=self.shards.group)
        return squares.sqrt()

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
        base, _, kind = (name, "", "") if name in self._rows else name.rpartition(".")
        rows = self._rows.get(base)
        if rows is not None and kind.removesuffix("_scale") in MOMENTS_8BIT and kind.endswith("_scale"):
            return self._scales_spec(self.dtensors[base])
        if rows is None or tensor.shape != rows.shape:
            return ShardSpec(tuple(tensor.shape))
        full = self.dtensors[base]
        return ShardSpec(tuple(full.shape), first_row(full.shape[0], self.shards.rank, self.shards.size))

    def _scales_spec(self, full: DTensor) -> ShardSpec:
        """Return where the scales of a quantised moment lie: every rank counts its blocks from its first row on."""
        size, width = self.shards.size, full.numel() // full.shape[0]
        firsts = [first_row(full.shape[0], rank, size) for rank in range(size + 1)]
        counts = [blocks_of((b - a) * width) for a, b in pairwise(firsts)]
        return ShardSpec((sum(counts),), sum(counts[: self.shards.rank]))


def _check_same_origin(ranks: Ranks, objective: Objective) -> None:
    """Refuse to train shards of different models: each rank has read or drawn its own."""
    own = objective.identity()
    differing = own != ranks.broadcast(own)
    if ranks.max(float(differing))[0]:
        what = "the ranks have read different files of the base or of the data."
        raise UserError(what, where="model.base", fix="Put the same files on every node.")


# ----------------------------------------------------------------------------------------------------
# Collectives that count their bytes.


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

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards.traffic)
        self.shards = shards

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.traffic.scattered += input_tensor.nbytes
        if self.shards.replicas > 1 and self.shards.reducing:
            self.traffic.reduced += output_tensor.nbytes  # torch all-reduces it between the groups
        # Ignore `op`: with a divide factor of 1 torch may pass another op than SUM, which gloo does not support.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return scatter(output_tensor, input_tensor, group=group, async_op=async_op)
