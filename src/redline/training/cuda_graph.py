"""A step's forward and backward as one launch: a CUDA graph.

Small models are held up by launching: a thousand kernels of a few microseconds each, which Python queues more slowly
than the GPU runs them. A graph is recorded once, and replayed with other numbers in the same places.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from redline.jobs.objective import Batch
from redline.planning.batch import BatchPlan
from redline.runs.monitor import Monitor
from redline.training.signals import StopRequested
from redline.training.step import Backward, Step, StepBatch, step_batch, to_device

# Of the time without. A graph that is only as fast is taken, too: a host that is held up later does not hold it up.
_WORTH = 1.02
_TIMED = 3  # steps


class Graph(Protocol):
    def replay(self) -> None: ...


Record = Callable[[Callable[[], tuple[Tensor, dict[str, Tensor]]]], tuple[Graph, tuple[Tensor, dict[str, Tensor]]]]


def record(work: Callable[[], tuple[Tensor, dict[str, Tensor]]]) -> tuple[Graph, tuple[Tensor, dict[str, Tensor]]]:
    """The work's kernels as a graph, and where its results will be."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # libraries set themselves up for the stream they are first called on, and may not do so while recording
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a graph has memory of its own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


class GraphedBackward:
    """Step.backward, recorded for batches like this one."""

    def __init__(
        self, backward: Backward, parameters: list[nn.Parameter], like: StepBatch, record: Record = record
    ) -> None:
        device = next(iter(like.micros[0].values())).device
        weights = {name: torch.full((), float(weight), device=device) for name, weight in like.weights.items()}
        self.batch = StepBatch([_copied(micro) for micro in like.micros], weights)
        self.graph, (self.loss, self.terms) = record(lambda: backward(0, self.batch))
        self.parameters, self.plain = parameters, backward
        self.gradients = [parameter.grad for parameter in parameters]

    def __call__(self, step: int, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if _sizes(batch) != _sizes(self.batch):  # more documents than there was room for
            return self.plain(step, batch)
        for own, other in zip(self.batch.micros, batch.micros, strict=True):
            for name, tensor in other.items():
                own[name].copy_(tensor, non_blocking=True)
        for name, weight in batch.weights.items():
            own_weight = self.batch.weights[name]
            assert isinstance(own_weight, Tensor)
            own_weight.fill_(weight)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.loss.clone(), {name: term.clone() for name, term in self.terms.items()}


def graph_if_possible(step: Step, plan: BatchPlan, device: torch.device, monitor: Monitor, *, alone: bool) -> None:
    """Record the largest batch of this plan; where a step cannot be recorded, warn with the reason."""
    objective = step.objective
    if reason := not_recorded(device, replayable=objective.replayable, alone=alone):
        monitor.warn(f"train.graph is off: {reason}")
        return
    rows = to_device(objective.worst_batch(plan.micro), device)
    with objective.dry_run():
        use_graph(step, step_batch(objective, [rows] * plan.accumulation), monitor)
    step.clear()


def not_recorded(device: torch.device, *, replayable: bool, alone: bool) -> str:
    """Return why a step cannot be one CUDA graph; empty when it can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if not alone:
        return "a step of several ranks is not recorded"
    if not replayable:
        return (
            "a step of this job is not the same kernels on the same shapes each time (diffusion, LatentWire, dropout)"
        )
    return ""


def use_graph(step: Step, batch: StepBatch, monitor: Monitor) -> None:
    """Unless it is slower. Whatever goes wrong, kernels can still be launched one by one."""
    try:
        step.graph, found = unless_slower(
            lambda: GraphedBackward(step.backward, step.parameters, batch), step.backward, batch
        )
    except StopRequested:
        raise
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        monitor.warn(f"a CUDA graph could not be recorded ({first_line[:120]}); going on without, which is slower")
        return
    monitor.emit("warmup", message=found)


def unless_slower(graphed: Callable[[], Backward], plain: Backward, batch: StepBatch) -> tuple[Backward | None, str]:
    """The graph, unless it takes more time for this batch, and what was found."""
    without = 1e3 * _seconds(plain, batch)
    graph = graphed()
    within = 1e3 * _seconds(graph, batch)
    if within > _WORTH * without:
        return None, f"forward and backward stay many launches: as one they take {within:.1f} ms, not {without:.1f}"
    return graph, f"forward and backward are one launch: {without:.1f} → {within:.1f} ms"


def _seconds(backward: Backward, batch: StepBatch) -> float:
    backward(0, batch)
    _wait()
    begin = time.perf_counter()
    for _ in range(_TIMED):
        backward(0, batch)
    _wait()
    return (time.perf_counter() - begin) / _TIMED


def _sizes(batch: StepBatch) -> list[dict[str, torch.Size]]:
    return [{name: tensor.shape for name, tensor in micro.items()} for micro in batch.micros]


def _copied(micro: Batch) -> Batch:
    return {name: tensor.clone() for name, tensor in micro.items()}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
