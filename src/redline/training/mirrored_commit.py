"""Checkpoints of ranks that hold shards and see different disks: their files meet in the mirror of the run.

Each rank writes its files to its own disk, sends them to the mirror, and tells rank 0 their digests. Rank 0 then sends
the index and the state and, as the last file, the manifest: from then on the checkpoint exists. Afterwards rank 0
fetches the files of the other disks, so that its run directory has whole checkpoints too.
"""

from __future__ import annotations

import errno
import shutil
import time
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from redline.cache import make_folder, sync
from redline.errors import UserError
from redline.remote import StoreError
from redline.training.checkpoint import DamagedCheckpointError, Snapshot, temporaries, total_bytes
from redline.training.control import RunDirectory
from redline.training.distributed import Ranks
from redline.training.mirror import Mirror, MirroredRun, mirrored_run
from redline.training.sharded_checkpoint import CommittedElsewhereError, SharedCommit, write_shard

_SIGHT_TRIES, _SIGHT_PAUSE_S = 10, 0.2  # a network file system may show a new file late
# How long a file is sent again before the save counts as failed; the next save tries anew.
_PATIENCE_S, _LONGEST_PAUSE_S = 300.0, 30.0

T = TypeVar("T")


def ranks_on_other_disks(run: Path, ranks: Ranks) -> list[int]:
    """Return the ranks that do not see the run directory of rank 0. Every rank must call this."""
    if ranks.size == 1:
        return []
    probe = run / ranks.broadcast(f".seen-{uuid.uuid4().hex[:12]}")
    if ranks.is_main:
        probe.touch()
    ranks.barrier()
    hidden = [float(rank == ranks.rank and not _appears(probe)) for rank in range(ranks.size)]
    found = ranks.sum(*hidden)
    if ranks.is_main:
        probe.unlink(missing_ok=True)
    return [rank for rank, count in enumerate(found) if count]


def _appears(path: Path) -> bool:
    for _ in range(_SIGHT_TRIES):
        if path.exists():
            return True
        time.sleep(_SIGHT_PAUSE_S)
    return False


def shared_commit(
    ranks: Ranks, run: RunDirectory, url: str | None, mirror: Mirror | None, elsewhere: Collection[int]
) -> SharedCommit:
    """Return how ranks that hold shards commit. Raise UserError if their files cannot come together.

    `elsewhere`: the ranks that do not see rank 0's disk. `mirror` copies to `url`, on rank 0.
    """
    if not elsewhere:
        return SharedCommit(ranks)
    if url is None:
        some = ", ".join(str(rank) for rank in sorted(elsewhere)[:8])
        what = f"rank {some} cannot see this folder of rank 0, so no checkpoint of all shards could be saved."
        fix = "Put the run on a disk that all nodes share (--run DIR), or add checkpoint.mirror=s3://BUCKET/FOLDER."
        raise UserError(what, where=str(run.path), fix=fix)
    return MirroredCommit(ranks, mirrored_run(run.path, url), mirror, ranks.rank in elsewhere)


class MirroredCommit(SharedCommit):
    """`SharedCommit` of ranks on several disks."""

    def __init__(self, ranks: Ranks, remote: MirroredRun, mirror: Mirror | None, is_elsewhere: bool) -> None:
        """`mirror` is None except on rank 0."""
        super().__init__(ranks)
        self.remote, self.mirror, self.is_elsewhere = remote, mirror, is_elsewhere

    def _prepare(self, step: int) -> None:
        assert self.mirror is not None
        mirror = self.mirror
        _repeat(lambda: mirror.await_claim(_PATIENCE_S))
        _repeat(lambda: mirror.withdraw(step))

    def _write_own(self, folder: Path, snapshot: Snapshot) -> dict[str, Any]:
        if not self.is_elsewhere:
            return self._write_and_send(folder, snapshot)
        # Several ranks may share this disk, and an earlier process of this rank may have been killed here.
        suffix = f"-rank-{self.ranks.rank}"
        make_folder(folder.parent)
        for left in temporaries(folder.parent):
            if left.name.endswith(suffix):
                shutil.rmtree(left, ignore_errors=True)
        own = folder.with_name(folder.name + suffix)
        try:
            own.mkdir()
            return self._write_and_send(own, snapshot)
        finally:
            shutil.rmtree(own, ignore_errors=True)

    def _write_and_send(self, folder: Path, snapshot: Snapshot) -> dict[str, Any]:
        shard = write_shard(folder, snapshot, self.ranks)
        self._send(folder, snapshot.step, shard["files"])
        return shard

    def _send(self, folder: Path, step: int, files: dict[str, dict[str, Any]]) -> None:
        store = self.remote.store
        for name, entry in files.items():
            path, target = folder / name, f"{self.remote.folder(step)}/{name}"
            if _repeat(lambda: store.upload(path, target)) != entry["sha256"]:  # noqa: B023 - called at once
                raise OSError(errno.EIO, f"{name} has changed on the disk of rank {self.ranks.rank}")

    def _write_and_seal(self, temporary: Path, snapshot: Snapshot) -> dict[str, Any]:
        assert self.mirror is not None
        began, step, mirror = time.monotonic(), snapshot.step, self.mirror
        manifest = super()._write_and_seal(temporary, snapshot)
        self._send(temporary, step, {n: e for n, e in manifest["files"].items() if not n.endswith(".safetensors")})
        _repeat(lambda: mirror.commit(step, manifest, began))
        try:
            for name, entry in manifest["files"].items():
                if not (temporary / name).exists():
                    _repeat(lambda: self.remote.fetch_file(step, name, entry, temporary))  # noqa: B023 - called at once
            sync(temporary)
        except (OSError, DamagedCheckpointError) as error:
            what = f"step {step} is saved in the mirror, but could not be fetched to this disk ({error})"
            mirror.warn(what)
            raise CommittedElsewhereError(what, total_bytes(manifest)) from None
        return manifest


def _repeat(request: Callable[[], T]) -> T:
    """Return what a request to the store returns; repeat it after errors that may pass. Raise OSError if it fails."""
    pause, end = 1.0, time.monotonic() + _PATIENCE_S
    while True:
        try:
            return request()
        except UserError as error:
            if not (isinstance(error, StoreError) and error.passing) or time.monotonic() + pause > end:
                raise OSError(errno.EREMOTEIO, error.message()) from None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
