"""Tensors into safetensors files, one at a time: what is written need not fit into memory.

The library itself wants all tensors of a file at once. The format does not: before the values it has a header with
names, shapes and places, and those are known before any value is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from redline.errors import UserError
from redline.kernels.matmul import DTYPES
from redline.training.checkpoint import file_digest

SHARD = 5_000_000_000  # bytes of values in a file, as is usual on model hubs
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNED = 8

Shapes = Mapping[str, tuple[int, ...]]
Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Shard:
    """One file."""

    name: str
    shapes: dict[str, tuple[int, ...]]


def write_tensors(folder: Path, stem: str, shapes: Shapes, tensors: Named, dtype: str) -> None:
    """STEM.safetensors, or several and an index; `tensors` come in the order of `shapes`. All is read back."""
    kind = DTYPES[dtype]
    shards = plan_shards(stem, shapes, kind.itemsize)
    stream = _cast(tensors, dtype, shards[0].name)
    digests = {shard.name: _write(folder / shard.name, shard.shapes, stream, kind) for shard in shards}
    assert next(stream, None) is None
    if len(shards) > 1:
        total = sum(kind.itemsize * prod(shape) for shape in shapes.values())
        places = {name: shard.name for shard in shards for name in shard.shapes}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(folder / f"{stem}.safetensors.index.json", index)
    for shard in shards:
        _check(folder / shard.name, shard.shapes, digests[shard.name])


def plan_shards(stem: str, shapes: Shapes, itemsize: int) -> list[Shard]:
    """In order; another file begins with the tensor that would make the last one too large."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = itemsize * prod(shape)
        if groups[-1] and filled + size > SHARD:
            groups.append({})
            filled = 0
        groups[-1][name] = tuple(shape)
        filled += size
    if len(groups) == 1:
        return [Shard(f"{stem}.safetensors", groups[0])]
    of = f"{len(groups):05d}"
    return [Shard(f"{stem}-{number:05d}-of-{of}.safetensors", group) for number, group in enumerate(groups, 1)]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _cast(tensors: Named, dtype: str, where: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        cast = tensor.to(DTYPES[dtype])
        if not bool(torch.isfinite(cast).all()):
            fix = "Use --dtype bf16 or fp32." if dtype == "fp16" else "Export an earlier checkpoint (RUN@STEP)."
            raise UserError(f"{name} is not finite in {dtype}.", where=where, fix=fix)
        yield name, cast


def _write(path: Path, shapes: Shapes, stream: Iterator[tuple[str, Tensor]], kind: torch.dtype) -> str:
    """The digest of what was handed to the disk."""
    header = _header(shapes, kind)
    digest = hashlib.sha256(header)
    with open(path, "wb") as file:
        file.write(header)
        for expected, shape in shapes.items():
            name, tensor = next(stream)
            assert (name, tuple(tensor.shape)) == (expected, shape)
            values = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data
            digest.update(values)
            file.write(values)
    return digest.hexdigest()


def _header(shapes: Shapes, kind: torch.dtype) -> bytes:
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + kind.itemsize * prod(shape)
        about[name] = {"dtype": _NAMES[kind], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _check(path: Path, shapes: Shapes, digest: str) -> None:
    """Whatever the disk made of it, a folder gets its name only if it reads back as it was meant."""
    with safe_open(path, "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if found != dict(shapes) or file_digest(path) != digest:
        raise OSError("what was written does not read back")
