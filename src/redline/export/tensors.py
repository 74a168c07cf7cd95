"""Write safetensors files one tensor at a time, so that a model need not fit into memory.

The safetensors library needs all tensors of a file at once. The format does not: it starts with a header of names,
shapes and offsets, and these are known before any value is.
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

SHARD = 5_000_000_000  # bytes of values per file, the usual limit on model hubs
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_HEADER_ALIGNMENT = 8  # bytes

Shapes = Mapping[str, tuple[int, ...]]
Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Shard:
    """One file of weights."""

    name: str
    shapes: dict[str, tuple[int, ...]]


def write_tensors(folder: Path, stem: str, shapes: Shapes, tensors: Named, dtype: str) -> None:
    """Write STEM.safetensors, or several files and an index; then read all of it back.

    `tensors` must come in the order of `shapes`.
    """
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
    """Distribute the tensors over files, in order. A file ends before the tensor that would make it too large."""
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
    """Write one file, and return the digest of the bytes that were passed to the disk."""
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
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + kind.itemsize * prod(shape)
        header[name] = {"dtype": _NAMES[kind], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _check(path: Path, shapes: Shapes, digest: str) -> None:
    """Raise an OSError unless the file reads back as it was written: the export then never gets its final name."""
    with safe_open(path, "pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if stored != dict(shapes) or file_digest(path) != digest:
        raise OSError(f"{path.name} does not read back as it was written")
