"""Checkpoints that several ranks write together: a file per rank with its rows of every tensor, and an index.

They are committed like any other checkpoint (see `checkpoint`). All ranks write into one temporary folder, and each
syncs and hashes its own files. Rank 0 writes the manifest and renames the folder after it has received every digest.
Any number of ranks can read such a checkpoint, as full tensors or by rows.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from redline.cache import check_regular, read_bytes, sync
from redline.training import checkpoint
from redline.training.checkpoint import (
    Committed,
    DamagedCheckpointError,
    Snapshot,
    Tensors,
    canonical_json,
    tensor_files,
)
from redline.training.distributed import LostRankError, Ranks
from redline.training.optim import MOMENTS_8BIT, blocks_of, quantised_anew
from redline.training.parallel import ShardSpec

SCHEMA = 1


class CommittedElsewhereError(OSError):
    """The checkpoint is committed, but not on this disk."""

    def __init__(self, what: str, size: int) -> None:
        super().__init__(errno.EREMOTEIO, what)
        self.size = size


class SharedCommit:
    """`checkpoint.commit` by all ranks at once, each with its shard.

    It runs in a background thread, so the ranks communicate through the key-value store: collectives of this thread
    would mix with those of the training steps.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.count = ranks, 0

    def __call__(self, folder: Path, snapshot: Snapshot) -> Committed:
        self.count += 1
        try:
            return self._lead(folder, snapshot) if self.ranks.is_main else self._follow(folder, snapshot)
        except LostRankError as error:
            raise OSError(errno.EIO, error.what) from None

    def _key(self, what: str | int, back: int = 0) -> str:
        return f"save-{self.count - back}/{what}"

    def _lead(self, folder: Path, snapshot: Snapshot) -> Committed:
        # Every rank has begun the last save and so has finished the one before it, whose keys can be deleted.
        if self.count > 2:
            self.ranks.delete(*(self._key(what, back=2) for what in ("folder", "done", *range(1, self.ranks.size))))
        answer: dict[str, Any] = {}
        invited = False
        try:
            with checkpoint.transaction(folder, snapshot.step) as pending:
                if not pending.done:
                    self._prepare(snapshot.step)
                self.ranks.post(self._key("folder"), None if pending.done else pending.temporary.name)
                invited = True
                if not pending.done:
                    pending.bytes = checkpoint.total_bytes(self._write_and_seal(pending.temporary, snapshot))
            answer = {"bytes": pending.bytes}
        except CommittedElsewhereError as error:  # for all ranks, or some of them would save this step again
            answer = {"bytes": error.size}
            return Committed(pending.final, snapshot.step, error.size)
        except OSError as error:
            answer = {"error": str(error)}
            raise
        finally:
            if not invited:  # the folder could not be made; the others would wait for its name, and rank 0 for them
                self.ranks.post(self._key("folder"), None)
            self.ranks.post(self._key("done"), answer)
        return pending.committed()

    def _prepare(self, step: int) -> None:
        """Do what must be done before any rank writes."""

    def _write_own(self, folder: Path, snapshot: Snapshot) -> dict[str, Any]:
        """Write this rank's files into the folder that rank 0 has named."""
        return write_shard(folder, snapshot, self.ranks)

    def _write_and_seal(self, temporary: Path, snapshot: Snapshot) -> dict[str, Any]:
        """Write rank 0's files, wait for those of the others, and write index and manifest."""
        own = self._write_own(temporary, snapshot)
        shards = [own, *(self.ranks.wait_for(self._key(rank)) for rank in range(1, self.ranks.size))]
        if failed := [shard["error"] for shard in shards if "error" in shard]:
            raise OSError(errno.EIO, failed[0])
        for stem in snapshot.tensors:
            index = _merge([shard["index"][stem] for shard in shards])
            (temporary / index_name(stem)).write_bytes(canonical_json({"schema": SCHEMA, "tensors": index}))
        digests = {name: entry for shard in shards for name, entry in shard["files"].items()}
        return checkpoint.seal(temporary, snapshot, digests)

    def _follow(self, folder: Path, snapshot: Snapshot) -> Committed:
        name = self.ranks.wait_for(self._key("folder"))
        if name is not None:
            try:
                shard = self._write_own(folder / name, snapshot)
            except OSError as error:
                shard = {"error": f"rank {self.ranks.rank}: {error}"}
            self.ranks.post(self._key(self.ranks.rank), shard)
        answer = self.ranks.wait_for(self._key("done"))
        if "bytes" not in answer:
            raise OSError(errno.EIO, answer.get("error", "rank 0 did not finish the save"))
        return Committed(folder / checkpoint.step_name(snapshot.step), snapshot.step, int(answer["bytes"]))


