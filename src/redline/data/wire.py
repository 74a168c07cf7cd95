"""Latents as bytes: half precision, or whole numbers of 8 or 4 bits with an fp16 scale for each group of 32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from redline.plan.wire import BITS, GROUP, wire_bytes

Floats = npt.NDArray[np.float32]


def to_wire(values: Floats, kind: str) -> bytes:
    """Symmetric: a group's largest magnitude becomes the largest number. Scales come first, then the numbers."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if kind == "fp16":
        return flat.astype("<f2").tobytes()
    most = 2 ** (BITS[kind] - 1) - 1
    groups = np.pad(flat, (0, -len(flat) % GROUP)).reshape(-1, GROUP)
    scales = np.minimum(np.abs(groups).max(1) / most, np.finfo(np.float16).max).astype("<f2")
    safe = np.where(scales > 0, scales, 1).astype(np.float32)[:, None]
    numbers = np.clip(np.rint(groups / safe), -most, most).astype(np.int8).reshape(-1)[: len(flat)]
    packed = numbers if kind == "int8" else _nibbles(numbers)
    return scales.tobytes() + packed.tobytes()


def from_wire(sent: bytes, shape: tuple[int, ...], kind: str) -> Floats:
    count = int(np.prod(shape))
    if len(sent) != wire_bytes(count, kind):
        raise ValueError(f"{len(sent)} bytes are not {count} values in {kind}")
    if kind == "fp16":
        return np.frombuffer(sent, dtype="<f2").astype(np.float32).reshape(shape)
    groups = -(-count // GROUP)
    scales = np.frombuffer(sent, dtype="<f2", count=groups).astype(np.float32)
    rest = np.frombuffer(sent, dtype=np.int8, offset=2 * groups)
    numbers = rest if kind == "int8" else _from_nibbles(rest, count)
    values: Floats = (numbers.astype(np.float32) * np.repeat(scales, GROUP)[:count]).reshape(shape)
    return values


def _nibbles(numbers: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    pairs = np.pad(numbers, (0, len(numbers) % 2)).reshape(-1, 2).astype(np.uint8) & 15
    return (pairs[:, 0] | (pairs[:, 1] << 4)).astype(np.uint8)


def _from_nibbles(packed: npt.NDArray[np.int8], count: int) -> npt.NDArray[np.int8]:
    raw = packed.view(np.uint8)
    both = np.stack((raw & 15, raw >> 4), 1).reshape(-1)[:count].astype(np.int8)
    signed: npt.NDArray[np.int8] = np.where(both > 7, both - 16, both).astype(np.int8)
    return signed
