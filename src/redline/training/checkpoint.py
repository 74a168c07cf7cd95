"""Checkpoints that exist whole or not at all.

A checkpoint is a directory of files and a manifest with the size and SHA-256 of each, the manifest's own digest
included. It is written to a temporary sibling, synced, and renamed: what has the final name and a valid manifest is
committed, everything else does not exist. Links count as damage: a checkpoint lies within its run, whole.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.cache import check_regular, open_regular, read_bytes, sync
from redline.errors import UserError
from redline.recipe.schema import Checkpoint
from redline.runs.monitor import Monitor
from redline.runs.summary import disk_bytes, is_locked, run_status
from redline.training.run_directory import RunDirectory
from redline.training.schedule import StepTimer
from redline.vocabulary import Status

MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})", re.ASCII)
_TEMPORARY = ".writing-"

Tensors = dict[str, Tensor]


class DamagedCheckpointError(Exception):
    """A checkpoint that is not what was committed."""


@dataclass(frozen=True)
class Snapshot:
    """Everything a checkpoint holds, in host memory."""

    step: int
    tensors: dict[str, Tensors]  # file stem → tensors
    state: dict[str, Any]
    places: dict[str, dict[str, Any]] = field(default_factory=dict)  # of rows that one of several ranks holds


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
    """Write a checkpoint; when this returns it survives a power cut. OSError when the disk does not take it."""
    with committing(folder, snapshot.step) as writing:
        if not writing.done:
            writing.bytes = total_bytes(_write(writing.temporary, snapshot))
    return writing.committed()


@dataclass
class Writing:
    """A checkpoint on its way: files go into `temporary`, which gets its name when all are there."""

    temporary: Path
    final: Path
    step: int
    bytes: int = 0

    @property
    def done(self) -> bool:
        """It was committed before; nothing may be lost in replacing it."""
        return self.bytes > 0

    def committed(self) -> Committed:
        return Committed(self.final, self.step, self.bytes)


@contextmanager
def committing(folder: Path, step: int) -> Iterator[Writing]:
    folder.mkdir(exist_ok=True)  # alone: a run that was moved away is not to be begun a second time
    sync(folder.parent)  # every time: whoever made the folder may have been killed before this
    final, temporary = folder / step_name(step), folder / f"{_TEMPORARY}{step_name(step)}-{os.getpid()}"
    writing = Writing(temporary, final, step)
    if _is_valid(final):
        writing.bytes = total_bytes(read_manifest(final))
        sync(folder)  # that may be what failed the last time
        yield writing
        return
    _discard(temporary)
    try:
        temporary.mkdir()
        yield writing
        if os.path.lexists(final):
            _remove(final)
        temporary.rename(final)
        sync(folder)
    except BaseException:
        _discard(temporary)
        raise


def _write(folder: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Every file, the manifest last, all of it on the disk."""
    for stem, tensors in snapshot.tensors.items():
        try:
            save_file(tensors, folder / f"{stem}.safetensors")
            match_folder_permissions(folder / f"{stem}.safetensors")
        except SafetensorError as error:  # how safetensors says that the disk is full
            raise OSError(errno.EIO, str(error)) from None
    return seal(folder, snapshot)


def match_folder_permissions(path: Path) -> None:
    """As readable as its folder: safetensors shuts out everyone but the owner, whatever the umask."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def seal(folder: Path, snapshot: Snapshot, known: Mapping[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """The state and the manifest; `known` are the digests of files that others have written and synced."""
    (folder / STATE).write_bytes(canonical_json(snapshot.state))
    manifest = _manifest(folder, snapshot.step, known or {})
    (folder / MANIFEST).write_bytes(canonical_json(manifest))
    for path in folder.iterdir():
        if path.name not in (known or {}):
            sync(path)
    sync(folder)
    return manifest


def _manifest(folder: Path, step: int, known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    files = {path.name: known.get(path.name) or _entry(path) for path in sorted(folder.iterdir())}
    body: dict[str, Any] = {"schema": 1, "step": step, "files": files}
    return {**body, "digest": hashlib.sha256(canonical_json(body)).hexdigest()}


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def total_bytes(manifest: dict[str, Any]) -> int:
    return sum(entry["bytes"] for entry in manifest["files"].values())


def file_digest(path: Path) -> str:
    with open(path, "rb", opener=open_regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def discard(path: Path) -> None:
    """A checkpoint that the run has turned away from."""
    _remove(path)


def _remove(path: Path) -> None:
    """Renamed first, so that half a checkpoint never bears a checkpoint's name."""
    doomed = path.with_name(f"{_TEMPORARY}removed-{path.name}-{os.getpid()}")
    path.rename(doomed)
    sync(path.parent)  # or a power cut could keep the name and lose the files
    _discard(doomed)