def write_shard(folder: Path, snapshot: Snapshot, ranks: Ranks) -> dict[str, Any]:
    """Write and sync this rank's files; return their manifest entries and which rows they hold."""
    files: dict[str, Any] = {}
    index: dict[str, Any] = {}
    for stem, tensors in snapshot.tensors.items():
        index[stem] = {}
        if not tensors:  # this rank holds the same rows as another one
            continue
        path = folder / f"{stem}-{ranks.rank + 1:05d}-of-{ranks.size:05d}.safetensors"
        try:
            save_file(tensors, path)
            checkpoint.match_folder_permissions(path)
        except SafetensorError as error:  # safetensors raises this for a full disk
            raise OSError(errno.EIO, str(error)) from None
        sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": checkpoint.file_digest(path)}
        specs = snapshot.shard_specs[stem]
        index[stem] = {name: [path.name, specs[name].start, list(specs[name].shape)] for name in tensors}
    return {"files": files, "index": index}


def _merge(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the index: for each tensor its shape, and which file holds it from which row on.

    Of a tensor that every rank holds in full (from row 0), the index lists only the first file.
    """
    index: dict[str, Any] = {}
    for shard in shards:
        for name, (file, start, shape) in shard.items():
            entry = index.setdefault(name, {"shape": shape, "parts": []})
            if start not in [first for _, first in entry["parts"]]:
                entry["parts"].append([file, start])
    return index


def index_name(stem: str) -> str:
    return f"{stem}.index.json"


def read_full_tensors(path: Path, stem: str, device: str = "cpu") -> Tensors:
    """Read every tensor in full from the files of all ranks."""
    index = _read_index(path, stem)
    return _Reader(path, index).read({name: (0, entry["shape"]) for name, entry in index.items()}, device)


def read_rows(path: Path, stem: str, tensors: Mapping[str, Tensor], specs: Mapping[str, ShardSpec]) -> Tensors:
    """Read the rows that these tensors hold, from a checkpoint of any number of ranks.

    Quantised moments of other rows than these were saved in other blocks, and are quantised anew.
    """
    if (path / f"{stem}.safetensors").is_file():
        index = _index_of_single_file(path, stem)
    else:
        index = _read_index(path, stem)
    rows = {name: (specs[name].start, list(tensor.shape)) for name, tensor in tensors.items()}
    reader = _Reader(path, index)
    moments = [(f"{name}_8bit", f"{name}_scale", signed) for name, signed in _quantised(index, tensors)]
    apart = {name for codes, scales, _ in moments for name in (codes, scales)}
    found = reader.read({name: place for name, place in rows.items() if name not in apart})
    for codes, scales, signed in moments:
        found[codes], found[scales] = reader.read_blocks(codes, scales, *rows[codes], signed=signed)
    return found


def _quantised(index: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, bool]]:
    """Yield the name of each quantised moment without its suffix, and whether it has a sign."""
    for name in tensors:
        base, _, kind = name.removesuffix("_8bit").rpartition(".")
        if name.endswith("_8bit") and kind in MOMENTS_8BIT and name in index:
            yield f"{base}.{kind}", MOMENTS_8BIT[kind]


def check_index(path: Path, stem: str) -> None:
    """Check that an index names only files of its checkpoint, and all rows of each tensor exactly once.

    Raise DamagedCheckpointError if not, or the error of reading the files.
    """
    reader = _Reader(path, _read_index(path, stem))
    for name, entry in reader.index.items():
        reached = 0
        for file, start in sorted(entry["parts"], key=lambda part: part[1]):
            if file not in tensor_files(path, stem):
                raise DamagedCheckpointError(
                    f"{path.name}/{index_name(stem)} names a file that is not part of the checkpoint"
                )
            shape = reader.shape(file, name)
            if shape[1:] != entry["shape"][1:] or (shape and start != reached):
                raise DamagedCheckpointError(f"{path.name}/{index_name(stem)} does not agree with {file}")
            reached += shape[0] if shape else 0
        if entry["shape"] and reached != entry["shape"][0]:
            raise DamagedCheckpointError(f"{path.name}/{index_name(stem)} does not cover all rows of {name}")


def _read_index(path: Path, stem: str) -> dict[str, Any]:
    return dict(json.loads(read_bytes(path / index_name(stem)))["tensors"])


def _index_of_single_file(path: Path, stem: str) -> dict[str, Any]:
    name = f"{stem}.safetensors"
    with safe_open(check_regular(path / name), framework="pt") as file:
        return {key: {"shape": file.get_slice(key).get_shape(), "parts": [[name, 0]]} for key in list(file.keys())}


class _Reader:
    """Reads rows of tensors through an index; opens each file once."""

    def __init__(self, path: Path, index: dict[str, Any]) -> None:
        self.path, self.index = path, index
        self._open: dict[str, Any] = {}

    def read(self, rows: Mapping[str, tuple[int, list[int]]], device: str = "cpu") -> Tensors:
        """Read, for each name, the rows from `start` on that fill a tensor of `shape`. Unknown names are left out."""
        known = {name: place for name, place in rows.items() if name in self.index}
        return {name: self._read_tensor(name, start, shape).to(device) for name, (start, shape) in known.items()}

    def _read_tensor(self, name: str, start: int, shape: list[int]) -> Tensor:
        entry = self.index[name]
        if not shape:
            scalar: Tensor = self._file(entry["parts"][0][0]).get_tensor(name)
            return scalar
        pieces, end = [], start + shape[0]
        for file, first in sorted(entry["parts"], key=lambda part: part[1]):
            rows = self._file(file).get_slice(name)
            begin, stop = max(start, first), min(end, first + rows.get_shape()[0])
            if begin < stop:
                pieces.append(rows[begin - first : stop - first])
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

    def read_blocks(
        self, codes: str, scales: str, start: int, shape: list[int], *, signed: bool
    ) -> tuple[Tensor, Tensor]:
        """Read the rows of a quantised moment from `start` on, with the scale of each of its blocks."""
        full, width = self.index[codes]["shape"], math.prod(shape[1:])
        starts = sorted({first * width for _, first in self.index[codes]["parts"]})
        everything, every_scale = (self._read_tensor(name, 0, self.index[name]["shape"]) for name in (codes, scales))
        first, count = start * width, shape[0] * width
        ends = [*starts[1:], math.prod(full)]
        if (first, first + count) in zip(starts, ends, strict=True):  # these very blocks
            before = sum(blocks_of(b - a) for a, b in zip(starts, ends, strict=True) if a < first)
            return everything[start : start + shape[0]], every_scale[before : before + blocks_of(count)]
        found, largest = quantised_anew(everything, every_scale, starts, first, count, signed=signed)
        return found.view(shape), largest

    def shape(self, file: str, name: str) -> list[int]:
        shape: list[int] = self._file(file).get_slice(name).get_shape()
        return shape

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(check_regular(self.path / name), framework="pt").__enter__()
        return self._open[name]
