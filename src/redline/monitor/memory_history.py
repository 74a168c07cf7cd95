"""What the GPU's memory held when it held most, by the line of code that asked for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
