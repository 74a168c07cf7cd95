"""How ranks share a step: one process alone, the whole model on every rank (DDP), or shards of it (fsdp.py).

Every rank computes its positions of the global batch, and its gradients are parts of one sum over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from redline.jobs.objective import Objective, ParamGroup
from redline.planning.communication import BUCKET, SHARDED
from redline.recipe.schema import Parallel, Train
from redline.training.checkpoint import copy_weights
from redline.training.control import HEARTBEAT
from redline.training.distributed import Ranks
from redline.training.optim import Muon


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


def _own_rows(
    tensors: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the rows of full tensors that this rank holds; a tensor of another shape than expected stays whole."""
    found = dict(tensors)
    for name, spec in specs.items():
        if name in found and tuple(found[name].shape) == spec.shape and spec.shape:
            found[name] = found[name][spec.start : spec.start + len(like[name])]
    return found


class ParallelStrategy:
    """One process: no communication. The subclasses replace what several ranks do differently."""

    sharded = False  # whether each rank holds only rows of the parameters
    saves = True  # whether this rank's tensors belong into a checkpoint of all ranks: replicas of shards do not

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


def parallelize(options: Parallel, ranks: Ranks, objective: Objective) -> ParallelStrategy:
    """Return the strategy for `parallel.mode`. The objective has built its model already."""
    if not ranks.joined:
        return ParallelStrategy(ranks, objective)
    if options.mode in SHARDED:
        from redline.training.fsdp import FSDP, Shards

        return FSDP(ranks, objective, Shards(options, ranks, objective))
    return DDP(ranks, objective)


def build_parallel(
    options: Parallel,
    ranks: Ranks,
    objective: Objective,
    device: torch.device,
    *,
    restored: bool,
    initial: Mapping[str, Tensor] | None = None,
) -> ParallelStrategy:
    """Build the model on all ranks, with `initial` weights if given, and return the strategy that trains it.

    A sharded model is built one block at a time, each sharded before the next one is made, if the objective can.
    """
    if not (ranks.joined and options.mode in SHARDED):
        build_on_all_ranks(objective, objective.build, device, ranks, restored=restored)
        if initial is not None:
            trained = {n: p for n, p in objective.model.named_parameters() if p.requires_grad}
            copy_weights(trained, dict(initial), "model.init_from")
        return parallelize(options, ranks, objective)
    from redline.training.fsdp import FSDP, Shards

    shards = Shards(options, ranks, objective)
    shards.mesh(device.type)  # by all ranks together, before rank 0 builds first
    build_on_all_ranks(objective, shards.build, device, ranks, restored=restored)
    parallel = FSDP(ranks, objective, shards)
    if initial is not None:
        own = parallel.parameters()
        copy_weights(own, _own_rows(initial, parallel.shard_specs(own), own), "model.init_from")
    return parallel


def build_on_all_ranks(
    objective: Objective,
    build: Callable[[torch.device], None],
    device: torch.device,
    ranks: Ranks,
    *,
    restored: bool,
) -> None:
    """Build the model. What rank 0 chooses by measuring, the other ranks take over.

    Their measurements could differ a little, and then the ranks would run different kernels. With `restored`, the
    choices of a checkpoint have been loaded on every rank and nothing is measured.
    """
    if ranks.is_main or restored:
        build(device)
    if not restored:
        state = ranks.broadcast(objective.state() if ranks.is_main else None)
        if not ranks.is_main:
            objective.load_state(state)
            build(device)


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
