"""One training step: load the batch, compute the gradients of its micro-batches, update the weights, log the result.

The update is gated by a flag on the device: if loss or gradient is not finite, weights, moments and averages keep every
bit, and no host sync is needed to decide it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from redline.data.loader import Prefetcher, pin
from redline.errors import UserError
from redline.hardware.device import free_unused_memory, is_out_of_memory, synchronize
from redline.jobs.objective import Batch, Objective
from redline.planning.batch import BatchPlan
from redline.planning.flops import FlopsPerToken, mfu
from redline.runs.monitor import Monitor
from redline.training.control import StopRequested
from redline.training.distributed import SINGLE_PROCESS, Ranks
from redline.training.optim import Ema, Optimizer
from redline.training.parallel import ParallelStrategy
from redline.training.readings import RankReadings
from redline.training.schedule import TrainState
from redline.units import GIB, format_seconds
from redline.vocabulary import StopReason

# ----------------------------------------------------------------------------------------------------
# Loss scaling for fp16. In bf16 and fp32 the scale stays 1.


# As torch.amp.GradScaler: grow after so many good steps, shrink after a bad one.
_GROWTH, _BACKOFF, _GROWTH_INTERVAL, _FIRST_SCALE = 2.0, 0.5, 2000, 65536.0


class LossScale:
    """Dynamic loss scale, held and updated on the device."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self.dynamic = precision == "fp16"
        self.scale = torch.full((), _FIRST_SCALE if self.dynamic else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, bad: Tensor) -> None:
        if self.dynamic:
            torch._amp_update_scale_(self.scale, self._good_steps, bad, _GROWTH, _BACKOFF, _GROWTH_INTERVAL)

    def tensors(self) -> dict[str, Tensor]:
        return {"loss_scale": self.scale, "loss_scale.good_steps": self._good_steps} if self.dynamic else {}


@dataclass(frozen=True)
class StepBatch:
    """A rank's micro-batches of a step, and the weights that the step's loss terms are divided by."""

    micros: list[Batch]
    weights: Mapping[str, float | Tensor]  # summed over all micro-batches of all ranks
    wait_seconds: float = 0.0  # how long the trainer waited for it
    first_micro: int = 0  # number of its first micro-batch among those of all ranks
    part: int = 0  # which part of each row it holds, if rows are split over ranks

    def scale_weights(self, factor: float) -> StepBatch:
        """Return the batch with its weights multiplied, as if it were a part of a step `factor` times as large."""
        return replace(self, weights={name: factor * weight for name, weight in self.weights.items()})


@dataclass(frozen=True)
class StepResult:
    """Results as device tensors. Reading one waits for the GPU, so only the step log does that."""

    loss: Tensor
    terms: dict[str, Tensor]
    grad_norm: Tensor
    bad: Tensor  # 1.0 if loss or gradient was not finite, so that nothing was changed
    figures: dict[str, Tensor] = field(default_factory=dict)  # further metrics of the job, for the log
    forwards: Sequence[tuple[Moment, Moment]] = ()  # when the forward passes began and ended; of several ranks only


Backward = Callable[[int, StepBatch], tuple[Tensor, dict[str, Tensor]]]


# ----------------------------------------------------------------------------------------------------
# The time of forward passes, by which a slow rank is found: a whole step takes all ranks equally long, since they wait
# for the slowest one.


Moment = Any  # a CUDA event, or the seconds of a clock


def moment(device: torch.device) -> Moment:
    """Return a mark of the moment at which the device gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def forward_ms(forwards: Sequence[tuple[Moment, Moment]]) -> float | None:
    """Return the milliseconds of a step's forward passes; the GPU must have finished them."""
    if not forwards:
        return None
    return sum(1e3 * (b - a) if isinstance(a, float) else float(a.elapsed_time(b)) for a, b in forwards)


