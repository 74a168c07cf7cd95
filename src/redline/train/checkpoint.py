"""Checkpoints that exist whole or not at all.

A checkpoint is a directory of files and a manifest with the size and SHA-256 of each, the manifest's own digest
included. It is written to a temporary sibling, synced, and renamed: what has the final name and a valid manifest is
committed, everything else does not exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.errors import UserError

MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"^step-(\d{8,})$")
_TEMPORARY = ".writing-"

Tensors = dict[str, Tensor]


class Damaged(Exception):  # noqa: N818
    """A checkpoint that is not what was committed."""


@dataclass(frozen=True)
class Snapshot:
    """Everything a checkpoint holds, in host memory."""

    step: int
    tensors: dict[str, Tensors]  # file stem → tensors
    state: dict[str, Any]


@dataclass(frozen=True)
class Committed:
    path: Path
    step: int
    bytes: int


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def canonical_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def commit(folder: Path, snapshot: Snapshot) -> Committed:
    """Write a checkpoint; when this returns it survives a power cut."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / step_name(snapshot.step)
    temporary = folder / f"{_TEMPORARY}{step_name(snapshot.step)}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for stem, tensors in snapshot.tensors.items():
            save_file(tensors, temporary / f"{stem}.safetensors")
        (temporary / STATE).write_bytes(canonical_json(snapshot.state))
        manifest = _manifest(temporary, snapshot.step)
        (temporary / MANIFEST).write_bytes(canonical_json(manifest))
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        if _is_valid(final):  # this step was committed before; nothing may be lost in replacing it
            shutil.rmtree(temporary)
            return Committed(final, snapshot.step, size)
        if final.exists():
            _remove(final)
        temporary.rename(final)
        _sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Committed(final, snapshot.step, size)


def _manifest(folder: Path, step: int) -> dict[str, Any]:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_digest(path)} for path in sorted(folder.iterdir())
    }
    body: dict[str, Any] = {"schema": 1, "step": step, "files": files}
    return {**body, "digest": hashlib.sha256(canonical_json(body)).hexdigest()}


def file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Renamed first, so that half a checkpoint never bears a checkpoint's name."""
    doomed = path.with_name(f"{_TEMPORARY}removed-{path.name}-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, byte for byte as it was written, or Damaged."""
    try:
        raw = (path / MANIFEST).read_bytes()
        manifest = json.loads(raw)
        body = {key: value for key, value in manifest.items() if key != "digest"}
        genuine = manifest["digest"] == hashlib.sha256(canonical_json(body)).hexdigest()
        if not genuine or canonical_json(manifest) != raw or path.name != step_name(manifest["step"]):
            raise Damaged(f"{path.name}/{MANIFEST} was changed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path.name}/{MANIFEST} cannot be read ({type(error).__name__})") from None
    return dict(manifest)


def verify(path: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint."""
    manifest = read_manifest(path)
    present = {entry.name for entry in path.iterdir()}
    if present != {*manifest["files"], MANIFEST}:
        raise Damaged(f"{path.name} lacks or has additional files: {sorted(present ^ {*manifest['files'], MANIFEST})}")
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry["bytes"] or file_digest(file) != entry["sha256"]:
            raise Damaged(f"{path.name}/{name} is not what was written")
    return manifest


def _is_valid(path: Path) -> bool:
    try:
        return bool(verify(path))
    except Damaged:
        return False


def read_state(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / STATE).read_bytes()))


def read_tensors(path: Path, stem: str, device: str = "cpu") -> Tensors:
    return load_file(path / f"{stem}.safetensors", device=device)


def committed_steps(folder: Path) -> list[int]:
    """Steps whose checkpoint has its name; valid or not is for `verify` to say."""
    if not folder.is_dir():
        return []
    names = (_NAME.match(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in names if match)


def newest_valid(folder: Path, say: Callable[[str], None] = lambda _: None) -> Path | None:
    """The newest checkpoint that verifies; what is damaged is passed over, and said."""
    for step in reversed(committed_steps(folder)):
        path = folder / step_name(step)
        try:
            verify(path)
            return path
        except Damaged as damage:
            say(f"checkpoint {path.name} is damaged ({damage}); trying the one before")
    return None


def best_step(folder: Path) -> int | None:
    """The step with the lowest validation loss, as the newest readable state remembers it."""
    for step in reversed(committed_steps(folder)):
        try:
            best = read_state(folder / step_name(step)).get("best")
            return int(best["step"]) if best else None
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def pick(folder: Path, selector: int | str | None, say: Callable[[str], None] = lambda _: None) -> Path:
    """The checkpoint that `RUN[@selector]` names, verified."""
    if selector is None:
        found = newest_valid(folder, say)
        if found is None:
            raise UserError("the run has no valid checkpoint.", where=str(folder.parent), fix="Train it first.")
        return found
    step = best_step(folder) if selector == "best" else int(selector)
    path = folder / step_name(step) if step is not None else None
    if path is None or not path.is_dir():
        known = ", ".join(str(s) for s in committed_steps(folder)) or "none"
        raise UserError(f"no checkpoint @{selector}.", where=str(folder.parent), fix=f"There are: {known}.")
    try:
        verify(path)
    except Damaged as damage:
        raise UserError(f"{damage}.", where=str(folder.parent), fix="Use another checkpoint (RUN@STEP).") from None
    return path


def clean(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.name.startswith(_TEMPORARY):
                shutil.rmtree(entry, ignore_errors=True)


def retain(folder: Path, keep: int, also: Iterable[int] = ()) -> None:
    """Keep the newest `keep` and those named; a committed checkpoint goes only when enough valid ones stay."""
    steps = committed_steps(folder)
    kept = {*steps[-keep:], *also}
    doomed = [step for step in steps if step not in kept]
    if doomed and sum(_readable(folder / step_name(step)) for step in kept if step in steps) < min(keep, len(steps)):
        return
    for step in doomed:
        _remove(folder / step_name(step))


def _readable(path: Path) -> bool:
    try:
        return bool(read_manifest(path))
    except Damaged:
        return False


def to_host(tensors: Tensors) -> Tensors:
    """A copy that training cannot change any more; one synchronisation for all."""
    copies = {
        name: torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda).copy_(t.detach(), non_blocking=t.is_cuda)
        for name, t in tensors.items()
    }
    if any(t.is_cuda for t in tensors.values()):
        torch.cuda.synchronize()
    return copies
