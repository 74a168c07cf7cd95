"""The breakdown of `redline profile`: time of a step by kind of work, with advice, and GPU memory by line of code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# ----------------------------------------------------------------------------------------------------
# The kind of work that a kernel (on a CPU, an operator) does, by its name.


MATMUL, ATTENTION, MEMORY, OPTIMIZER = "matmul", "attention", "memory-bound", "optimizer"
COMMUNICATION, COPIES, IDLE = "communication", "copies", "idle"
KINDS = (MATMUL, ATTENTION, MEMORY, OPTIMIZER, COMMUNICATION, COPIES, IDLE)

UPDATE = "redline.update"  # the profiler range that contains the optimizer's work

# The first pattern found in the lower-case name decides. Attention comes before matmul: some attention kernels of cuDNN
# have "gemm" in their name.
_PATTERNS = (
    (COMMUNICATION, r"nccl|gloo|all_?reduce|all_?gather|reduce_?scatter|broadcast_"),
    (COPIES, r"^memcpy|^memset|aten::copy_$|aten::_to_copy|pin_memory"),
    (ATTENTION, r"sdpa|fmha|flash|flex_attention|attention|own_block"),
    (MATMUL, r"gemm|nvjet|cutlass|xmma|cublas|splitk|aten::(add)?(mm|bmm)|baddbmm|_scaled_mm|mkldnn.*linear"),
)


def kind_of(name: str) -> str:
    """Return the kind of work. Kernels that match no pattern are memory-bound: norms, activations, losses, sums."""
    lowered = name.lower()
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, lowered)), MEMORY)


_NEGLIGIBLE = 0.02  # of a step
_NEAR_BEST = 0.85  # of the best known rate
_LONGEST = 12  # kernels in the list of the longest


@dataclass(frozen=True)
class Span:
    """The execution of a kernel, or of an operator without the operators it calls, in seconds."""

    name: str
    start: float
    end: float
    updating: bool = False  # inside the UPDATE range


@dataclass(frozen=True)
class Part:
    """One kind of work in a step."""

    kind: str
    ms: float
    share: float  # of the step
    best_ms: float | None  # at the best known rates of kernels, from the plan
    advice: str

    @property
    def of_best(self) -> float | None:
        """The best time over the measured one; above 1 if it was faster than the best known rate."""
        return self.best_ms / self.ms if self.best_ms and self.ms else None


@dataclass(frozen=True)
class Kernel:
    name: str
    kind: str
    ms: float  # per step
    calls: float  # per step


@dataclass(frozen=True)
class Breakdown:
    steps: int
    step_ms: float
    data_wait_ms: float
    parts: list[Part]
    longest: list[Kernel]

    def data(self) -> dict[str, Any]:
        parts = [{**asdict(part), "of_best": part.of_best} for part in self.parts]
        return {**asdict(self), "parts": parts}


def breakdown(
    spans: Sequence[Span],
    *,
    steps: int,
    seconds: float,
    busy: float,
    data_wait: float,
    best: Mapping[str, float],
    gpu: bool,
) -> Breakdown:
    """Return the breakdown of `steps` that took `seconds` together.

    Some kernel ran during `busy` of these seconds, and the trainer waited for data during `data_wait`. `best` holds the
    milliseconds per step of some kinds at the best known rates.
    """
    spent, best = _seconds_by_kind(spans), dict(best)
    spent[IDLE] = max(0.0, seconds - busy)
    per_step = {kind: 1e3 * spent[kind] / steps for kind in KINDS if spent.get(kind)}
    step_ms = 1e3 * seconds / steps
    # The plan has one ceiling for memory-bound work and the optimizer, bytes over bandwidth: share it by their times.
    if MEMORY in best and OPTIMIZER in per_step:
        both = per_step.get(MEMORY, 0.0) + per_step[OPTIMIZER]
        best |= {kind: best[MEMORY] * per_step.get(kind, 0.0) / both for kind in (OPTIMIZER, MEMORY)}
    waiting = 1e3 * data_wait / steps
    parts = [
        Part(
            kind,
            ms,
            ms / step_ms,
            best.get(kind),
            _advice(kind, ms / step_ms, ms, best.get(kind), waiting / step_ms, gpu),
        )
        for kind, ms in per_step.items()
    ]
    return Breakdown(steps, step_ms, waiting, parts, _longest(spans, steps))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the spans: work of two streams at the same time counts once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _kind(span: Span) -> str:
    kind = kind_of(span.name)
    return OPTIMIZER if span.updating and kind != COMMUNICATION else kind


def _seconds_by_kind(spans: Iterable[Span]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[_kind(span)] = seconds.get(_kind(span), 0.0) + span.end - span.start
    return seconds


def _longest(spans: Iterable[Span], steps: int) -> list[Kernel]:
    times: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        times.setdefault((span.name, _kind(span)), []).append(span.end - span.start)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))[:_LONGEST]
    return [Kernel(name, kind, 1e3 * sum(each) / steps, len(each) / steps) for (name, kind), each in ordered]


_GPU_ADVICE = {
    MATMUL: "use larger micro-batches and widths that are multiples of 128; on Hopper, train.precision=fp8",
    ATTENTION: "use head_dim 128 instead of 64 in a model of your own; a shorter data.seq_len",
    MEMORY: "model.kernels=auto uses fused kernels; train.grad_checkpointing=none recomputes nothing",
    OPTIMIZER: "a larger train.global_batch needs fewer updates for the same tokens",
    COMMUNICATION: "more micro-batches per update overlap it with computation",
    COPIES: "data.workers above 0 copies batches ahead of the step",
}
_CPU_ADVICE = {
    MATMUL: "the cores of the CPU are the limit: use a smaller model, or a GPU",
    ATTENTION: "use a shorter data.seq_len: the time grows with its square",
    MEMORY: "train.compile=true fuses these operators",
    OPTIMIZER: "a larger train.global_batch needs fewer updates for the same tokens",
    COMMUNICATION: "use fewer processes on the same cores",
    COPIES: "train.compile=true makes fewer copies",
}


def _advice(kind: str, share: float, ms: float, best: float | None, waiting: float, gpu: bool) -> str:
    """Return one line about what would make this kind of work faster."""
    if kind == IDLE:
        return _idle_advice(share, waiting, gpu)
    if share < _NEGLIGIBLE:
        return "negligible"
    if best is not None and best >= _NEAR_BEST * ms:
        return "at the best known rate: only less work would help"
    return (_GPU_ADVICE if gpu else _CPU_ADVICE)[kind]


def _idle_advice(share: float, waiting: float, gpu: bool) -> str:
    if waiting > _NEGLIGIBLE:
        return f"{waiting:.0%} of a step is waiting for data: use more data.workers, or run `redline prepare` first"
    if share < _NEGLIGIBLE:
        return "negligible"
    if gpu:
        return "kernels too short for the CPU to keep up: larger micro-batches, train.compile=true, train.graph=true"
    return "Python between operators: train.compile=true, larger micro-batches"


# ----------------------------------------------------------------------------------------------------
# GPU memory at its peak, by the line of code that allocated it.


_MAX_POINTS = 500  # of the curve
_MAX_HOLDERS = 15
_PACKAGE = "redline/"  # in the path of a source file


@dataclass(frozen=True)
class Holder:
    where: str  # file:line function
    bytes: int
    tensors: int


@dataclass(frozen=True)
class MemoryHistory:
    peak_bytes: int
    holders: list[Holder]  # at the peak, the largest first
    rest_bytes: int  # of all other holders
    curve: list[int]  # allocated bytes in equal stretches from the first event to the last; the highest of each

    def data(self) -> dict[str, Any]:
        return asdict(self)


def memory_history(trace: Sequence[Mapping[str, Any]]) -> MemoryHistory:
    """Return the peak of the allocator's record: events with `action`, `addr`, `size` and the allocating `frames`."""
    changes = [event for event in trace if event.get("action") in ("alloc", "free_completed")]
    allocated, peak, peak_at, levels = 0, 0, 0, []
    for index, event in enumerate(changes):
        allocated += event["size"] if event["action"] == "alloc" else -event["size"]
        levels.append(allocated)
        if allocated > peak:
            peak, peak_at = allocated, index + 1
    live: dict[int, Mapping[str, Any]] = {}
    for event in changes[:peak_at]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        else:
            live.pop(event["addr"], None)
    holders = _holders(live.values())
    shown = holders[:_MAX_HOLDERS]
    return MemoryHistory(peak, shown, sum(holder.bytes for holder in holders[_MAX_HOLDERS:]), _curve(levels))


def _holders(events: Any) -> list[Holder]:
    sums: dict[str, list[int]] = {}
    for event in events:
        sums.setdefault(_where(event.get("frames") or ()), []).append(event["size"])
    holders = [Holder(where, sum(sizes), len(sizes)) for where, sizes in sums.items()]
    return sorted(holders, key=lambda holder: (-holder.bytes, holder.where))


def _where(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line of redline's code, or of a library if redline is not in the stack."""
    named = [frame for frame in frames if frame.get("line")]
    ours = next((frame for frame in named if _PACKAGE in str(frame.get("filename"))), None)
    frame = ours or (named[0] if named else None)
    if frame is None:
        return "unknown"
    path = str(frame["filename"])
    short = path[path.rindex(_PACKAGE) :] if _PACKAGE in path else "/".join(path.split("/")[-2:])
    return f"{short}:{frame['line']} {frame.get('name', '')}".rstrip()


def _curve(levels: Sequence[int]) -> list[int]:
    each = max(1, -(-len(levels) // _MAX_POINTS))
    return [max(levels[start : start + each]) for start in range(0, len(levels), each)]
