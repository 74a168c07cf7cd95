"""What happens before the first step: dry runs of the largest batch, and the recording of a CUDA graph.

The dry runs compile the kernels and allocate all memory, so that a run that does not fit fails now, not hours later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from redline.errors import UserError
from redline.planning.batch import BatchPlan
from redline.runs.monitor import Monitor
from redline.training.distributed import SINGLE_PROCESS, Ranks
from redline.training.signals import StopRequested
from redline.training.step import Backward, Step, StepBatch, step_batch, to_device
from redline.units import format_seconds


class SmallestBatchTooLargeError(torch.OutOfMemoryError):
    """A micro-batch of 1 does not fit while activations are kept. The restarted run recomputes them instead."""

    def __init__(self, plan: BatchPlan) -> None:
        super().__init__("a micro-batch of 1 does not fit")
        self.plan = plan


def warm_up(
    dry_run: Callable[[BatchPlan], None],
    plan: BatchPlan,
    monitor: Monitor,
    ranks: Ranks = SINGLE_PROCESS,
    *,
    compiled: bool,
    recomputed: bool,
    device: str,
) -> BatchPlan:
    """Dry-run the largest batch until it fits on every rank; return the plan that fitted.

    If any rank runs out of memory, all ranks halve the micro-batch. If compilation fails, the run goes on without it.
    """
    monitor.status("warming up" + (" (the first time compiles: up to a minute)" if compiled else ""))
    begin = time.perf_counter()
    while True:
        try:
            if not ranks.max(float(_runs_out_of_memory(dry_run, plan)))[0]:
                break
            plan = _halve_micro_batch(plan, monitor, device, recomputed=recomputed)
        except (StopRequested, UserError, SmallestBatchTooLargeError):
            raise
        except Exception as error:
            if not compiled:
                raise
            compiled = False
            monitor.warn(f"torch.compile failed ({_first_line(error)}); training continues uncompiled, which is slower")
            torch.compiler.set_stance("force_eager")
    seconds = time.perf_counter() - begin
    monitor.emit("warmup", seconds=seconds, message=f"warmed up in {format_seconds(seconds)}")
    return plan


def resumed_batch_plan(saved: BatchPlan, planned: BatchPlan) -> BatchPlan:
    """Return the checkpoint's batch plan if its micro-batch is smaller than the planned one.

    The run had found that more does not fit. With another world size or global batch the saved plan does not apply.
    """
    applies = saved.world == planned.world and saved.global_batch == planned.global_batch
    return saved if applies and saved.micro < planned.micro else planned


def _runs_out_of_memory(dry_run: Callable[[BatchPlan], None], plan: BatchPlan) -> bool:
    try:
        dry_run(plan)
    except torch.OutOfMemoryError:
        return True
    return False


def _halve_micro_batch(plan: BatchPlan, monitor: Monitor, device: str, *, recomputed: bool) -> BatchPlan:
    smaller = plan.halved()
    torch.cuda.empty_cache()
    if smaller is None and not recomputed:
        raise SmallestBatchTooLargeError(plan)
    if smaller is None:
        what = f"a micro-batch of {plan.micro} does not fit into {device}, even with grad_checkpointing=full."
        fix = "Use a shorter data.seq_len, a smaller model, parallel.mode=fsdp on several GPUs, or a larger card."
        raise UserError(what, where="train.micro_batch", fix=fix)
    change = f"{plan.micro} → {smaller.micro}, the global batch stays {smaller.global_batch}"
    monitor.emit("recovery", message=f"out of memory: micro-batch {change}")
    return smaller


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


# ----------------------------------------------------------------------------------------------------
# CUDA graphs: forward and backward of a step as one launch.
#
# The steps of small models are limited by launches: a thousand kernels of a few microseconds each, which Python queues
# more slowly than the GPU runs them. A graph is recorded once. Each step then copies its batch into the recorded
# tensors and replays the graph.


# A graph is used unless it takes longer than this times the plain step. One that is only as fast is worth having too:
# if the host is busy later, the graph does not slow down.
_MAX_SLOWDOWN = 1.02
_TIMED_STEPS = 3


class Graph(Protocol):
    def replay(self) -> None: ...


LossAndTerms = tuple[Tensor, dict[str, Tensor]]
Record = Callable[[Callable[[], LossAndTerms]], tuple[Graph, LossAndTerms]]


def record(work: Callable[[], LossAndTerms]) -> tuple[Graph, LossAndTerms]:
    """Record the kernels of `work`; return the graph and the tensors that will hold its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # libraries initialise at their first call on a stream, which is not allowed while recording
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the graph allocates a memory pool of its own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