def _discard(path: Path) -> None:
    """Away with it as far as that goes: what stays has a temporary's name and is no checkpoint."""
    with suppress(OSError):
        path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, byte for byte as it was written, or Damaged."""
    try:
        raw = read_bytes(path / MANIFEST)
        manifest = json.loads(raw)
        body = {key: value for key, value in manifest.items() if key != "digest"}
        genuine = manifest["digest"] == hashlib.sha256(canonical_json(body)).hexdigest()
        if not genuine or canonical_json(manifest) != raw or path.name != step_name(manifest["step"]):
            raise DamagedCheckpointError(f"{path.name}/{MANIFEST} was changed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path.name}/{MANIFEST} cannot be read ({type(error).__name__})") from None
    return dict(manifest)


def verify(path: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint; Damaged when it is not whole, or cannot be read."""
    if path.is_symlink():
        raise DamagedCheckpointError(f"{path.name} is a link")
    manifest = read_manifest(path)
    try:
        _check_files(path, manifest["files"])
        _check_content(path, manifest)
    except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
        raise DamagedCheckpointError(f"{path.name} cannot be read ({type(error).__name__})") from None
    return manifest


def _check_content(path: Path, manifest: dict[str, Any]) -> None:
    """Digests tell what was written, not by whom: that these are tensors and a state is not theirs to say."""
    for name in manifest["files"]:
        if name.endswith(".safetensors"):
            with safe_open(check_regular(path / name), "pt"):  # reads the header alone
                pass
        elif name.endswith(".index.json"):
            from redline.training.sharded_checkpoint import check_index

            check_index(path, name.removesuffix(".index.json"))
    if read_state(path)["step"] != manifest["step"]:
        raise DamagedCheckpointError(f"{path.name}/{STATE} is of another step")


def _check_files(path: Path, files: dict[str, dict[str, Any]]) -> None:
    present = {entry.name for entry in path.iterdir()}
    if present != {*files, MANIFEST}:
        raise DamagedCheckpointError(
            f"{path.name} lacks or has additional files: {sorted(present ^ {*files, MANIFEST})}"
        )
    for name, entry in files.items():
        file = path / name
        whole = file.is_file() and not file.is_symlink() and file.stat().st_size == entry["bytes"]
        if not whole or file_digest(file) != entry["sha256"]:
            raise DamagedCheckpointError(f"{path.name}/{name} is not what was written")


def _is_valid(path: Path) -> bool:
    try:
        return bool(verify(path))
    except DamagedCheckpointError:
        return False


def read_state(path: Path) -> dict[str, Any]:
    return dict(json.loads(read_bytes(path / STATE)))


def read_tensors(path: Path, stem: str, device: str = "cpu") -> Tensors:
    """Whole, whether one process wrote them or several."""
    single = path / f"{stem}.safetensors"
    if single.is_file():
        return load_file(check_regular(single), device=device)
    from redline.training.sharded_checkpoint import read_whole

    return read_whole(path, stem, device)


def tensor_files(path: Path, stem: str) -> list[str]:
    """The files that hold these tensors: one, or one of each rank."""
    names = (entry.name for entry in path.glob(f"{stem}*.safetensors"))
    return sorted(n for n in names if n == f"{stem}.safetensors" or re.fullmatch(rf"{stem}-\d+-of-\d+\.safetensors", n))


def committed_steps(folder: Path) -> list[int]:
    """Steps whose checkpoint has its name; valid or not is for `verify` to say."""
    if not folder.is_dir():
        return []
    found = {entry.name: _NAME.fullmatch(entry.name) for entry in folder.iterdir()}
    steps = {name: int(match[1]) for name, match in found.items() if match}
    return sorted(step for name, step in steps.items() if name == step_name(step))


