"""Where a step's time went, kind by kind, how far each is from its ceiling, and what could be done about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redline.runs.events import Event, number, section

# ----------------------------------------------------------------------------------------------------
# What kind of work a kernel, or on a CPU an operator, does: by its name.


MATMUL, ATTENTION, MEMORY, OPTIMIZER = "matmul", "attention", "memory-bound", "optimizer"
COMMUNICATION, COPIES, IDLE = "communication", "copies", "idle"
CLASSES = (MATMUL, ATTENTION, MEMORY, OPTIMIZER, COMMUNICATION, COPIES, IDLE)

UPDATE = "redline.update"  # the range that the optimizer's work lies in

# The first that is found in a name, in lower case. Attention before matmul: cuDNN's has "gemm" in some of its names.
_KINDS = (
    (COMMUNICATION, r"nccl|gloo|all_?reduce|all_?gather|reduce_?scatter|broadcast_"),
    (COPIES, r"^memcpy|^memset|aten::copy_$|aten::_to_copy|pin_memory"),
    (ATTENTION, r"sdpa|fmha|flash|flex_attention|attention|own_block"),
    (MATMUL, r"gemm|nvjet|cutlass|xmma|cublas|splitk|aten::(add)?(mm|bmm)|baddbmm|_scaled_mm|mkldnn.*linear"),
)


def kind_of(name: str) -> str:
    """What is none of the others moves memory: norms, activations, losses, sums."""
    lowered = name.lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, lowered)), MEMORY)


_LITTLE = 0.02  # of a step: not worth a word
_NEAR = 0.85  # of the best that kernels were seen to reach
_LONGEST = 12  # kernels that are named


@dataclass(frozen=True)
class Span:
    """A kernel's run, or an operator's own part of one, in seconds."""

    name: str
    start: float
    end: float
    updating: bool = False  # within the optimizer's range


@dataclass(frozen=True)
class Part:
    """One kind of work in a step."""

    kind: str
    ms: float
    share: float  # of the step
    best_ms: float | None  # at the best rates that kernels were seen to reach, by the plan
    advice: str

    @property
    def of_best(self) -> float | None:
        """How near it is to that; more than 1 where it beat what was seen before."""
        return self.best_ms / self.ms if self.best_ms and self.ms else None


@dataclass(frozen=True)
class Longest:
    name: str
    kind: str
    ms: float  # a step
    calls: float  # a step


@dataclass(frozen=True)
class Breakdown:
    steps: int
    step_ms: float
    data_wait_ms: float
    parts: list[Part]
    longest: list[Longest]

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
    """Of `steps` that took so many `seconds`, in `busy` of which something ran; `data_wait` the trainer waited.

    `best` is the milliseconds a step of some kinds at the best rates known.
    """
    taken, best = _taken(spans), dict(best)
    taken[IDLE] = max(0.0, seconds - busy)
    per_step = {kind: 1e3 * taken[kind] / steps for kind in CLASSES if taken.get(kind)}
    step_ms = 1e3 * seconds / steps
    if MEMORY in best and OPTIMIZER in per_step:  # one ceiling for both: bytes over bandwidth
        together = per_step.get(MEMORY, 0.0) + per_step[OPTIMIZER]
        best |= {kind: best[MEMORY] * per_step.get(kind, 0.0) / together for kind in (OPTIMIZER, MEMORY)}
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
    """What the spans cover together; two streams at once count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _kind(span: Span) -> str:
    kind = kind_of(span.name)
    return OPTIMIZER if span.updating and kind != COMMUNICATION else kind


def _taken(spans: Iterable[Span]) -> dict[str, float]:
    taken: dict[str, float] = {}
    for span in spans:
        taken[_kind(span)] = taken.get(_kind(span), 0.0) + span.end - span.start
    return taken


def _longest(spans: Iterable[Span], steps: int) -> list[Longest]:
    times: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        times.setdefault((span.name, _kind(span)), []).append(span.end - span.start)
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))[:_LONGEST]
    return [Longest(name, kind, 1e3 * sum(each) / steps, len(each) / steps) for (name, kind), each in ordered]


def planned_best(plan: Event) -> dict[str, float]:
    """Milliseconds a step by the plan's ceilings, at the rates of the best kernels; empty where none are known."""
    found: dict[str, float] = {}
    parts = section(plan, "ceiling").get("limits")
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, Mapping) and (ms := number(part, "ms_per_step")) is not None:
            found[str(part.get("part"))] = ms
    return found


