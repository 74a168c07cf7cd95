"""Where a step's time went, kind by kind, how far each is from its ceiling, and what could be done about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redline.monitor.events import Event, number, section
from redline.monitor.kernel_classes import (
    ATTENTION,
    CLASSES,
    COMMUNICATION,
    COPIES,
    IDLE,
    MATMUL,
    MEMORY,
    OPTIMIZER,
    kind_of,
)

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