def newest_valid(folder: Path, say: Callable[[str], None] = lambda _: None, *, below: int | None = None) -> Path | None:
    """The newest checkpoint that verifies, of a step `below` this one if given; what is damaged is passed over, and
    said."""
    for step in reversed([s for s in committed_steps(folder) if below is None or s < below]):
        path = folder / step_name(step)
        try:
            verify(path)
            return path
        except DamagedCheckpointError as damage:
            say(f"checkpoint {path.name} is damaged ({damage}); looking for one before it")
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


def select_checkpoint(folder: Path, selector: int | str | None, say: Callable[[str], None] = lambda _: None) -> Path:
    """The checkpoint that `RUN[@selector]` names, verified."""
    if selector is None:
        found = newest_valid(folder, say)
        if found is None and is_locked(folder.parent):
            fix = "Wait for its first checkpoint (checkpoint.every)."
            raise UserError("the run is training, and has not saved yet.", where=str(folder.parent), fix=fix)
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
    except DamagedCheckpointError as damage:
        raise UserError(f"{damage}.", where=str(folder.parent), fix="Use another checkpoint (RUN@STEP).") from None
    return path


def temporaries(folder: Path) -> list[Path]:
    """What an interrupted save left behind."""
    return [entry for entry in folder.iterdir() if entry.name.startswith(_TEMPORARY)] if folder.is_dir() else []


def remove_temporaries(folder: Path) -> None:
    for entry in temporaries(folder):
        _discard(entry)


def steps_to_delete(folder: Path, keep: int, also: Iterable[int] = (), fresh: int | None = None) -> list[int]:
    """Steps that are older than the newest `keep` valid ones and not named.

    `fresh` was committed a moment ago and is not read again.
    """
    kept, valid, found = {*also, fresh}, 0, []
    for step in reversed(committed_steps(folder)):
        if valid < keep:
            valid += step == fresh or _is_intact(folder / step_name(step))
        elif step not in kept:
            found.append(step)
    return found


def apply_retention(folder: Path, keep: int, also: Iterable[int] = (), fresh: int | None = None) -> None:
    """Keep the newest `keep` valid ones and those named; what is older goes."""
    for step in steps_to_delete(folder, keep, also, fresh):
        _remove(folder / step_name(step))


def _is_intact(path: Path) -> bool:
    """Valid; but read only once, unless its files changed: retention must not cost a read of everything per save."""
    try:
        stats = sorted((entry.name, entry.stat()) for entry in path.iterdir())
    except OSError:
        return False
    return _was_valid(path, tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats))


@lru_cache(maxsize=256)
def _was_valid(path: Path, files: tuple[tuple[str, int, int, int, int], ...]) -> bool:
    return _is_valid(path)


# ----------------------------------------------------------------------------------------------------
# Saving beside training: snapshot to host memory, then write in the background, one at a time.


OnSaved = Callable[[Committed, float], None]
OnFailed = Callable[[OSError], None]
Clock = Callable[[], float]
Commit = Callable[[Path, Snapshot], Committed]


class BackgroundSaver:
    """Commits snapshots in a background thread. `on_saved` runs after the rename, never before."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        on_saved: OnSaved,
        on_failed: OnFailed,
        clock: Clock = time.monotonic,
        together: Commit | None = None,
        retaining: bool = True,
    ) -> None:
        """`together` commits with other ranks; of those one alone removes what is old."""
        self.folder, self.keep, self._clock = folder, keep, clock
        self._together, self._retaining = together, retaining
        self._on_saved, self._on_failed = on_saved, on_failed
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, snapshot: Snapshot, protect: tuple[int, ...] = ()) -> None:
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot, protect), name="checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, snapshot: Snapshot, protect: tuple[int, ...]) -> None:
        try:
            self._commit(snapshot, protect)
        except BaseException as error:  # a thread cannot fail in its own name; `wait` says it
            self._error = error

    def _commit(self, snapshot: Snapshot, protect: tuple[int, ...]) -> None:
        begin = self._clock()
        try:
            done = (self._together or commit)(self.folder, snapshot)
        except OSError as error:  # a full disk: earlier checkpoints are untouched and training can go on
            self._on_failed(error)
            return
        self._on_saved(done, self._clock() - begin)
        if not self._retaining:
            return
        with suppress(OSError):  # what cannot be removed now is old enough to go after the next save
            apply_retention(self.folder, self.keep, protect, fresh=snapshot.step)


class HostCopy:
    """Copies that training cannot change any more. The memory is kept: pinning it anew takes longer than the copy."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensors] = {}

    def take(self, files: dict[str, Tensors]) -> dict[str, Tensors]:
        """The tensors of each file as they are now; valid until the next call."""
        for stem, tensors in files.items():
            kept = self._kept.setdefault(stem, {})
            for name, tensor in tensors.items():
                if name not in kept:
                    kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                kept[name].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {stem: self._kept[stem] for stem in files}