class GraphedBackward:
    """Replaces `Step.backward` for batches of the same shapes as `example`."""

    def __init__(
        self, backward: Backward, parameters: list[nn.Parameter], example: StepBatch, record: Record = record
    ) -> None:
        device = next(iter(example.micros[0].values())).device
        weights = {name: torch.full((), float(weight), device=device) for name, weight in example.weights.items()}
        copies = [{name: tensor.clone() for name, tensor in micro.items()} for micro in example.micros]
        self.batch = StepBatch(copies, weights)  # the memory that the graph reads
        self.graph, (self.loss, self.terms) = record(lambda: backward(0, self.batch))
        self.parameters, self.plain = parameters, backward
        self.gradients = [parameter.grad for parameter in parameters]

    def __call__(self, step: int, batch: StepBatch) -> LossAndTerms:
        if _shapes(batch) != _shapes(self.batch):  # more documents than the recorded batch has room for
            return self.plain(step, batch)
        for recorded, new in zip(self.batch.micros, batch.micros, strict=True):
            for name, tensor in new.items():
                recorded[name].copy_(tensor, non_blocking=True)
        for name, weight in batch.weights.items():
            recorded_weight = self.batch.weights[name]
            assert isinstance(recorded_weight, Tensor)
            recorded_weight.fill_(weight)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.loss.clone(), {name: term.clone() for name, term in self.terms.items()}


def graph_if_possible(
    step: Step, plan: BatchPlan, device: torch.device, monitor: Monitor, *, single_process: bool
) -> None:
    """Record a graph of the largest batch of this plan, or warn why a step cannot be recorded."""
    objective = step.objective
    if reason := not_graphable(device, replayable=objective.replayable, single_process=single_process):
        monitor.warn(f"train.graph is off: {reason}")
        return
    rows = to_device(objective.worst_batch(plan.micro), device)
    with objective.dry_run():
        use_graph(step, step_batch(objective, [rows] * plan.accumulation), monitor)
    step.clear()


def not_graphable(device: torch.device, *, replayable: bool, single_process: bool) -> str:
    """Return why a step cannot be one CUDA graph, or "" if it can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if not single_process:
        return "a step of several ranks cannot be recorded"
    if not replayable:
        return "a step of this job does not run the same kernels each time (diffusion, LatentWire, dropout)"
    return ""


def use_graph(step: Step, batch: StepBatch, monitor: Monitor) -> None:
    """Use a graph for the step's forward and backward, unless recording fails or the graph is slower."""
    try:
        step.graph, message = graph_if_faster(
            lambda: GraphedBackward(step.backward, step.parameters, batch), step.backward, batch
        )
    except StopRequested:
        raise
    except Exception as error:
        monitor.warn(f"no CUDA graph could be recorded ({_first_line(error)}); training continues without, more slowly")
        return
    monitor.emit("warmup", message=message)


def graph_if_faster(
    make_graph: Callable[[], Backward], plain: Backward, batch: StepBatch
) -> tuple[Backward | None, str]:
    """Return the graph, or None if it is slower on this batch; and a message with both times."""
    plain_ms = 1e3 * _seconds(plain, batch)
    graph = make_graph()
    graph_ms = 1e3 * _seconds(graph, batch)
    if graph_ms > _MAX_SLOWDOWN * plain_ms:
        return None, f"no CUDA graph: forward and backward take {graph_ms:.1f} ms with one, {plain_ms:.1f} ms without"
    return graph, f"CUDA graph of forward and backward: {plain_ms:.1f} → {graph_ms:.1f} ms"


def _seconds(backward: Backward, batch: StepBatch) -> float:
    backward(0, batch)
    _synchronize()
    begin = time.perf_counter()
    for _ in range(_TIMED_STEPS):
        backward(0, batch)
    _synchronize()
    return (time.perf_counter() - begin) / _TIMED_STEPS


def _shapes(batch: StepBatch) -> list[dict[str, torch.Size]]:
    return [{name: tensor.shape for name, tensor in micro.items()} for micro in batch.micros]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
