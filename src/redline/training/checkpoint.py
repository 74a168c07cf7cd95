"""Checkpoints: atomic commits, verification, retention, background saving, and reading weights back.

A checkpoint is a directory of files and a manifest with the size and SHA-256 of each file and of the manifest itself.
It is written to a temporary directory beside its final place, synced and renamed. So a directory with the final name
and a valid manifest is committed, and anything else counts as missing. Links count as damage, because all files of a
checkpoint must lie within its run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.cache import check_regular, open_regular, read_bytes, sync
from redline.errors import UserError
from redline.recipe.schema import Checkpoint
from redline.runs.monitor import Monitor
from redline.runs.summary import disk_bytes, is_locked, run_status
from redline.training.control import RunDirectory
from redline.training.schedule import StepTimer
from redline.vocabulary import CHECKPOINTS_FOLDER, Status

if TYPE_CHECKING:
    from redline.training.mirror import Mirror

MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})", re.ASCII)
_TEMPORARY = ".writing-"

Tensors = dict[str, Tensor]


class DamagedCheckpointError(Exception):
    """A checkpoint differs from what was committed, or cannot be read."""


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint, in host memory."""

    step: int
    tensors: dict[str, Tensors]  # file stem → tensors
    state: dict[str, Any]
    # for checkpoints of several ranks: file stem → tensor name → ShardSpec of this rank's rows
    shard_specs: dict[str, dict[str, Any]] = field(default_factory=dict)


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
    """Write a checkpoint. When this returns, it survives a power cut. Raise OSError if the disk fails."""
    with transaction(folder, snapshot.step) as pending:
        if not pending.done:
            pending.bytes = total_bytes(_write(pending.temporary, snapshot))
    return pending.committed()


@dataclass
class PendingCheckpoint:
    """A checkpoint that is being written: files go into `temporary`, which is then renamed to `final`."""

    temporary: Path
    final: Path
    step: int
    bytes: int = 0

    @property
    def done(self) -> bool:
        """Whether this step is committed already. It is not replaced, because that could lose it."""
        return self.bytes > 0

    def committed(self) -> Committed:
        return Committed(self.final, self.step, self.bytes)


@contextmanager
def transaction(folder: Path, step: int) -> Iterator[PendingCheckpoint]:
    """Make a temporary folder for a checkpoint; on success rename it to its final name, else delete it."""
    # Without parents=True: if the run directory was moved away, it must not be created again at its old place.
    folder.mkdir(exist_ok=True)
    # Sync even if the folder exists: the process that made it may have been killed before its own sync.
    sync(folder.parent)
    final, temporary = folder / step_name(step), folder / f"{_TEMPORARY}{step_name(step)}-{os.getpid()}"
    pending = PendingCheckpoint(temporary, final, step)
    if _is_valid(final):
        pending.bytes = total_bytes(read_manifest(final))
        sync(folder)  # this sync may be what failed in the save before
        yield pending
        return
    _delete(temporary)
    try:
        temporary.mkdir()
        yield pending
        if os.path.lexists(final):
            remove_checkpoint(final)
        temporary.rename(final)
        sync(folder)
    except BaseException:
        _delete(temporary)
        raise