# ----------------------------------------------------------------------------------------------------
# Keeping a run: when to commit, what was committed, and what a commit costs.


EXPECTED_DISK_SPEED = 0.5e9  # bytes/s, hashed and synced; 0.46 to 0.61 measured on a rented machine's disk
Places = dict[str, dict[str, Any]]


class CheckpointManager:
    """The first rank keeps what all have alike; where each has its share, all keep it `together`."""

    def __init__(
        self,
        run: RunDirectory,
        monitor: Monitor,
        pace: StepTimer,
        options: Checkpoint,
        *,
        first: bool = True,
        together: Commit | None = None,
    ) -> None:
        self.run, self.monitor, self.pace, self.options = run, monitor, pace, options
        self.shared = together is not None
        self.writes = first or self.shared
        self.saved_at: int | None = None
        self._host = HostCopy()
        self._measured = False
        self._stall = 0.0
        self._saver = BackgroundSaver(
            run.checkpoints,
            keep=options.keep,
            on_saved=self._saved,
            on_failed=self._failed,
            clock=pace.clock,
            together=together,
            retaining=first,
        )

    def expect(self, files: dict[str, Tensors]) -> None:
        """Until a save was measured, a time budget reserves what one of this size should take."""
        size = sum(t.numel() * t.element_size() for tensors in files.values() for t in tensors.values())
        self.pace.closing.setdefault("save", size / EXPECTED_DISK_SPEED)

    def save(
        self,
        step: int,
        files: dict[str, Tensors],
        record: dict[str, Any],
        best: int | None,
        places: Places | None = None,
    ) -> None:
        """Snapshot now, commit in the background; once per step."""
        self._saver.wait()  # a save that failed meanwhile has taken `saved_at` back
        if self.saved_at == step:
            return
        self.saved_at = step
        if not self.writes:
            return
        begin = self.pace.clock()
        self._saver.folder = self.run.checkpoints  # the directory may have been moved since the last save
        snapshot = Snapshot(step, self._host.take(files), record, places or {})
        self._stall = self.pace.clock() - begin
        self.pace.paused += self._stall
        self._saver.save(snapshot, protect=(best,) if self.options.best and best is not None else ())

    def settle(self) -> None:
        """What is in flight is committed before a failure ends the process; with others it may never be."""
        if not self.shared:
            self._saver.wait()

    def finish(self, step: int) -> bool:
        """Wait for what is in flight; whether this step is committed."""
        self._saver.wait()
        if self.saved_at != step:
            before = committed_steps(self.run.checkpoints)
            left = f"step {before[-1]} is" if before else "no checkpoint is left, so the run has to start over"
            self.monitor.warn(f"the last state of this run is not on disk; {left}")
        return self.saved_at == step

    def _saved(self, done: Committed, seconds: float) -> None:
        known = self.pace.closing.get("save", 0.0) if self._measured else 0.0
        self.pace.closing["save"], self._measured = max(known, seconds), True
        path = done.path.relative_to(done.path.parent.parent)  # of the run, wherever it has been moved since
        self.monitor.emit(
            "checkpoint", step=done.step, path=path, seconds=seconds, stall_s=self._stall, bytes=done.bytes
        )

    def _failed(self, error: OSError) -> None:
        self.saved_at = None
        if self.run.moved():
            self.monitor.warn(f"a checkpoint could not be written: the run directory is no longer at {self.run.path}")
            return
        self.monitor.warn(f"a checkpoint could not be written ({error}); earlier ones are untouched. Free some disk.")


