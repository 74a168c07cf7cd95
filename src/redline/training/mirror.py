"""The mirror of a run: a copy of its checkpoints, and of what a resume needs, in an object store or another folder.

A thread of rank 0 copies each checkpoint after its commit: first the small files of the run, then the files of the
checkpoint, each of which is checked when it has arrived, and the manifest last. So a checkpoint exists in a mirror only
with its manifest, as on the disk, and a copy that breaks off does not count. A checkpoint is removed in the other
order. Which checkpoint is the newest follows from its step alone, never from a clock.

Training does not wait for the copies and does not fail because of them. `Mirror.finish` waits for them at the end.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from redline.cache import cache_dir, make_folder, open_regular, sync
from redline.errors import UsageError, UserError
from redline.recipe.lock import read_lock
from redline.remote import RemoteFile, Store, StoreError, join, parent_and_name, scheme_of, with_retries
from redline.runs.monitor import Monitor
from redline.training.checkpoint import (
    MANIFEST,
    DamagedCheckpointError,
    apply_retention,
    best_step,
    canonical_json,
    committed_steps,
    file_digest,
    match_folder_permissions,
    newest_valid,
    parse_manifest,
    read_manifest,
    remove_checkpoint,
    step_name,
    total_bytes,
    transaction,
    verify,
)
from redline.training.control import HEARTBEAT, RunDirectory
from redline.training.recovery import FOLDER as FAILURES_FOLDER
from redline.vocabulary import CHECKPOINTS_FOLDER, EVENTS_FILE, RECIPE_LOCK_FILE

Log = Callable[[str], None]

CLAIM = "attempt.json"  # in the mirror: which process copies there
# What a resume needs beside a checkpoint; the lock comes last, because with it the run counts as restored.
_RUN_FILES = ("*.json", "*.jsonl", f"{FAILURES_FOLDER}/*.jsonl")
_RUN_FILE = re.compile(rf"[^/.][^/]*\.jsonl?|{FAILURES_FOLDER}/rank-\d+\.jsonl")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _CLOSING_PAUSE_S = 1.0, 60.0, 2.0
FINAL_WAIT_S = 1800.0  # for the last copies of a run that has ended
# A cloud gives a preempted machine 30 to 120 s, and the last save has used some of them.
PREEMPTED_WAIT_S = 20.0


class TakenOverError(UserError):
    """Another process mirrors the same run."""


class _GivenUpError(Exception):
    """The run has ended, and waits no longer for its copies."""


# ----------------------------------------------------------------------------------------------------
# A run in a mirror.


class MirroredRun:
    """The files of a run in a mirror, in the layout of a run directory."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    def at(cls, url: str) -> MirroredRun:
        return cls(Store.open(url))

    def lock(self) -> dict[str, Any] | None:
        """Return the content of lock.json; None if there is no run."""
        try:
            return dict(json.loads(self.store.read(RECIPE_LOCK_FILE)))
        except StoreError as error:
            if error.missing:
                return None
            raise
        except ValueError:
            return None

    def steps(self) -> list[int]:
        """Return the steps that have a manifest, and so a whole copy unless it is damaged."""
        return sorted(step for step, names in self._folders().items() if MANIFEST in names)

    def _folders(self) -> dict[int, dict[str, int | None]]:
        """Return the sizes of the files of each checkpoint: step → file name → bytes."""
        folders: dict[int, dict[str, int | None]] = {}
        for name, file in self.store.files(CHECKPOINTS_FOLDER).items():
            _, folder, *rest = name.split("/")
            step = folder.removeprefix("step-")
            if len(rest) == 1 and step.isascii() and step.isdigit() and folder == step_name(int(step)):
                folders.setdefault(int(step), {})[rest[0]] = file.size
        return folders

    def whole(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield step and manifest of every copy whose files have the right sizes, the newest first."""
        for step, sizes in sorted(self._folders().items(), reverse=True):
            if MANIFEST not in sizes:
                continue
            with suppress(DamagedCheckpointError):
                manifest = self.manifest(step)
                if all(sizes.get(name) == entry["bytes"] for name, entry in manifest["files"].items()):
                    yield step, manifest

    def incomplete(self) -> list[int]:
        """Return the steps that have files but no manifest: what interrupted copies and removals left behind."""
        return [step for step, names in self._folders().items() if MANIFEST not in names]

    def manifest(self, step: int) -> dict[str, Any]:
        try:
            return parse_manifest(self.store.read(f"{self.folder(step)}/{MANIFEST}"), step_name(step))
        except StoreError as error:
            if error.missing:
                raise DamagedCheckpointError(f"{step_name(step)} has no manifest") from None
            raise

    @staticmethod
    def folder(step: int) -> str:
        return f"{CHECKPOINTS_FOLDER}/{step_name(step)}"

    def remove(self, step: int) -> None:
        """Remove a copy, the manifest first: what is left of it does not count from then on."""
        self.store.delete(f"{self.folder(step)}/{MANIFEST}")
        self.store.delete_folder(self.folder(step))

    def fetch(self, step: int, folder: Path) -> Path:
        """Copy a checkpoint to the disk and commit it there. Raise DamagedCheckpointError if it is not whole."""
        manifest = self.manifest(step)
        with transaction(folder, step) as pending:
            if not pending.done:
                for name, entry in manifest["files"].items():
                    self.fetch_file(step, name, entry, pending.temporary)
                raw = self.store.read(f"{self.folder(step)}/{MANIFEST}")
                parse_manifest(raw, step_name(step))
                (pending.temporary / MANIFEST).write_bytes(raw)
                sync(pending.temporary / MANIFEST)
                sync(pending.temporary)
        try:
            verify(folder / step_name(step))
        except DamagedCheckpointError:
            remove_checkpoint(folder / step_name(step))
            raise
        return folder / step_name(step)

    def fetch_file(self, step: int, name: str, entry: dict[str, Any], folder: Path) -> None:
        """Copy a file of a checkpoint to the disk. Raise DamagedCheckpointError if it differs from its manifest."""
        if Path(name).name != name or name.startswith("."):  # a manifest from elsewhere must not write elsewhere
            raise DamagedCheckpointError(f"{step_name(step)}/{MANIFEST} names a file outside of the checkpoint")
        local = folder / name
        remote = RemoteFile(name, self.store.path(f"{self.folder(step)}/{name}"), int(entry["bytes"]), "")
        for _ in range(2):  # once more: the damage may have happened on the way
            try:
                self.store.download(remote, local)
            except StoreError as error:
                if error.missing:
                    break
                raise
            if file_digest(local) == entry["sha256"]:
                match_folder_permissions(local)
                return
        raise DamagedCheckpointError(f"{step_name(step)}/{name} differs from its manifest in the mirror")

    def fetch_newest(
        self, folder: Path, warn: Log, *, above: int = -1, below: int | None = None, only: int | None = None
    ) -> Path | None:
        """Fetch the newest whole checkpoint between `above` and `below`; None if there is none."""
        for step, _ in self.whole():
            if step > above and (below is None or step < below) and only in (None, step):
                try:
                    return self.fetch(step, folder)
                except DamagedCheckpointError as damage:
                    warn(f"the copy in {self.store.url} is damaged ({damage}); looking for an earlier one")
        return None

    def fetch_run_files(self, path: Path) -> None:
        """Copy lock, events, tokenizer and the record of failures to the disk, the lock last."""
        files = [file for name, file in self.store.files().items() if _RUN_FILE.fullmatch(name) and name != CLAIM]
        for file in sorted(files, key=lambda file: file.name == RECIPE_LOCK_FILE):
            make_folder((path / file.name).parent)
            part = path / f".{file.name.replace('/', '-')}.part"
            self.store.download(file, part)
            part.replace(path / file.name)
        sync(path)


def restore_run(url: str, path: Path, log: Log) -> None:
    """Restore a run directory from its mirror: what a resume needs, and the newest whole checkpoint.

    Several ranks of one node may call this at once: the first restores, and the others wait for it. Raise UsageError if
    there is no run in the mirror, or another one in the directory.
    """
    remote = MirroredRun.at(url)
    lock = remote.lock()
    if lock is None:
        raise _no_run(url)
    make_folder(path)
    guard = path / ".restoring"
    with open(guard, "a", opener=open_regular) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (path / RECIPE_LOCK_FILE).exists():
            log(f"restoring {path} from {url}")
            remote.fetch_newest(path / CHECKPOINTS_FOLDER, log)
            remote.fetch_run_files(path)
        guard.unlink(missing_ok=True)
    if read_lock(path)["run_id"] != lock.get("run_id"):
        fix = "Resume from another folder, or move the run in this one away."
        raise UsageError(f"holds another run than {url}.", where=str(path), fix=fix)


def _no_run(url: str) -> UsageError:
    names = {name.split("/")[0] for name in _files_or_none(url) if name.endswith(f"/{RECIPE_LOCK_FILE}")}
    known = f"Runs there: {', '.join(sorted(names)[:10])}." if names else "Check the address: URL/RUN."
    return UsageError("there is no run in this mirror: it has no lock.json.", where=url, fix=known)


def _files_or_none(url: str) -> Iterable[str]:
    try:
        return Store.open(url).files()
    except UserError:
        return ()


def mirrored_run(path: Path, mirror: str) -> MirroredRun:
    """Return the copy of the run at `path`: the folder of its name in the mirror."""
    return MirroredRun.at(run_url(path, mirror))


def run_url(path: Path, mirror: str) -> str:
    return join(mirror, path.resolve().name)


def holds_run(path: Path, mirror: str) -> bool:
    """Return whether the mirror has a copy of the run at `path`, which may not exist any more."""
    return with_retries(lambda: mirrored_run(path, mirror).lock()) is not None


def check_mirror(mirror: str, path: Path, *, resumed: bool) -> None:
    """Raise UserError if the run at `path` cannot be copied to the mirror; write a file there and remove it."""
    url = run_url(path, mirror)
    if scheme_of(mirror) == "file" and not Path(Store.open(mirror).root).is_dir():
        # Otherwise a mirror on a disk that is not mounted would fill the disk below it.
        raise UsageError("the folder does not exist.", where=mirror, fix="Create it, or mount its disk.")
    store = Store.open(url)
    probe = f".write-test-{uuid.uuid4().hex[:8]}"
    try:
        with_retries(lambda: store.write(probe, b"redline"))
        with_retries(lambda: store.delete(probe))
        there = with_retries(MirroredRun(store).lock)
    except StoreError as error:
        # The address is the mirror's: the name of the probe would tell the reader nothing.
        what, fix = error.what, error.fix
        if store.is_local:
            what, fix = "no file can be written to this folder.", "Check its permissions and the space on its disk."
        raise StoreError(what, where=url, fix=str(fix), passing=error.passing) from None
    own = read_lock(path)["run_id"] if resumed else None
    if there is not None and there.get("run_id") != own:
        fix = f"Choose another --run or mirror, or continue that run: redline train --resume {url}"
        raise UsageError("the mirror holds another run of this name.", where=url, fix=fix)


def fetch_weights(url: str, selector: int | str | None, log: Log) -> Path:
    """Copy lock, tokenizer and one checkpoint of a run to the cache; return that run directory.

    Without a selector the newest whole checkpoint is meant.
    """
    remote = MirroredRun.at(url)
    if (lock := remote.lock()) is None:
        raise _no_run(url)
    name = parent_and_name(url)[1]
    path = cache_dir() / "mirrored" / f"{re.sub(r'[^A-Za-z0-9]', '-', str(lock.get('run_id')))[:32]}" / name
    make_folder(path)
    remote.fetch_run_files(path)
    folder = path / CHECKPOINTS_FOLDER
    if selector is None:
        shutil.rmtree(folder, ignore_errors=True)  # an older one must not be taken for the newest
        found = remote.fetch_newest(folder, log)
    else:
        steps = remote.steps()
        if selector == "best":
            found = remote.fetch_newest(folder, log)  # its state says which step was the best
            selector = best_step(folder)
        found = remote.fetch_newest(folder, log, only=int(selector)) if selector in steps else None
    if found is None:
        known = ", ".join(str(step) for step in remote.steps()) or "none"
        wanted = "no whole checkpoint" if selector is None else f"no whole checkpoint @{selector}"
        raise UserError(f"the mirror has {wanted}.", where=url, fix=f"Steps with a checkpoint: {known}.")
    return path


# ----------------------------------------------------------------------------------------------------
# Copying while a run trains.


class Mirror:
    """Copies the commits of a run to its mirror, in a background thread."""

    def __init__(
        self, remote: MirroredRun, run: RunDirectory, monitor: Monitor, *, keep: int, forget: Iterable[int] = ()
    ) -> None:
        """`forget`: steps whose copies are removed, because the run continues differently from before them."""
        self.remote, self.run, self.monitor, self.keep = remote, run, monitor, keep
        self.copied: dict[int, str] = {}  # step → digest of the manifest in the mirror
        self._skipped: set[int] = set()  # steps that are damaged on the disk
        self._forget = set(forget)
        self._protected: tuple[int, ...] = ()  # the best step
        self._in_flight: int | None = None
        self._sent: set[tuple[int, str]] = set()  # files of the step in flight that have arrived
        self._files: dict[str, tuple[int, int]] = {}  # run files that have arrived: name → size and mtime
        self._claim = uuid.uuid4().hex
        self._claimed = self._pending = self._closing = self._ended = False
        self._failure: UserError | OSError | None = None
        self._changed = threading.Condition()
        self._disk = threading.Lock()  # held while checkpoints are removed from the disk, or chosen for a copy
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._wake()

    def committed(self, protect: tuple[int, ...]) -> None:
        """Note that a checkpoint was committed. `protect` are the steps that retention spares."""
        self._protected = protect
        self._wake()

    # --- for ranks that send the files of a checkpoint themselves (see `mirrored_commit`)

    def await_claim(self, seconds: float) -> None:
        """Wait until this process has taken over the mirror and removed what older ones left behind."""
        with self._changed:
            self._changed.wait_for(lambda: self._claimed or not self._thread.is_alive(), seconds)
        if isinstance(self._failure, TakenOverError):
            raise self._failure
        if not self._claimed:
            raise self._failure or OSError(errno.EREMOTEIO, f"{self.remote.store.url} does not answer")

    def withdraw(self, step: int) -> None:
        """Remove the copy of a step whose files are about to be replaced."""
        self.copied.pop(step, None)
        self._forget.discard(step)
        self.remote.remove(step)

    def commit(self, step: int, manifest: dict[str, Any], began: float) -> None:
        """Write the manifest after all other files of the checkpoint have arrived: from now on the copy counts."""
        store = self.remote.store
        self._check_claim()
        store.write(f"{self.remote.folder(step)}/{MANIFEST}", canonical_json(manifest))
        self.copied[step] = str(manifest["digest"])
        seconds = time.monotonic() - began
        self._emit("mirror", step=step, url=store.url, seconds=seconds, bytes=total_bytes(manifest))

    @contextmanager
    def held(self) -> Iterator[tuple[int, ...]]:
        """Yield the steps that must stay on the disk, because they are being copied."""
        with self._disk:
            yield () if self._in_flight is None else (self._in_flight,)

    def _wake(self) -> None:
        with self._changed:
            self._pending = True
            self._changed.notify_all()

    def finish(self, seconds: float) -> list[int]:
        """Wait for the last copies, at most so many seconds; return and report the steps that were not copied."""
        with self._changed:
            self._closing = self._pending = True
            self._changed.notify_all()
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline:
            HEARTBEAT.at("copying to the mirror")  # this wait has a limit of its own
            self._thread.join(min(1.0, max(0.0, deadline - time.monotonic())))
        with self._changed:  # from here on the thread writes no event: the log is closed soon
            self._ended = True
        missing = [step for step in committed_steps(self.run.checkpoints) if not self._is_copied(step)]
        if missing or self._thread.is_alive():
            steps = ", ".join(str(step) for step in missing)
            what = f"has no whole copy of step {steps}" if missing else "has no copy of the last events"
            why = f" ({self._failure.what.rstrip('.')})" if isinstance(self._failure, UserError) else ""
            there = f"its newest is of step {max(self.copied)}" if self.copied else "it has no checkpoint"
            self.monitor.warn(
                f"the mirror {self.remote.store.url} {what} after {seconds:.0f} s{why}; {there}. "
                f"`redline train --resume` on this disk copies the rest"
            )
        return missing

    def _is_copied(self, step: int) -> bool:
        return step in self._skipped or self._same_as_local(step, self.copied.get(step))

    def _same_as_local(self, step: int, digest: str | None) -> bool:
        if digest is None:
            return False
        try:
            return bool(read_manifest(self.run.checkpoints / step_name(step))["digest"] == digest)
        except DamagedCheckpointError:
            return False

    # --- the thread

    def _work(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                self._pending = False
            try:
                self._synchronize()
            except TakenOverError as error:
                self._failure = error
                self.warn(f"{error.message()} Training continues.")
                return
            except _GivenUpError:
                return
            except (UserError, OSError) as error:
                self._report_failure(error)
                with self._changed:
                    self._pending = True
                    limit = _CLOSING_PAUSE_S if self._closing else pause
                    self._changed.wait_for(lambda: self._closing or self._ended, limit)
                    if self._ended:
                        return
                if self._closing:
                    time.sleep(min(limit, _FIRST_PAUSE_S))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                pause = _FIRST_PAUSE_S
                self._report_success()

    def _emit(self, type: str, **fields: Any) -> None:
        with self._changed:
            if not self._ended:
                self.monitor.emit(type, **fields)

    def warn(self, message: str) -> None:
        self._emit("warning", message=message)

    def _check_given_up(self) -> None:
        if self._ended:
            raise _GivenUpError

    def _report_failure(self, error: UserError | OSError) -> None:
        """Warn once, and not again before a copy has succeeded."""
        if self._failure is None:
            text = error.message() if isinstance(error, UserError) else f"{error}."
            self.warn(f"a checkpoint could not be copied: {text} Training continues, and the copy is repeated.")
        self._failure = error

    def _report_success(self) -> None:
        if self._failure is not None:
            self._failure = None
            self._emit("recovery", message=f"the mirror {self.remote.store.url} is up to date again")

    def _synchronize(self) -> None:
        """Bring the mirror up to date with the disk."""
        if not self._claimed:
            self._begin()
        self._copy_run_files()
        while (step := self._next()) is not None:
            try:
                self._copy(step)
            finally:
                with self._disk:
                    self._in_flight = None
        self._retain()

    def _begin(self) -> None:
        """Take over the mirror, and find out what it has."""
        content = {"attempt": self._claim, "host": socket.gethostname(), "pid": os.getpid()}
        self.remote.store.write(CLAIM, json.dumps(content).encode())
        self._remove_forgotten()
        self.copied = {step: str(manifest["digest"]) for step, manifest in self.remote.whole()}
        local = set(committed_steps(self.run.checkpoints))
        for step in set(self.remote.incomplete()) - local:
            self.remote.remove(step)
        with self._changed:
            self._claimed = True
            self._changed.notify_all()

    def _remove_forgotten(self) -> None:
        """Remove copies, the newest first. What could not be removed is tried again the next time."""
        for step in sorted(self._forget, reverse=True):
            self.copied.pop(step, None)
            self.remote.remove(step)
            self._forget.discard(step)

    def _check_claim(self) -> None:
        """Raise TakenOverError if another process copies to this mirror, which this one must not mix its files with."""
        try:
            there = json.loads(self.remote.store.read(CLAIM))
        except ValueError:
            there = {}
        if there.get("attempt") != self._claim:
            what = f"another process mirrors this run (pid {there.get('pid')} on {there.get('host')}); this one stops."
            raise TakenOverError(what, where=self.remote.store.url, fix="Stop one of the two.")

    def _copy_run_files(self) -> None:
        """Copy what a resume needs, where it has changed. The event log grows meanwhile, so a part of it is copied."""
        root = self.run.path
        found = [path for pattern in _RUN_FILES for path in root.glob(pattern) if not path.name.startswith(".")]
        for path in sorted(found, key=lambda path: path.name == EVENTS_FILE):
            name = path.relative_to(root).as_posix()
            stat = path.stat()
            state = (stat.st_size, stat.st_mtime_ns)
            if self._files.get(name) == state or path.is_symlink() or not path.is_file():
                continue
            with tempfile.NamedTemporaryFile(prefix="redline-mirror-") as part:
                with open(path, "rb", opener=open_regular) as source:
                    _copy_bytes(source, part, stat.st_size)
                part.flush()
                self.remote.store.upload(Path(part.name), name)
            self._files[name] = state

    def _next(self) -> int | None:
        """Choose the newest checkpoint on the disk that has no copy, and keep it there until it has one."""
        with self._disk:
            steps = reversed(committed_steps(self.run.checkpoints))
            self._in_flight = next((step for step in steps if not self._is_copied(step)), None)
            return self._in_flight

    def _copy(self, step: int) -> None:
        begin = time.monotonic()
        local, folder, store = self.run.checkpoints / step_name(step), self.remote.folder(step), self.remote.store
        try:
            manifest = read_manifest(local)
        except DamagedCheckpointError as damage:
            self._skip(step, damage)
            return
        self._sent = {(sent, name) for sent, name in self._sent if sent == step}
        if not self._sent:
            self.copied.pop(step, None)
            self._forget.discard(step)
            if self._is_another(step, manifest):  # an older copy of this step ends before its first file is replaced
                self.remote.remove(step)
        for name, entry in manifest["files"].items():
            if (step, name) not in self._sent:
                self._check_given_up()
                try:
                    sent = store.upload(local / name, f"{folder}/{name}")
                except FileNotFoundError:  # on this disk: a store's errors are StoreErrors
                    sent = None
                if sent != entry["sha256"]:
                    self._skip(step, DamagedCheckpointError(f"{step_name(step)}/{name} has changed on the disk"))
                    return
                self._sent.add((step, name))
        self._check_given_up()
        self.commit(step, manifest, begin)
        self._sent.clear()

    def _is_another(self, step: int, manifest: dict[str, Any]) -> bool:
        """Return whether the mirror has another checkpoint of this step.

        A manifest that cannot be read is no reason to remove a copy: it may have been damaged on the way only, and to
        write the same files again does no harm.
        """
        try:
            return bool(self.remote.manifest(step)["digest"] != manifest["digest"])
        except DamagedCheckpointError:
            return False

    def _skip(self, step: int, damage: DamagedCheckpointError) -> None:
        self._skipped.add(step)
        self.warn(f"a checkpoint is not copied to the mirror: {damage}")

    def _retain(self) -> None:
        """Remove old checkpoints: from the mirror, and from the disk those that had to wait for their copy."""
        outdated = sorted(self.copied, reverse=True)[self.keep :]
        self._forget |= {step for step in outdated if step not in self._protected}
        self._remove_forgotten()
        with self._disk, suppress(OSError):
            apply_retention(self.run.checkpoints, self.keep, self._protected)


def _copy_bytes(source: Any, target: Any, size: int) -> None:
    while size > 0 and (chunk := source.read(min(size, 1 << 20))):
        target.write(chunk)
        size -= len(chunk)


# ----------------------------------------------------------------------------------------------------
# The newest whole checkpoint among the disk and the mirror.


class CheckpointFinder:
    """Finds checkpoints of a run on the disk and in its mirror, and fetches those that are only there."""

    def __init__(self, run: Path, mirror: str | None, warn: Log) -> None:
        self.folder, self.warn = run / CHECKPOINTS_FOLDER, warn
        self.remote = None if mirror is None else mirrored_run(run, mirror)

    def newest(self, below: int | None = None) -> Path | None:
        """Return the newest whole checkpoint, on the disk; None if there is none.

        Raise UserError if the mirror cannot be read and the disk has none: to begin at step 0 would be worse.
        """
        local = newest_valid(self.folder, self.warn, below=below)
        if self.remote is None:
            return local
        step = -1 if local is None else int(local.name.removeprefix("step-"))
        try:
            return with_retries(lambda: self._fetch_newer(step, below)) or local
        except StoreError as error:
            if local is None:
                raise
            self.warn(f"the mirror cannot be read: {error.message()} The run continues from its own checkpoint")
            return local

    def _fetch_newer(self, step: int, below: int | None) -> Path | None:
        assert self.remote is not None
        make_folder(self.folder.parent)
        found = self.remote.fetch_newest(self.folder, self.warn, above=step, below=below)
        if found is not None:
            self.warn(f"{found.name} comes from the mirror {self.remote.store.url}")
        return found

    def ensure(self, name: str) -> None:
        """Fetch a checkpoint by name, unless this disk has it whole. For nodes that do not share rank 0's disk."""
        if self.remote is None:
            if (self.folder / name).is_dir():
                return
            fix = "Put the run on a disk that all nodes share, or set checkpoint.mirror."
            raise UserError(f"this node does not have {name}.", where=str(self.folder.parent), fix=fix)
        with suppress(DamagedCheckpointError):
            verify(self.folder / name)
            return
        make_folder(self.folder.parent)
        try:
            step = int(name.removeprefix("step-"))
            with_retries(lambda: self.remote.fetch(step, self.folder))  # type: ignore[union-attr]
            for older in committed_steps(self.folder):  # no save removes them from a disk that is not rank 0's
                if older < step:
                    remove_checkpoint(self.folder / step_name(older))
        except DamagedCheckpointError as damage:
            raise UserError(f"{damage}.", where=self.remote.store.url, fix="Resume on rank 0's node alone.") from None