def _write(folder: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Write and sync all files, the manifest last."""
    for stem, tensors in snapshot.tensors.items():
        try:
            save_file(tensors, folder / f"{stem}.safetensors")
            match_folder_permissions(folder / f"{stem}.safetensors")
        except SafetensorError as error:  # safetensors raises this for a full disk
            raise OSError(errno.EIO, str(error)) from None
    return seal(folder, snapshot)


def match_folder_permissions(path: Path) -> None:
    """Make a file as readable as its folder. safetensors creates files that only the owner can read."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def seal(folder: Path, snapshot: Snapshot, known: Mapping[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Write state and manifest and sync the folder; return the manifest.

    `known` has the manifest entries of files that other ranks have written and synced, here or on their own disks.
    """
    (folder / STATE).write_bytes(canonical_json(snapshot.state))
    manifest = _manifest(folder, snapshot.step, known or {})
    (folder / MANIFEST).write_bytes(canonical_json(manifest))
    for path in folder.iterdir():
        if path.name not in (known or {}):
            sync(path)
    sync(folder)
    return manifest


def _manifest(folder: Path, step: int, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    own = [path for path in folder.iterdir() if path.name not in known]
    files = {**known, **{path.name: _entry(path) for path in own}}
    body: dict[str, Any] = {"schema": 1, "step": step, "files": files}
    return {**body, "digest": hashlib.sha256(canonical_json(body)).hexdigest()}


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def total_bytes(manifest: dict[str, Any]) -> int:
    return sum(entry["bytes"] for entry in manifest["files"].values())


def file_digest(path: Path) -> str:
    with open(path, "rb", opener=open_regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_checkpoint(path: Path) -> None:
    """Rename, then delete. A half-deleted directory must never have the name of a checkpoint."""
    doomed = path.with_name(f"{_TEMPORARY}removed-{path.name}-{os.getpid()}")
    path.rename(doomed)
    sync(path.parent)  # without it, a power cut could keep the old name and lose files below it
    _delete(doomed)


def _delete(path: Path) -> None:
    """Delete as much as possible. What remains has a temporary name, so it is never taken for a checkpoint."""
    with suppress(OSError):
        path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest. Raise DamagedCheckpointError if a single byte of it has changed."""
    try:
        raw = read_bytes(path / MANIFEST)
    except OSError as error:
        raise DamagedCheckpointError(f"{path.name}/{MANIFEST} cannot be read ({type(error).__name__})") from None
    return parse_manifest(raw, path.name)


def parse_manifest(raw: bytes, name: str) -> dict[str, Any]:
    """Return the manifest of the checkpoint `name` from its bytes. Raise DamagedCheckpointError if one has changed."""
    try:
        manifest = json.loads(raw)
        body = {key: value for key, value in manifest.items() if key != "digest"}
        genuine = manifest["digest"] == hashlib.sha256(canonical_json(body)).hexdigest()
        if not genuine or canonical_json(manifest) != raw or name != step_name(manifest["step"]):
            raise DamagedCheckpointError(f"{name}/{MANIFEST} was changed")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{name}/{MANIFEST} cannot be read ({type(error).__name__})") from None
    return dict(manifest)


def verify(path: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint and return its manifest. Raise DamagedCheckpointError if anything is wrong."""
    if path.is_symlink():
        raise DamagedCheckpointError(f"{path.name} is a symbolic link")
    manifest = read_manifest(path)
    try:
        _check_files(path, manifest["files"])
        _check_content(path, manifest)
    except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise DamagedCheckpointError(f"{path.name} cannot be read ({type(error).__name__})") from None
    return manifest


def _check_content(path: Path, manifest: dict[str, Any]) -> None:
    """Check that the files have the right format.

    Digests are no signature: files with consistent digests may come from anywhere, and need not hold tensors.
    """
    for name in manifest["files"]:
        if name.endswith(".safetensors"):
            with safe_open(check_regular(path / name), "pt"):  # reads only the header
                pass
        elif name.endswith(".index.json"):
            from redline.training.sharded_checkpoint import check_index  # that module imports this one

            check_index(path, name.removesuffix(".index.json"))
    if read_state(path)["step"] != manifest["step"]:
        raise DamagedCheckpointError(f"{path.name}/{STATE} belongs to another step")


def _check_files(path: Path, files: dict[str, dict[str, Any]]) -> None:
    present = {entry.name for entry in path.iterdir()}
    if present != {*files, MANIFEST}:
        different = sorted(present ^ {*files, MANIFEST})
        raise DamagedCheckpointError(f"{path.name} has missing or additional files: {different}")
    for name, entry in files.items():
        file = path / name
        right_size = file.is_file() and not file.is_symlink() and file.stat().st_size == entry["bytes"]
        if not right_size or file_digest(file) != entry["sha256"]:
            raise DamagedCheckpointError(f"{path.name}/{name} has changed since it was written")


def _is_valid(path: Path) -> bool:
    try:
        return bool(verify(path))
    except DamagedCheckpointError:
        return False


def read_state(path: Path) -> dict[str, Any]:
    return dict(json.loads(read_bytes(path / STATE)))


def read_tensors(path: Path, stem: str, device: str = "cpu") -> Tensors:
    """Read full tensors, whether one process or several ranks wrote them."""
    single = path / f"{stem}.safetensors"
    if single.is_file():
        return load_file(check_regular(single), device=device)
    from redline.training.sharded_checkpoint import read_full_tensors  # that module imports this one

    return read_full_tensors(path, stem, device)


def tensor_files(path: Path, stem: str) -> list[str]:
    """Return the names of the files that hold these tensors: one file, or one per rank."""
    names = (entry.name for entry in path.glob(f"{stem}*.safetensors"))
    return sorted(n for n in names if n == f"{stem}.safetensors" or re.fullmatch(rf"{stem}-\d+-of-\d+\.safetensors", n))


def committed_steps(folder: Path) -> list[int]:
    """Return the steps of all directories with the name of a checkpoint, without verifying them."""
    if not folder.is_dir():
        return []
    matches = {entry.name: _NAME.fullmatch(entry.name) for entry in folder.iterdir()}
    steps = {name: int(match[1]) for name, match in matches.items() if match}
    return sorted(step for name, step in steps.items() if name == step_name(step))


def newest_valid(
    folder: Path, warn: Callable[[str], None] = lambda _: None, *, below: int | None = None
) -> Path | None:
    """Return the newest checkpoint that verifies, or None. `below` limits it to earlier steps.

    Damaged checkpoints are skipped with a warning.
    """
    for step in reversed([s for s in committed_steps(folder) if below is None or s < below]):
        path = folder / step_name(step)
        try:
            verify(path)
            return path
        except DamagedCheckpointError as damage:
            warn(f"checkpoint {path.name} is damaged ({damage}); looking for an earlier one")
    return None


def best_step(folder: Path) -> int | None:
    """Return the step with the lowest validation loss, by the newest readable state; None if there is none."""
    for step in reversed(committed_steps(folder)):
        try:
            best = read_state(folder / step_name(step)).get("best")
            return int(best["step"]) if best else None
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def select_checkpoint(folder: Path, selector: int | str | None, warn: Callable[[str], None] = lambda _: None) -> Path:
    """Return the checkpoint that `RUN[@selector]` names, verified. Without a selector: the newest valid one."""
    if selector is None:
        newest = newest_valid(folder, warn)
        if newest is None and is_locked(folder.parent):
            fix = "Wait for its first checkpoint (checkpoint.every)."
            raise UserError("the run is training and has not saved yet.", where=str(folder.parent), fix=fix)
        if newest is None:
            raise UserError("the run has no valid checkpoint.", where=str(folder.parent), fix="Train it first.")
        return newest
    step = best_step(folder) if selector == "best" else int(selector)
    path = folder / step_name(step) if step is not None else None
    if path is None or not path.is_dir():
        known = ", ".join(str(s) for s in committed_steps(folder)) or "none"
        raise UserError(
            f"no checkpoint @{selector}.", where=str(folder.parent), fix=f"Steps with a checkpoint: {known}."
        )
    try:
        verify(path)
    except DamagedCheckpointError as damage:
        raise UserError(f"{damage}.", where=str(folder.parent), fix="Use another checkpoint (RUN@STEP).") from None
    return path


def temporaries(folder: Path) -> list[Path]:
    """Return the folders that interrupted saves left behind."""
    return [entry for entry in folder.iterdir() if entry.name.startswith(_TEMPORARY)] if folder.is_dir() else []


def remove_temporaries(folder: Path) -> None:
    for entry in temporaries(folder):
        _delete(entry)


def steps_to_delete(folder: Path, keep: int, also: Iterable[int] = (), fresh: int | None = None) -> list[int]:
    """Return the steps to delete: older than the newest `keep` valid checkpoints, and not in `also`.

    `fresh` was committed a moment ago, so it is not verified again.
    """
    kept, valid, outdated = {*also, fresh}, 0, []
    for step in reversed(committed_steps(folder)):
        if valid < keep:
            valid += step == fresh or _is_intact(folder / step_name(step))
        elif step not in kept:
            outdated.append(step)
    return outdated


def apply_retention(folder: Path, keep: int, also: Iterable[int] = (), fresh: int | None = None) -> None:
    """Keep the newest `keep` valid checkpoints and those in `also`; delete older ones."""
    for step in steps_to_delete(folder, keep, also, fresh):
        remove_checkpoint(folder / step_name(step))


def _is_intact(path: Path) -> bool:
    """Return whether a checkpoint is valid, from a cache unless its files have changed.

    Otherwise every save would read all checkpoints that are kept.
    """
    try:
        stats = sorted((entry.name, entry.stat()) for entry in path.iterdir())
    except OSError:
        return False
    return _was_valid(path, tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats))


@lru_cache(maxsize=256)
def _was_valid(path: Path, files: tuple[tuple[str, int, int, int, int], ...]) -> bool:
    return _is_valid(path)


# ----------------------------------------------------------------------------------------------------
# Saving in the background: copy to host memory, then write in a thread while training continues. One save at a time.


OnSaved = Callable[[Committed, float], None]
OnFailed = Callable[[OSError], None]
Clock = Callable[[], float]
Commit = Callable[[Path, Snapshot], Committed]


class BackgroundSaver:
    """Commits snapshots in a background thread. `on_saved` is called only after the rename."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        on_saved: OnSaved,
        on_failed: OnFailed,
        clock: Clock = time.monotonic,
        shared_commit: Commit | None = None,
        deletes_old: bool = True,
        mirror: Mirror | None = None,
    ) -> None:
        """`shared_commit` commits together with the other ranks, of which only one deletes old checkpoints.

        `mirror` copies what is committed, and spares the checkpoint from deletion that it is copying.
        """
        self.folder, self.keep, self._clock = folder, keep, clock
        self._shared_commit, self._deletes_old, self._mirror = shared_commit, deletes_old, mirror
        self._on_saved, self._on_failed = on_saved, on_failed
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, snapshot: Snapshot, protect: tuple[int, ...] = ()) -> None:
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot, protect), name="checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in progress, and raise its error if it failed in an unexpected way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, snapshot: Snapshot, protect: tuple[int, ...]) -> None:
        try:
            self._commit(snapshot, protect)
        except BaseException as error:  # `wait` raises it in the main thread
            self._error = error

    def _commit(self, snapshot: Snapshot, protect: tuple[int, ...]) -> None:
        begin = self._clock()
        try:
            done = (self._shared_commit or commit)(self.folder, snapshot)
        except OSError as error:  # for example a full disk: earlier checkpoints are intact and training can continue
            self._on_failed(error)
            return
        self._on_saved(done, self._clock() - begin)
        if not self._deletes_old:
            return
        with suppress(OSError), nullcontext(()) if self._mirror is None else self._mirror.held() as copying:
            # what cannot be deleted now is tried again after the next save
            apply_retention(self.folder, self.keep, (*protect, *copying), fresh=snapshot.step)
        if self._mirror is not None:
            self._mirror.committed(protect)


