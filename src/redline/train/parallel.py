"""How a step is shared: by one process, or by several that each hold the whole model (DDP). Shares of it: `shards.py`.

Every rank has its places of the global batch, and its gradients are parts of one sum. They are all-reduced while the
backward of a step's last micro-batch still runs: in buckets, as soon as the last gradient of one is there. Hooks on
the parameters do that, so it does not matter how an objective calls its model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from redline.objectives.base import Objective, ParamGroup
from redline.plan.communication import BUCKET
from redline.recipe.schema import Train
from redline.train.muon import Muon
from redline.train.pulse import PULSE
from redline.train.ranks import Ranks


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
class Place:
    """Where a tensor lies in the whole that several ranks hold together: rows from `start` on, of `shape`."""

    shape: tuple[int, ...]
    start: int = 0


class Parallel:
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

    def places(self, tensors: Mapping[str, Tensor]) -> dict[str, Place]:
        return {name: Place(tuple(tensor.shape)) for name, tensor in tensors.items()}


@dataclass
class _Bucket:
    parameters: list[nn.Parameter] = field(default_factory=list)
    bytes: int = 0
    waiting: int = 0  # gradients that are not there yet


class Replicas(Parallel):
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
            with PULSE.waiting():
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


def parallelise(mode: str, ranks: Ranks, objective: Objective) -> Parallel:
    """As asked for, once the objective has built its model."""
    if not ranks.joined:
        return Parallel(ranks, objective)
    if mode == "fsdp":
        from redline.train.shards import Shards  # torch takes a second to import what it needs

        return Shards(ranks, objective)
    return Replicas(ranks, objective)


def build_alike(objective: Objective, device: torch.device, ranks: Ranks, *, decided: bool) -> None:
    """What the first rank chooses by measurement, the others take over; unless a checkpoint has decided for all."""
    if ranks.first or decided:
        objective.build(device)
    if not decided:
        state = ranks.from_first(objective.state() if ranks.first else None)
        if not ranks.first:
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