_ON_A_GPU = {
    MATMUL: "larger micro-batches, and widths that are multiples of 128; train.precision=fp8 on a Hopper card",
    ATTENTION: "head_dim 128 instead of 64, where the model is yours to choose; a shorter data.seq_len",
    MEMORY: "model.kernels=auto takes the fused ones; train.grad_checkpointing=none does nothing twice",
    OPTIMIZER: "a larger train.global_batch has fewer updates for the same tokens",
    COMMUNICATION: "more micro-batches an update hide it",
    COPIES: "data.workers above 0 copies ahead of the step",
}
_ON_A_CPU = {
    MATMUL: "a CPU's cores are the limit here: a smaller model, or a GPU",
    ATTENTION: "a shorter data.seq_len: it grows with the square",
    MEMORY: "train.compile=true joins these operators",
    OPTIMIZER: "a larger train.global_batch has fewer updates for the same tokens",
    COMMUNICATION: "fewer processes on the same cores",
    COPIES: "train.compile=true makes fewer of them",
}


def _advice(kind: str, share: float, ms: float, best: float | None, waiting: float, gpu: bool) -> str:
    """One line of what would make it shorter, if anything would."""
    if kind == IDLE:
        return _idle_advice(share, waiting, gpu)
    if share < _LITTLE:
        return "too little to matter"
    if best is not None and best >= _NEAR * ms:
        return "at the best rate known: only less work would help"
    return (_ON_A_GPU if gpu else _ON_A_CPU)[kind]


def _idle_advice(share: float, waiting: float, gpu: bool) -> str:
    if waiting > _LITTLE:
        return f"{waiting:.0%} of a step waits for data: more data.workers, or `redline prepare` first"
    if share < _LITTLE:
        return "next to nothing"
    if gpu:
        return "kernels too short for the host to keep up: larger micro-batches, train.compile=true, train.graph=true"
    return "Python between operators: train.compile=true, larger micro-batches"


# ----------------------------------------------------------------------------------------------------
# What the GPU's memory held when it held most, by the line of code that asked for it.


_POINTS = 500  # of the curve
_HOLDERS = 15
_OURS = "redline/"


@dataclass(frozen=True)
class Holder:
    where: str  # file:line function
    bytes: int
    tensors: int


@dataclass(frozen=True)
class MemoryHistory:
    peak_bytes: int
    holders: list[Holder]  # at the peak, the largest first
    rest_bytes: int  # of all others
    curve: list[int]  # bytes held, evenly from the first event to the last; the highest of each stretch

    def data(self) -> dict[str, Any]:
        return asdict(self)


def memory_history(trace: Sequence[Mapping[str, Any]]) -> MemoryHistory:
    """From the allocator's own record: events with `action`, `addr`, `size` and the `frames` of who asked."""
    changes = [event for event in trace if event.get("action") in ("alloc", "free_completed")]
    held, most, peak_at, levels = 0, 0, 0, []
    for index, event in enumerate(changes):
        held += event["size"] if event["action"] == "alloc" else -event["size"]
        levels.append(held)
        if held > most:
            most, peak_at = held, index + 1
    live: dict[int, Mapping[str, Any]] = {}
    for event in changes[:peak_at]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        else:
            live.pop(event["addr"], None)
    holders = _holders(live.values())
    shown = holders[:_HOLDERS]
    return MemoryHistory(most, shown, sum(holder.bytes for holder in holders[_HOLDERS:]), _curve(levels))


def _holders(events: Any) -> list[Holder]:
    sums: dict[str, list[int]] = {}
    for event in events:
        sums.setdefault(_where(event.get("frames") or ()), []).append(event["size"])
    found = [Holder(where, sum(sizes), len(sizes)) for where, sizes in sums.items()]
    return sorted(found, key=lambda holder: (-holder.bytes, holder.where))


def _where(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line of ours; of a library's if there is none."""
    named = [frame for frame in frames if frame.get("line")]
    ours = next((frame for frame in named if _OURS in str(frame.get("filename"))), None)
    frame = ours or (named[0] if named else None)
    if frame is None:
        return "unknown"
    path = str(frame["filename"])
    short = path[path.rindex(_OURS) :] if _OURS in path else "/".join(path.split("/")[-2:])
    return f"{short}:{frame['line']} {frame.get('name', '')}".rstrip()


def _curve(levels: Sequence[int]) -> list[int]:
    each = max(1, -(-len(levels) // _POINTS))
    return [max(levels[start : start + each]) for start in range(0, len(levels), each)]