class HostCopy:
    """Copies tensors to host memory, so that training cannot change them while they are written.

    The memory is reused, because pinning new memory takes longer than the copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensors] = {}

    def take(self, files: dict[str, Tensors]) -> dict[str, Tensors]:
        """Return copies of the tensors of each file. They are valid until the next call."""
        for stem, tensors in files.items():
            buffers = self._buffers.setdefault(stem, {})
            for name, tensor in tensors.items():
                if name not in buffers:
                    buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                buffers[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {stem: self._buffers[stem] for stem in files}


# ----------------------------------------------------------------------------------------------------
# The checkpoints of a run in training.


# bytes/s of a save, hashed and synced; 0.46e9 to 0.61e9 measured on the disk of a rented cloud machine
EXPECTED_DISK_SPEED = 0.5e9


class CheckpointManager:
    """Saves the checkpoints of a run, reports them, and measures what a save costs.

    If all ranks hold the same tensors, rank 0 saves them. With `shared_commit`, every rank saves its shard.
    """

    def __init__(
        self,
        run: RunDirectory,
        monitor: Monitor,
        timer: StepTimer,
        options: Checkpoint,
        *,
        is_main: bool = True,
        shared_commit: Commit | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.run, self.monitor, self.timer, self.options = run, monitor, timer, options
        self.shared = shared_commit is not None
        self.writes = is_main or self.shared
        self.saved_at: int | None = None  # step of the last save that has not failed
        self._host = HostCopy()
        self._measured = False  # a save has been timed
        self._stall = 0.0  # seconds that training waited for the last snapshot
        self._saver = BackgroundSaver(
            run.checkpoints,
            keep=options.keep,
            on_saved=self._saved,
            on_failed=self._failed,
            clock=timer.clock,
            shared_commit=shared_commit,
            deletes_old=is_main,
            mirror=mirror,
        )

    def estimate_save_time(self, files: dict[str, Tensors]) -> None:
        """Estimate the time of a save by its size, for the time budget, until one has been measured."""
        size = sum(t.numel() * t.element_size() for tensors in files.values() for t in tensors.values())
        self.timer.final_seconds.setdefault("save", size / EXPECTED_DISK_SPEED)

    def save(
        self,
        step: int,
        files: dict[str, Tensors],
        record: dict[str, Any],
        best: int | None,
        shard_specs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Copy the tensors now and commit them in the background. A step is saved only once."""
        self._saver.wait()  # if the last save has failed, `_failed` has reset `saved_at`
        if self.saved_at == step:
            return
        self.saved_at = step
        if not self.writes:
            return
        begin = self.timer.clock()
        self._saver.folder = self.run.checkpoints  # the directory may have been moved since the last save
        snapshot = Snapshot(step, self._host.take(files), record, shard_specs or {})
        self._stall = self.timer.clock() - begin
        self.timer.paused += self._stall
        self._saver.save(snapshot, protect=(best,) if self.options.best and best is not None else ())

    def wait(self) -> None:
        """Wait for the save in progress, before an error ends the process.

        Do not wait for a save that needs the other ranks: they may have failed too, and it would never end.
        """
        if not self.shared:
            self._saver.wait()

    def finish(self, step: int) -> bool:
        """Wait for the save in progress; return whether this step is committed, and warn if it is not."""
        self._saver.wait()
        if self.saved_at != step:
            before = committed_steps(self.run.checkpoints)
            rest = f"the last checkpoint is of step {before[-1]}" if before else "there is no checkpoint"
            self.monitor.warn(f"the last state of this run could not be saved; {rest}")
        return self.saved_at == step

    def _saved(self, done: Committed, seconds: float) -> None:
        known = self.timer.final_seconds.get("save", 0.0) if self._measured else 0.0
        self.timer.final_seconds["save"], self._measured = max(known, seconds), True
        path = done.path.relative_to(done.path.parent.parent)  # relative to the run directory, which may be moved
        self.monitor.emit(
            "checkpoint", step=done.step, path=path, seconds=seconds, stall_s=self._stall, bytes=done.bytes
        )

    def _failed(self, error: OSError) -> None:
        self.saved_at = None
        if self.run.moved():
            self.monitor.warn(f"a checkpoint could not be written: the run directory is no longer at {self.run.path}")
            return
        fix = "The next save tries again" if error.errno == errno.EREMOTEIO else "Free some disk"
        self.monitor.warn(f"a checkpoint could not be written ({error}); earlier ones are untouched. {fix}.")