def micro_batch_seed(seed: int, step: int, micro: int, part: int = 0) -> int:
    """Return the seed of a micro-batch. It depends on nothing that ran before: a resumed run draws the same noise.

    The parts of a row have seeds of their own: dropout would otherwise drop the same places of each part.
    """
    return ((seed * 1_000_003 + step) * 4099 + micro) + part * 0x9E37_79B9_7F4A_7C15 & 0x7FFF_FFFF_FFFF_FFFF


class Step:
    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        *,
        parallel: ParallelStrategy,
        scale: LossScale,
        ema: Ema | None,
        clip: float | None,
        seed: int,
    ) -> None:
        self.objective, self.optimizer, self.scale, self.ema = objective, optimizer, scale, ema
        self.parallel, self.clip, self.seed = parallel, clip, seed
        self.parameters = list(parallel.parameters().values())
        self._forwards: list[tuple[Moment, Moment]] = []
        self.graph: Backward | None = None  # replaces `backward` if a CUDA graph was recorded

    def __call__(self, step: int, batch: StepBatch, lr_factor: float, momentum: float | None = None) -> StepResult:
        loss, terms = (self.graph or self.backward)(step, batch)
        grad_norm, bad = self._measure(loss)
        self._update(step, lr_factor, grad_norm, bad, momentum)
        self.scale.update(bad)
        figures = self.objective.figures(loss, batch.weights)
        return StepResult(loss, terms, grad_norm, bad, figures, self._forwards)

    def backward(self, step: int, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the gradients of Σ coefficient·sum/weight over all micro-batches of all ranks.

        Return that loss and its terms, summed over the ranks.
        """
        totals: dict[str, Tensor] = {}
        recording = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        self.clear()
        self._forwards, timed = [], self.parallel.ranks.size > 1
        device = self.scale.scale.device
        for index, micro in enumerate(batch.micros):
            self.parallel.begin_micro_batch(last=index == len(batch.micros) - 1)
            if not recording:  # only steps without randomness are recorded, and a graph cannot contain seeding
                torch.manual_seed(micro_batch_seed(self.seed, step, batch.first_micro + index, batch.part))
            begin = moment(device) if timed else None
            terms = self.objective.loss(micro)
            if timed:
                self._forwards.append((begin, moment(device)))
            parts = {name: term.coefficient * term.sum / batch.weights[term.weight] for name, term in terms.items()}
            loss = torch.stack(list(parts.values())).sum()
            (loss * self.scale.scale).backward()
            for name, part in parts.items():
                totals[name] = totals[name] + part.detach() if name in totals else part.detach()
        self.parallel.end_backward()
        summed = self.parallel.all_reduce(torch.stack(list(totals.values())))
        return summed.sum(), dict(zip(totals, summed.unbind(), strict=True))

    @torch.no_grad()
    def _measure(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = self.parallel.grad_norm(gradients) / self.scale.scale
        finite = torch.isfinite(grad_norm) & torch.isfinite(loss)
        return grad_norm, (~finite).float()

    @torch.no_grad()
    def _update(
        self, step: int, lr_factor: float, grad_norm: Tensor, bad: Tensor, momentum: float | None = None
    ) -> None:
        # The optimizer divides the gradients in its own pass, so that clipping and unscaling cost no extra one.
        divisor = self.scale.scale
        if self.clip is not None:
            divisor = divisor * torch.clamp_min(grad_norm / self.clip, 1.0)
        divisor = torch.where(bad > 0, 1.0, divisor)
        self.optimizer.step(lr_factor, (divisor, bad), step, momentum)
        if self.ema is not None:
            self.ema.update(bad, step)

    def dry_run(self, batch: StepBatch) -> None:
        """Do all that a step does without changing anything: to compile, to allocate, to run out of memory early."""
        with self.parallel.local_only(), self.optimizer.dry_run():
            loss, _ = self.backward(0, batch)
            grad_norm, bad = self._measure(loss)
            self._update(0, 0.0, grad_norm, torch.ones_like(bad))
        self.clear()

    def clear(self) -> None:
        self.parallel.clear()


# ----------------------------------------------------------------------------------------------------
# Loading: from positions in the global batch to a step's micro-batches on the device.


class BatchLoader:
    """Prefetches the batches of this rank in background threads.

    The batch of a step depends only on the step's number and on the rank's positions in the global batch, so it is the
    same whatever the number of workers, and after a resume.
    """

    def __init__(
        self,
        objective: Objective,
        plan: BatchPlan,
        device: torch.device,
        workers: int,
        first: int,
        *,
        depth: int = 4,
        ranks: Ranks = SINGLE_PROCESS,
        skipped: Sequence[int] = (),
    ) -> None:
        self.objective, self.plan, self.device, self.workers = objective, plan, device, workers
        self.depth, self.ranks, self.skipped = depth, ranks, sorted(skipped)
        self._loader: Prefetcher[StepBatch] = Prefetcher(self._make, first, workers=workers, depth=depth)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loader.close()

    def restart(self, step: int) -> None:
        """Drop the prefetched batches and prefetch again from `step`, because the job's batches have changed."""
        self._loader.close()
        self._loader = Prefetcher(self._make, step, workers=self.workers, depth=self.depth)

    def next(self, step: int) -> StepBatch:
        begin = time.perf_counter()
        batch = self._loader.next(step)
        wait_seconds = time.perf_counter() - begin
        micros = [to_device(micro, self.device) for micro in batch.micros]
        # The ranks that split a row have all counted the whole of it.
        context, sums = self.plan.context, self.ranks.sum(*map(float, batch.weights.values()))
        weights = {name: total / context for name, total in zip(batch.weights, sums, strict=True)}
        group, part = divmod(self.ranks.rank, context)
        return StepBatch(micros, weights, wait_seconds, group * self.plan.accumulation, part)

    def _make(self, step: int) -> StepBatch:
        micro, share = self.plan.micro, self.plan.micro * self.plan.accumulation
        group = self.ranks.rank // self.plan.context
        first = data_step(step, self.skipped) * self.plan.global_batch + group * share
        starts = range(first, first + share, micro)
        batch = step_batch(self.objective, [self.objective.batch(np.arange(s, s + micro)) for s in starts])
        if self.device.type != "cuda":
            return batch
        return replace(batch, micros=[pin(m) for m in batch.micros])


def data_step(step: int, skipped: Sequence[int]) -> int:
    """Return the step whose data this step reads if the data of the `skipped` steps (in order) are left out."""
    for skip in skipped:
        step += skip <= step
    return step


def step_batch(objective: Objective, micros: list[Batch]) -> StepBatch:
    """Return this rank's parts of the micro-batches, with the sums of the weights of whole rows."""
    weights: dict[str, float] = {}
    for micro in micros:
        for name, weight in objective.weights(micro).items():
            weights[name] = weights.get(name, 0.0) + weight
    return StepBatch([objective.local(micro) for micro in micros], weights)


def to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    # A scalar is a size that the host needs to launch kernels. Reading it back from the device would be a host sync.
    # Only page-locked memory, which CUDA alone has here, may be reused before an asynchronous copy is done.
    pinned = device.type == "cuda"
    return {name: t if t.dim() == 0 else t.to(device, non_blocking=pinned) for name, t in batch.items()}


# ----------------------------------------------------------------------------------------------------
# What happens before the first step: dry runs of the largest batch, and the recording of a CUDA graph.


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
    alike = (saved.world, saved.context) == (planned.world, planned.context)
    applies = alike and saved.global_batch == planned.global_batch
    return saved if applies and saved.micro < planned.micro else planned


def _runs_out_of_memory(dry_run: Callable[[BatchPlan], None], plan: BatchPlan) -> bool:
    try:
        dry_run(plan)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return True
    return False


def _halve_micro_batch(plan: BatchPlan, monitor: Monitor, device: str, *, recomputed: bool) -> BatchPlan:
    smaller = plan.halved()
    free_unused_memory()
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


# ----------------------------------------------------------------------------------------------------
# The log of training steps: their rates, and their results.
#
# Reading a step's results is the only point at which training waits for the GPU.


# ----------------------------------------------------------------------------------------------------
# Rates: tokens over the time spent training, and MFU over the dense peak. Evaluation, checkpoints and compilation are
# not training time, so they do not lower the rates.

Clock = Callable[[], float]


@dataclass(frozen=True)
class Rates:
    tokens_per_s: float
    mfu: float | None  # PaLM form over the dense bf16 peak, which other projects report
    mfu_causal: float | None  # counts only the FLOPs that the attention mask and the loss mask leave
    step_ms: float
    data_wait_ms: float
    cpu_share: float | None = None  # CPU time of the process over the time of its threads; None on a GPU

    def fields(self) -> dict[str, float | None]:
        """Return the fields of a step event."""
        known = vars(self)
        return known if self.cpu_share is not None else {key: known[key] for key in known if key != "cpu_share"}


class Throughput:
    """Count steps and tokens since the last reading.

    `threads`, for a run on a CPU, is the number of threads that compute: less CPU time than they could use means that
    other processes or a quota take it.
    """

    def __init__(
        self,
        flops: FlopsPerToken,
        peak: float | None,
        clock: Clock = time.perf_counter,
        *,
        threads: int | None = None,
        cpu_clock: Clock = time.process_time,
    ) -> None:
        self._flops, self._peak, self._clock = flops, peak, clock
        self._threads, self._cpu_clock = threads, cpu_clock
        self._restart()

    def _restart(self) -> None:
        self._begin, self._cpu_begin = self._clock(), self._cpu_clock()
        self._paused = self._cpu_paused = self._waited = 0.0
        self._tokens = self._steps = 0

    def begin(self) -> None:
        """Start to count now: compilation before the first step is not training time."""
        self._restart()

    def add(self, tokens: int, data_wait: float = 0.0) -> None:
        self._tokens += tokens
        self._steps += 1
        self._waited += data_wait

    @contextmanager
    def paused(self) -> Iterator[None]:
        begin, cpu_begin = self._clock(), self._cpu_clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begin
            self._cpu_paused += self._cpu_clock() - cpu_begin

    def read(self) -> Rates | None:
        """Return the rates since the last reading; None if there was no step."""
        seconds = self._clock() - self._begin - self._paused
        cpu_seconds = self._cpu_clock() - self._cpu_begin - self._cpu_paused
        if not self._steps or seconds <= 0:
            return None
        rate = self._tokens / seconds
        rates = Rates(
            tokens_per_s=rate,
            mfu=mfu(rate, self._flops.useful, self._peak),
            mfu_causal=mfu(rate, self._flops.executed, self._peak),
            step_ms=1000.0 * seconds / self._steps,
            data_wait_ms=1000.0 * self._waited / self._steps,
            cpu_share=None if self._threads is None else min(1.0, cpu_seconds / (self._threads * seconds)),
        )
        self._restart()
        return rates


# ----------------------------------------------------------------------------------------------------
# Results of steps.


_MAX_STEPS_AHEAD = 2  # steps that the host may queue before it waits for the GPU
_MAX_LISTED = 100  # skipped steps that the stop event lists


class StepLog:
    def __init__(
        self,
        monitor: Monitor,
        throughput: Throughput,
        device: torch.device,
        max_nonfinite: int,
        seq_len: int,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        self.monitor, self.throughput, self.device = monitor, throughput, device
        self.max_nonfinite, self.seq_len = max_nonfinite, seq_len
        self.skipped = 0  # steps of the whole run that changed nothing, because loss or gradient was not finite
        self.skipped_steps: list[int] = []  # the last of them, so that a person can look at their data
        self.streak: list[int] = []  # skipped steps in a row, up to the last step that was read
        self.fatal_streak: list[int] = []  # the first streak as long as train.max_nonfinite, which ends the run
        self.logged_step = 0  # of the last step event
        self._unlogged_skips = 0  # skipped steps that no step event has counted yet
        self._flags: list[torch.Tensor] = []  # `bad` of the steps that were not read yet
        self._last: StepResult | None = None
        self._queued: deque[torch.cuda.Event] = deque()
        self._readings = RankReadings(ranks, device)

    def record(self, result: StepResult, tokens: int, data_wait: float) -> None:
        """Keep the results of a step on the device, to be read later."""
        self._last = result
        self._flags.append(result.bad)
        self.throughput.add(tokens, data_wait)
        if self.device.type == "cuda":
            # Without a limit the host would queue steps far ahead of the GPU: a signal or the end of the time budget
            # would then take effect only after all of them. Two steps ahead keep the GPU busy.
            event = torch.cuda.Event()
            event.record()
            self._queued.append(event)
            if len(self._queued) > _MAX_STEPS_AHEAD:
                self._queued.popleft().synchronize()
        else:
            synchronize(self.device)  # on MPS the host does not run ahead

    def log(self, state: TrainState, *, lr: float, progress: float, eta_s: float | None) -> None:
        """Write a step event with the results of the last step."""
        result = self._last
        if result is None:
            return
        self.logged_step = state.step
        self.read_skipped(state.step)
        skipped, self._unlogged_skips = self._unlogged_skips, 0
        rates = self.throughput.read()
        hours = state.seconds / 3600
        card, loss, memory = self._readings.read(), result.loss.item(), peak_memory_gib(self.device)
        wait = rates.data_wait_ms if rates else None
        columns = self._readings.exchange(
            card, forward_ms=forward_ms(result.forwards), data_wait_ms=wait, memory_gib=memory
        )
        self.monitor.emit(
            "step",
            step=state.step,
            tokens=state.tokens,
            loss=loss,
            **({f"loss_{n}": v.item() for n, v in result.terms.items()} if len(result.terms) > 1 else {}),
            **{name: value.item() for name, value in result.figures.items()},
            lr=lr,
            grad_norm=result.grad_norm.item(),
            **({**rates.fields(), "samples_per_s": rates.tokens_per_s / self.seq_len} if rates else {}),
            memory_gib=memory,
            **card.fields(),
            **columns,
            hours=hours,
            cost_usd=self.monitor.cost(hours),
            progress=progress,
            eta_s=eta_s,
            skipped=skipped,
        )
        for warning in self._readings.warnings():
            self.monitor.warn(warning)

    def stop_fields(self, reason: StopReason, saved: bool) -> dict[str, Any]:
        """Return the fields of the stop event about skipped steps, and `saved` if the last state is not on disk."""
        bad = {"bad_steps": self.skipped_steps} if reason is StopReason.NONFINITE else {}
        return {"skipped": self.skipped, **bad, **({} if saved else {"saved": False})}

    def wait(self) -> None:
        """Wait until the GPU has done all queued steps."""
        while self._queued:
            self._queued.popleft().synchronize()

    def read_skipped(self, step: int) -> None:
        """Find out which steps since the last call were skipped, and warn of them; waits for the GPU."""
        flags = [value > 0 for value in torch.stack(self._flags).tolist()] if self._flags else []
        self._flags.clear()
        skipped = []
        for number, bad in enumerate(flags, start=step - len(flags)):  # counted from 0, as the data are
            self.streak = [*self.streak, number] if bad else []
            skipped += [number] if bad else []
            if len(self.streak) >= self.max_nonfinite:
                self.fatal_streak = self.streak
        self.skipped += len(skipped)
        self._unlogged_skips += len(skipped)
        if skipped:
            self.skipped_steps = [*self.skipped_steps, *skipped][-_MAX_LISTED:]
            listed = ", ".join(map(str, skipped[:10])) + (" …" if len(skipped) > 10 else "")
            self.monitor.warn(f"loss or gradient not finite in the batches of step {listed}; these steps were skipped")


def peak_memory_gib(device: torch.device) -> float | None:
    """Return the peak memory: of tensors on a GPU, or of this process on a CPU; None if it is not known."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / GIB, 3)
    if device.type == "mps":  # it keeps no peak, but it keeps freed memory, so what it holds comes close
        return round(torch.mps.driver_allocated_memory() / GIB, 3)
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) * 1024 / GIB, 3)
    return None