# ----------------------------------------------------------------------------------------------------
# The weights of a checkpoint, for everything but training on: looking, exporting, beginning another run.


@dataclass(frozen=True)
class Weights:
    checkpoint: Path
    kind: str  # "ema" or "raw"
    averaged: bool  # whether there is an average to choose
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file that holds them, or of those that do."""
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
    """Into the model, on whatever device it is; a UserError names what does not fit."""
    for name, parameter in parameters.items():
        found = tensors.get(name)
        if found is None or found.shape != parameter.shape:
            shape = "missing" if found is None else f"of shape {list(found.shape)}"
            fix = "Take weights of a model of this shape."
            raise UserError(f"{name} is {shape}, not {list(parameter.shape)}.", where=where, fix=fix)
        parameter.copy_(found)


def find_weights(
    run: Path,
    selector: int | str | None = None,
    kind: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Weights:
    """Those of `RUN[@selector]`, verified: the moving average if there is one, unless `kind` says otherwise."""
    checkpoint = select_checkpoint(run / "checkpoints", selector, say)
    averaged = bool(tensor_files(checkpoint, "ema"))
    if kind == "ema" and not averaged:
        raise UserError("this run kept no moving average.", where=str(checkpoint), fix="Use --weights raw.")
    return Weights(checkpoint, kind or ("ema" if averaged else "raw"), averaged, read_state(checkpoint))


# ----------------------------------------------------------------------------------------------------
# Freeing disk: the checkpoints that nobody needs any more, of runs that are over.


Keep = str | int  # "best": the best and the newest; "last": the newest; N: the newest N and the best


@dataclass(frozen=True)
class PruneResult:
    """What goes and what stays of one run; with a `reason`, all of it stays."""

    run: Path
    removed: dict[int, int] = field(default_factory=dict)  # step → bytes
    kept: list[int] = field(default_factory=list)
    leftover_bytes: int = 0  # of saves that were interrupted
    reason: str | None = None

    @property
    def bytes(self) -> int:
        return sum(self.removed.values()) + self.leftover_bytes

    def as_dict(self) -> dict[str, Any]:
        removed = [{"step": step, "bytes": size} for step, size in sorted(self.removed.items())]
        return {**vars(self), "run": str(self.run), "removed": removed, "bytes": self.bytes}


def plan_prune(run: Path, keep: Keep = "best") -> PruneResult:
    """Decides; touches nothing. The newest valid checkpoint always stays, and damaged ones that are newer with it:
    a disk that cannot be read today may be readable tomorrow."""
    if is_locked(run):
        return PruneResult(run, reason="is running")
    if run_status(run) is Status.FAILED:
        return PruneResult(run, reason="failed, and an earlier checkpoint may be what saves it")
    return _decide(run, keep)


def prune(run: Path, keep: Keep = "best") -> PruneResult:
    """Removes what `plan_prune` decides, while nobody can go on with the run; returns what was done."""
    plan = plan_prune(run, keep)
    if not plan.bytes:
        return plan
    try:
        with RunDirectory(run) as held:
            plan = _decide(run, keep)  # it may have gone on between the look and the lock
            apply_retention(held.checkpoints, *_rule(run, keep))
            remove_temporaries(held.checkpoints)
    except UserError as error:
        return PruneResult(run, reason=error.what.rstrip("."))
    except OSError as error:
        left = committed_steps(run / "checkpoints")
        removed = {step: size for step, size in plan.removed.items() if step not in left}
        return PruneResult(run, removed, left, reason=f"cannot be changed ({error.strerror})")
    return plan


def _decide(run: Path, keep: Keep) -> PruneResult:
    folder = run / "checkpoints"
    going = steps_to_delete(folder, *_rule(run, keep))
    removed = {step: disk_bytes(folder / step_name(step)) for step in going}
    kept = [step for step in committed_steps(folder) if step not in removed]
    return PruneResult(run, removed, kept, sum(disk_bytes(path) for path in temporaries(folder)))


def _rule(run: Path, keep: Keep) -> tuple[int, tuple[int, ...]]:
    """How many of the newest valid ones stay, and which besides."""
    best = None if keep == "last" else best_step(run / "checkpoints")
    return keep if isinstance(keep, int) else 1, () if best is None else (best,)