# ----------------------------------------------------------------------------------------------------
# The weights of a checkpoint, for evaluation, sampling, export and model.init_from.


@dataclass(frozen=True)
class Weights:
    checkpoint: Path
    kind: str  # "ema" or "raw"
    averaged: bool  # the checkpoint has a moving average
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file that holds the weights; of several files, SHA-256 of their digests."""
        entries = read_manifest(self.checkpoint)["files"]
        digests = [entries[name]["sha256"] for name in tensor_files(self.checkpoint, self._stem)]
        return str(digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest())

    def tensors(self) -> Tensors:
        return read_tensors(self.checkpoint, self._stem)

    @property
    def _stem(self) -> str:
        return "ema" if self.kind == "ema" else "model"


@torch.no_grad()
def copy_weights(parameters: Mapping[str, Tensor], tensors: Tensors, where: str) -> None:
    """Copy tensors into the parameters of the same names. Raise UserError if one is missing or has another shape."""
    for name, parameter in parameters.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != parameter.shape:
            problem = "is missing" if tensor is None else f"has the shape {list(tensor.shape)}"
            what = f"{name} {problem}; this model needs the shape {list(parameter.shape)}."
            raise UserError(what, where=where, fix="Use weights of a model with the same shape.")
        parameter.copy_(tensor)


def find_weights(
    run: Path,
    selector: int | str | None = None,
    kind: str | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Weights:
    """Return the weights of `RUN[@selector]`, verified: those of `kind`, or by default the average if there is one."""
    checkpoint = select_checkpoint(run / CHECKPOINTS_FOLDER, selector, warn)
    averaged = bool(tensor_files(checkpoint, "ema"))
    if kind == "ema" and not averaged:
        raise UserError("this run has no moving average (train.ema).", where=str(checkpoint), fix="Use --weights raw.")
    return Weights(checkpoint, kind or ("ema" if averaged else "raw"), averaged, read_state(checkpoint))


# ----------------------------------------------------------------------------------------------------
# `redline runs prune`: free disk space by deleting checkpoints of runs that have ended.


Keep = str | int  # "best": the best and the newest; "last": the newest; N: the newest N and the best


@dataclass(frozen=True)
class PruneResult:
    """What is deleted of one run. `reason` says why nothing is."""

    run: Path
    removed: dict[int, int] = field(default_factory=dict)  # step → bytes
    kept: list[int] = field(default_factory=list)
    leftover_bytes: int = 0  # of interrupted saves
    reason: str | None = None

    @property
    def bytes(self) -> int:
        return sum(self.removed.values()) + self.leftover_bytes

    def as_dict(self) -> dict[str, Any]:
        removed = [{"step": step, "bytes": size} for step, size in sorted(self.removed.items())]
        return {**vars(self), "run": str(self.run), "removed": removed, "bytes": self.bytes}


def plan_prune(run: Path, keep: Keep = "best") -> PruneResult:
    """Return what `prune` would delete, without deleting it.

    The newest valid checkpoint stays, and newer damaged ones too: a disk that cannot be read now may be readable later.
    """
    if is_locked(run):
        return PruneResult(run, reason="is running")
    if run_status(run) is Status.FAILED:
        return PruneResult(run, reason="failed, and may have to continue from an earlier checkpoint")
    return _select(run, keep)


def prune(run: Path, keep: Keep = "best") -> PruneResult:
    """Delete what `plan_prune` selects, under the lock of the run; return what was deleted."""
    plan = plan_prune(run, keep)
    if not plan.bytes:
        return plan
    try:
        with RunDirectory(run) as held:
            plan = _select(run, keep)  # again: the run may have continued before this process had the lock
            apply_retention(held.checkpoints, *_retention(run, keep))
            remove_temporaries(held.checkpoints)
    except UserError as error:
        return PruneResult(run, reason=error.what.rstrip("."))
    except OSError as error:
        remaining = committed_steps(run / CHECKPOINTS_FOLDER)
        removed = {step: size for step, size in plan.removed.items() if step not in remaining}
        return PruneResult(run, removed, remaining, reason=f"cannot be changed ({error.strerror})")
    return plan


def _select(run: Path, keep: Keep) -> PruneResult:
    folder = run / CHECKPOINTS_FOLDER
    removed = {step: disk_bytes(folder / step_name(step)) for step in steps_to_delete(folder, *_retention(run, keep))}
    kept = [step for step in committed_steps(folder) if step not in removed]
    return PruneResult(run, removed, kept, sum(disk_bytes(path) for path in temporaries(folder)))


def _retention(run: Path, keep: Keep) -> tuple[int, tuple[int, ...]]:
    """Return how many of the newest valid checkpoints stay, and which steps besides."""
    best = None if keep == "last" else best_step(run / CHECKPOINTS_FOLDER)
    return keep if isinstance(keep, int) else 1, () if best is None else (best,)
