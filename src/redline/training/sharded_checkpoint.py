"""Checkpoints that several ranks write together: rows of every tensor in a file of each, and an index over them.

They are committed as any other (see `checkpoint`): all write into one temporary folder, each syncs and hashes its own
files, and when every digest has arrived the first rank writes the manifest and renames the folder. They are read by
any number of ranks, whole or by rows.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
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
from redline.training.parallel import ShardSpec

SCHEMA = 1


class SharedCommit:
    """`checkpoint.commit` by all ranks at once, each with its part. Runs beside the steps: it speaks by the store."""

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
        if self.count > 2:  # whoever began this save has ended the one before the last
            self.ranks.delete(*(self._key(what, back=2) for what in ("folder", "done", *range(1, self.ranks.size))))
        answer: dict[str, Any] = {}
        try:
            with checkpoint.committing(folder, snapshot.step) as writing:
                self.ranks.post(self._key("folder"), None if writing.done else writing.temporary.name)
                if not writing.done:
                    writing.bytes = checkpoint.total_bytes(self._complete(writing.temporary, snapshot))
            answer = {"bytes": writing.bytes}
        except OSError as error:
            answer = {"error": str(error)}
            raise
        finally:
            self.ranks.post(self._key("done"), answer)
        return writing.committed()

    def _complete(self, temporary: Path, snapshot: Snapshot) -> dict[str, Any]:
        own = _write_share(temporary, snapshot, self.ranks)
        shares = [own, *(self.ranks.wait_for(self._key(rank)) for rank in range(1, self.ranks.size))]
        if failed := [share["error"] for share in shares if "error" in share]:
            raise OSError(errno.EIO, failed[0])
        for stem in snapshot.tensors:
            index = _merged([share["index"][stem] for share in shares])
            (temporary / index_name(stem)).write_bytes(canonical_json({"schema": SCHEMA, "tensors": index}))
        digests = {name: entry for share in shares for name, entry in share["files"].items()}
        return checkpoint.seal(temporary, snapshot, digests)

    def _follow(self, folder: Path, snapshot: Snapshot) -> Committed:
        name = self.ranks.wait_for(self._key("folder"))
        if name is not None:
            try:
                share = _write_share(folder / name, snapshot, self.ranks)
            except OSError as error:
                share = {"error": f"rank {self.ranks.rank}: {error}"}
            self.ranks.post(self._key(self.ranks.rank), share)
        answer = self.ranks.wait_for(self._key("done"))
        if "bytes" not in answer:
            raise OSError(errno.EIO, answer.get("error", "the first rank did not finish the save"))
        return Committed(folder / checkpoint.step_name(snapshot.step), snapshot.step, int(answer["bytes"]))


def _write_share(folder: Path, snapshot: Snapshot, ranks: Ranks) -> dict[str, Any]:
    """This rank's files, on the disk; what they hold, and their digests."""
    files, index = {}, {}
    for stem, tensors in snapshot.tensors.items():
        path = folder / f"{stem}-{ranks.rank + 1:05d}-of-{ranks.size:05d}.safetensors"
        try:
            save_file(tensors, path)
            checkpoint.match_folder_permissions(path)
        except SafetensorError as error:  # how safetensors says that the disk is full
            raise OSError(errno.EIO, str(error)) from None
        sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": checkpoint.file_digest(path)}
        places = snapshot.places[stem]
        index[stem] = {name: [path.name, places[name].start, list(places[name].shape)] for name in tensors}
    return {"files": files, "index": index}


def _merged(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each tensor its shape, and which file holds it from which row on; what all have whole is the first's."""
    found: dict[str, Any] = {}
    for share in shares:
        for name, (file, start, shape) in share.items():
            entry = found.setdefault(name, {"shape": shape, "parts": []})
            if start not in [first for _, first in entry["parts"]]:
                entry["parts"].append([file, start])
    return found


def index_name(stem: str) -> str:
    return f"{stem}.index.json"


def read_whole(path: Path, stem: str, device: str = "cpu") -> Tensors:
    """Consolidated."""
    index = _index(path, stem)
    places = {name: (0, entry["shape"]) for name, entry in index.items()}
    return _Reader(path, index).read(places, device)


def read_rows(path: Path, stem: str, tensors: Mapping[str, Tensor], places: Mapping[str, ShardSpec]) -> Tensors:
    """What belongs into these tensors, at their places in the whole: of a checkpoint of however many ranks."""
    if (path / f"{stem}.safetensors").is_file():
        index = _single(path, stem)
    else:
        index = _index(path, stem)
    wanted = {name: (places[name].start, list(tensor.shape)) for name, tensor in tensors.items()}
    return _Reader(path, index).read(wanted)


def check_index(path: Path, stem: str) -> None:
    """That an index speaks of this checkpoint's own files alone, and of all rows of each tensor; else Damaged, or
    what reading it raises."""
    reader = _Reader(path, _index(path, stem))
    for name, entry in reader.index.items():
        reached = 0
        for file, start in sorted(entry["parts"], key=lambda part: part[1]):
            if file not in tensor_files(path, stem):
                raise DamagedCheckpointError(f"{path.name}/{index_name(stem)} names a file that is none of its own")
            shape = reader.shape(file, name)
            if shape[1:] != entry["shape"][1:] or (shape and start != reached):
                raise DamagedCheckpointError(f"{path.name}/{index_name(stem)} does not fit what {file} holds")
            reached += shape[0] if shape else 0
        if entry["shape"] and reached != entry["shape"][0]:
            raise DamagedCheckpointError(f"{path.name}/{index_name(stem)} lacks rows of {name}")


def _index(path: Path, stem: str) -> dict[str, Any]:
    return dict(json.loads(read_bytes(path / index_name(stem)))["tensors"])


def _single(path: Path, stem: str) -> dict[str, Any]:
    name = f"{stem}.safetensors"
    with safe_open(check_regular(path / name), framework="pt") as file:
        return {key: {"shape": file.get_slice(key).get_shape(), "parts": [[name, 0]]} for key in list(file.keys())}


class _Reader:
    def __init__(self, path: Path, index: dict[str, Any]) -> None:
        self.path, self.index = path, index
        self._open: dict[str, Any] = {}

    def read(self, wanted: Mapping[str, tuple[int, list[int]]], device: str = "cpu") -> Tensors:
        there = {name: place for name, place in wanted.items() if name in self.index}
        return {name: self._one(name, start, shape).to(device) for name, (start, shape) in there.items()}

    def _one(self, name: str, start: int, shape: list[int]) -> Tensor:
        entry = self.index[name]
        if not shape:
            whole: Tensor = self._file(entry["parts"][0][0]).get_tensor(name)
            return whole
        pieces, end = [], start + shape[0]
        for file, first in sorted(entry["parts"], key=lambda part: part[1]):
            rows = self._file(file).get_slice(name)
            begin, stop = max(start, first), min(end, first + rows.get_shape()[0])
            if begin < stop:
                pieces.append(rows[begin - first : stop - first])
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

    def shape(self, file: str, name: str) -> list[int]:
        found: list[int] = self._file(file).get_slice(name).get_shape()
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(check_regular(self.path / name), framework="pt").__enter__()
        return self._open[name]
