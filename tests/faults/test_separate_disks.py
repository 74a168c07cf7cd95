"""R20: ranks that hold shards and share no disk save in the mirror: no fault loses a copy or makes half a one count."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_mirror import Log

from redline import remote
from redline.remote import Store, StoreError
from redline.training import mirror as mirroring
from redline.training import mirrored_commit
from redline.training.checkpoint import BackgroundSaver, Snapshot, committed_steps, step_name, temporaries, verify
from redline.training.control import RunDirectory
from redline.training.distributed import Ranks
from redline.training.mirror import Mirror, MirroredRun, mirrored_run
from redline.training.mirrored_commit import ranks_on_other_disks, shared_commit
from redline.training.parallel import ShardSpec
from redline.training.sharded_checkpoint import SharedCommit, read_full_tensors
from several import rank_logs, run_ranks

ROWS, KEEP = 6, 2


def shard(ranks: Ranks, step: int) -> Snapshot:
    """Three rows of each of two tensors, whose values tell the step and the row."""
    start, count = ranks.rank * ROWS // ranks.size, ROWS // ranks.size
    rows = torch.arange(start, start + count)[:, None] + 100.0 * step + torch.zeros(1, 40)
    spec = ShardSpec((ROWS, 40), start)
    tensors = {"model": {"weight": rows}, "optimizer": {"weight": -rows}}
    specs = {stem: {"weight": spec} for stem in tensors}
    return Snapshot(step, tensors, {"step": step, "best": None}, specs)


class Saves:
    """A rank that saves to the disk of its host, as a run does."""

    def __init__(self, ranks: Ranks, host: Path, url: str) -> None:
        self.ranks, self.log, self.committed, self.failed = ranks, Log(), list[int](), list[str]()
        run = RunDirectory(host / "run")
        run.path.mkdir(parents=True, exist_ok=True)
        self.mirror = Mirror(mirrored_run(run.path, url), run, self.log, keep=KEEP) if ranks.is_main else None  # type: ignore[arg-type]
        self.elsewhere = ranks_on_other_disks(run.path, ranks)
        self.saver = BackgroundSaver(
            run.checkpoints,
            keep=KEEP,
            on_saved=lambda done, seconds: self.committed.append(done.step),
            on_failed=lambda error: self.failed.append(str(error)),
            shared_commit=shared_commit(ranks, run, url, self.mirror, self.elsewhere),
            deletes_old=ranks.is_main,
            mirror=self.mirror,
        )
        if self.mirror is not None:
            self.mirror.start()
            self.mirror.await_claim(30)  # a save does not wait for it here: `_PATIENCE_S` is 0

    def save(self, step: int) -> None:
        self.saver.save(shard(self.ranks, step))
        self.saver.wait()

    def end(self) -> None:
        if self.mirror is not None:
            assert self.mirror.finish(30) == []
        self.ranks.barrier()


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(remote, "_PAUSE_S", 0.0)
    monkeypatch.setattr(mirroring, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(mirrored_commit, "_SIGHT_PAUSE_S", 0.0)
    monkeypatch.setattr(mirrored_commit, "_PATIENCE_S", 0.0)
    (tmp_path / "mirror").mkdir()
    return f"file://{tmp_path}/mirror"


def on_hosts(tmp_path: Path, size: int, live: Callable[[Ranks, Path], None]) -> None:
    """Run the ranks, each with a disk of its own, except that the first two share one if there are more than two."""

    def action(ranks: Ranks) -> int:
        live(ranks, tmp_path / f"host-{max(0, ranks.rank - (ranks.size > 2))}")
        return 0

    codes = run_ranks(size, action, tmp_path / "logs")
    assert codes == [0] * size, rank_logs(tmp_path / "logs", range(size))


def check_copies(url: str, folder: Path) -> list[int]:
    """Fetch every copy that counts, check its rows, and return the steps."""
    copy = MirroredRun.at(f"{url}/run")
    steps = [step for step, _ in copy.whole()]
    assert sorted(steps) == copy.steps(), "each manifest has all its files"
    for step in steps:
        shutil.rmtree(folder, ignore_errors=True)
        got = read_full_tensors(copy.fetch(step, folder), "model")["weight"]
        assert got[:, 0].tolist() == [100.0 * step + row for row in range(ROWS)]
    return sorted(steps)


@pytest.mark.parametrize("size", [2, 3])
def test_shards_on_several_disks_become_one_checkpoint(mirror: str, tmp_path: Path, size: int) -> None:
    def live(ranks: Ranks, host: Path) -> None:
        saves = Saves(ranks, host, mirror)
        assert saves.elsewhere == [size - 1]
        for step in (1, 2, 3):
            saves.save(step)
        assert saves.committed == [1, 2, 3]
        saves.end()
        assert not ranks.is_main or saves.log.copied() == [1, 2, 3], "each was copied once"

    on_hosts(tmp_path, size, live)
    assert check_copies(mirror, tmp_path / "fetched") == [2, 3]
    first = tmp_path / "host-0/run/checkpoints"
    assert committed_steps(first) == [2, 3], "rank 0's disk has them too"
    assert verify(first / step_name(3))
    for host in range(2):
        assert temporaries(tmp_path / f"host-{host}/run/checkpoints") == []
    assert committed_steps(tmp_path / "host-1/run/checkpoints") == []


@contextmanager
def faults(seed: int, share: float) -> Iterator[None]:
    """Make requests to the mirror fail before or after they have done their work, or damage what they send."""
    chance = random.Random(seed)

    def faulty(name: str) -> Callable[..., Any]:
        original = getattr(Store, name)

        def call(self: Store, *arguments: Any) -> Any:
            kind = chance.choice(("before", "after", "damage")) if chance.random() < share else None
            error = StoreError("the connection was reset.", where=self.url, fix="Wait.", passing=True)
            if kind == "before":
                raise error
            result = original(self, *arguments)
            if kind == "after" or (kind == "damage" and name == "delete"):
                raise error
            if kind == "damage" and name == "upload":
                path = Path(self.path(arguments[1]))
                path.write_bytes(path.read_bytes()[:-1])
                raise error  # as upload itself finds out
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("upload", "write", "download", "delete", "_read_once"):
            patch.setattr(Store, name, faulty(name))
        yield


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_no_fault_loses_a_copy_of_several_disks(mirror: str, tmp_path: Path, seed: int) -> None:
    rounds = 12 if seed == 1 else 200

    def live(ranks: Ranks, host: Path) -> None:
        saves = Saves(ranks, host, mirror)
        ranks.barrier()
        for step in range(1, rounds + 1):
            with faults(1000 * seed + 10 * step + ranks.rank, 0.05):
                saves.save(step)
                ranks.barrier()
            if ranks.is_main:
                there = check_copies(mirror, host / "fetched")
                assert not saves.committed or max(there) >= max(saves.committed), (there, saves.committed)
            ranks.barrier()
        saves.save(rounds + 1)
        assert saves.committed[-1] == rounds + 1
        assert saves.failed, "some saves failed"
        assert len(saves.committed) > rounds // 4
        saves.end()

    on_hosts(tmp_path, 2, live)
    assert check_copies(mirror, tmp_path / "fetched")[-1] == rounds + 1


def test_a_full_disk_of_rank_0_does_not_undo_the_copy(mirror: str, tmp_path: Path) -> None:
    """The copy counts for all ranks, so that none of them saves the step again alone."""

    def live(ranks: Ranks, host: Path) -> None:
        saves = Saves(ranks, host, mirror)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MirroredRun, "fetch_file", full)
            saves.save(1)
        saves.save(2)
        assert saves.committed == [1, 2]
        saves.end()
        assert not ranks.is_main or "could not be fetched to this disk" in saves.log.warnings[0]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    on_hosts(tmp_path, 2, live)
    assert check_copies(mirror, tmp_path / "fetched") == [1, 2]
    assert committed_steps(tmp_path / "host-0/run/checkpoints") == [2]
    assert temporaries(tmp_path / "host-0/run/checkpoints") == []


def test_a_folder_that_cannot_be_made_fails_the_save_of_every_rank(tmp_path: Path) -> None:
    """With one disk, too: the other ranks must not wait for a folder that will not come."""

    def live(ranks: Ranks, host: Path) -> None:
        failed: list[str] = []
        run = tmp_path / "run"
        saver = BackgroundSaver(
            run / "checkpoints",
            keep=KEEP,
            on_saved=lambda done, seconds: failed.append("saved"),
            on_failed=lambda error: failed.append(str(error)),
            shared_commit=SharedCommit(ranks),
            deletes_old=ranks.is_main,
        )
        for step in (1, 2):
            saver.save(shard(ranks, step))
            saver.wait()
            ranks.barrier()
            if ranks.is_main and step == 1:
                run.mkdir()
            ranks.barrier()
        assert [text == "saved" for text in failed] == [False, True]

    on_hosts(tmp_path, 2, live)
