"""R19: the mirror of a run loses no copy and shows no half one, whatever the network, the store or a kill do."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redline import remote
from redline.errors import UserError
from redline.training import mirror as mirroring
from redline.training.checkpoint import (
    DamagedCheckpointError,
    Snapshot,
    apply_retention,
    commit,
    committed_steps,
    read_manifest,
    step_name,
    verify,
)
from redline.training.control import RunDirectory
from redline.training.mirror import CheckpointFinder, Mirror, MirroredRun, mirrored_run, restore_run
from stores import BUCKET, Gate, ObjectStore, RandomFaults, object_store

MIRROR = f"gs://{BUCKET}/prefix"
KEEP = 2


class Log:
    """Records events in place of a Monitor."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def emit(self, type: str, **fields: Any) -> None:
        self.events.append({"type": type, **fields})
        self.warnings += [fields["message"]] if type == "warning" else []

    def warn(self, message: str) -> None:
        self.emit("warning", message=message)

    def copied(self) -> list[int]:
        return [event["step"] for event in self.events if event["type"] == "mirror"]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE_S", 0.0)
    monkeypatch.setattr(mirroring, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
def store() -> Iterator[type[ObjectStore]]:
    with object_store() as found:
        yield found


class Scene:
    """A run whose checkpoints are committed and copied step by step, without a thread."""

    def __init__(self, folder: Path, tiny: Callable[[int], Snapshot], url: str = MIRROR) -> None:
        self.run, self.tiny, self.url = RunDirectory(folder / "run"), tiny, url
        self.run.path.mkdir(parents=True)
        (self.run.path / "lock.json").write_text('{"schema": 1, "run_id": "a", "recipe_name": "toy", "recipe": {}}')
        (self.run.path / "events.jsonl").write_text('{"type":"start"}\n')
        self.log, self.digests, self.reported = Log(), dict[int, str](), 0
        self.begin()

    def begin(self) -> None:
        """Start anew, as after a kill: what the process knew of the mirror is gone."""
        self.mirror = Mirror(mirrored_run(self.run.path, self.url), self.run, self.log, keep=KEEP)  # type: ignore[arg-type]

    def save(self, step: int) -> None:
        commit(self.run.checkpoints, self.tiny(step))
        self.digests[step] = read_manifest(self.run.checkpoints / step_name(step))["digest"]
        with self.mirror.held() as held:
            apply_retention(self.run.checkpoints, KEEP, held, fresh=step)

    def synchronize(self) -> bool:
        try:
            self.mirror._synchronize()
        except (UserError, OSError):
            return False
        finally:
            self.reported = max([self.reported, *self.log.copied()])
        return True

    def whole(self) -> dict[int, str]:
        return {step: manifest["digest"] for step, manifest in mirrored_run(self.run.path, self.url).whole()}

    def check(self, folder: Path) -> None:
        """Fetch all copies that count, and compare them with what was saved; the newest reported one is there."""
        whole = self.whole()
        assert self.reported == 0 or self.reported in whole, f"step {self.reported} was reported as copied"
        copy = MirroredRun.at(f"{self.url}/run")
        for step, digest in whole.items():
            assert digest == self.digests[step]
            shutil.rmtree(folder, ignore_errors=True)
            assert verify(copy.fetch(step, folder))["digest"] == digest


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.02, 0.1, 0.3]), md5=st.booleans())
def test_no_fault_loses_a_copy_or_makes_half_a_one_count(
    seed: int, share: float, md5: bool, tiny: Any, tmp_path_factory: Any
) -> None:
    folder, chance = tmp_path_factory.mktemp("mirror"), random.Random(seed)
    with object_store() as store:
        store.tells_md5 = md5
        scene, step, faults = Scene(folder, tiny), 0, RandomFaults(seed, share)
        for _ in range(10):
            store.fault = staticmethod(faults)
            action = chance.choice(("save", "save", "synchronize", "synchronize", "kill"))
            if action == "save":
                step += chance.randint(1, 3)
                scene.save(step)
            elif action == "synchronize":
                scene.synchronize()
            else:
                scene.begin()
            store.fault = staticmethod(lambda kind, path: None)
            scene.check(folder / "restored")
        assert scene.synchronize()
        assert {*committed_steps(scene.run.checkpoints)} <= {*scene.whole()}, "all that the disk has"
        scene.begin()
        assert scene.synchronize()
        assert sorted(scene.whole()) == committed_steps(scene.run.checkpoints), "and no older one stays"
        restored = folder / "elsewhere" / "run"
        restore_run(f"{MIRROR}/run", restored, print)
        assert (restored / "events.jsonl").read_bytes() == (scene.run.path / "events.jsonl").read_bytes()
        assert committed_steps(restored / "checkpoints") == committed_steps(scene.run.checkpoints)[-1:]


def _copy_until_killed(child: Any, run: Path, url: str) -> int:
    directory, log = RunDirectory(run), Log()
    mirror = Mirror(mirrored_run(run, url), directory, log, keep=KEEP)  # type: ignore[arg-type]
    mirror.start()
    child.say_ready()
    return len(mirror.finish(30))


@pytest.mark.parametrize("kills", [50, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_a_killed_mirror_leaves_whole_copies(
    fork: Any, tiny: Any, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """The process that copies is killed at random instants: every copy that counts is whole, and none is lost."""
    chance, killed, ended, step = random.Random(kills), 0, 0, 0
    (tmp_path / "mirror").mkdir()
    scene = Scene(tmp_path, tiny, f"file://{tmp_path}/mirror")
    before: dict[int, str] = {}
    while killed < kills:
        step += 1
        scene.save(step)
        child = fork(lambda child: _copy_until_killed(child, scene.run.path, scene.url))
        child.await_ready()
        if chance.random() < 0.9:
            time.sleep(chance.uniform(0, 0.02))
            child.send(signal.SIGKILL)
        code = child.wait()
        assert code in (0, -signal.SIGKILL)
        killed, ended = killed + (code != 0), ended + (code == 0)
        scene.check(tmp_path / "restored")
        now = scene.whole()
        assert not before or max(now) >= max(before), "a newer copy is never lost"
        assert code != 0 or sorted(now) == committed_steps(scene.run.checkpoints)
        before = now
    say(f"R19: {killed} kills of a mirror, {ended} copies to the end, 0 copies lost, 0 half ones count")


def test_a_step_that_is_saved_again_replaces_its_copy(store: Any, tiny: Any, tmp_path: Path) -> None:
    scene = Scene(tmp_path, tiny)
    scene.save(3)
    assert scene.synchronize()
    shutil.rmtree(scene.run.checkpoints)
    again = Snapshot(3, tiny(4).tensors, {"step": 3, "best": None, "identity": {"data": "abc"}})
    commit(scene.run.checkpoints, again)
    scene.begin()
    seen: list[list[int]] = []
    store.fault = staticmethod(lambda kind, path: seen.append(scene_steps(store)) if kind == "write" else None)
    assert scene.synchronize()
    assert scene.whole()[3] == read_manifest(scene.run.checkpoints / step_name(3))["digest"]
    assert seen[-1] == [], "the old manifest is gone before the first new file is there"


def scene_steps(store: type[ObjectStore]) -> list[int]:
    return [int(path.split("/")[-2][5:]) for path in store.objects if path.endswith("manifest.json")]


def test_steps_that_the_run_gives_up_leave_the_mirror(store: Any, tiny: Any, tmp_path: Path) -> None:
    scene = Scene(tmp_path, tiny)
    scene.save(3)
    scene.save(6)
    assert scene.synchronize()
    shutil.rmtree(scene.run.checkpoints / step_name(6))
    scene.mirror = Mirror(mirrored_run(scene.run.path, MIRROR), scene.run, scene.log, keep=KEEP, forget=[6])  # type: ignore[arg-type]
    assert scene.synchronize()
    assert list(scene.whole()) == [3]


def test_the_best_checkpoint_stays_and_older_ones_go(store: Any, tiny: Any, tmp_path: Path) -> None:
    scene = Scene(tmp_path, tiny)
    for step in range(1, 6):
        scene.save(step)
        scene.mirror._protected = (1,)
        assert scene.synchronize()
    assert sorted(scene.whole()) == [1, 4, 5]
    deleted = [path for kind, path in store.requests if kind == "delete" and step_name(2) in path]
    assert deleted[0].endswith("manifest.json")


def test_a_checkpoint_is_not_deleted_while_it_is_copied(store: Any, tiny: Any, tmp_path: Path) -> None:
    """Otherwise a store slower than the saves would never get a whole one."""
    gate, scene = Gate(), Scene(tmp_path, tiny)
    store.fault = staticmethod(gate)
    scene.save(1)
    scene.mirror.start()
    assert gate.reached.wait(10)
    for step in range(2, 7):
        scene.save(step)
    assert committed_steps(scene.run.checkpoints) == [1, 5, 6]
    gate.open.set()
    assert scene.mirror.finish(10) == []
    assert scene.log.copied()[0] == 1
    assert committed_steps(scene.run.checkpoints) == [5, 6]


def test_only_the_newest_process_copies(store: Any, tiny: Any, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "old", tiny)
    scene.save(1)
    assert scene.synchronize()
    other = Scene(tmp_path / "new", tiny)
    other.save(1)
    assert other.synchronize()
    scene.save(2)
    scene.mirror.start()
    assert scene.mirror.finish(10) == [2]
    assert "another process mirrors this run" in scene.log.warnings[0]
    assert list(scene.whole()) == [1]


def test_what_was_not_copied_is_reported(store: Any, tiny: Any, tmp_path: Path) -> None:
    def refuse(kind: str, path: str) -> None:
        raise ConnectionResetError("connection reset by peer")

    scene = Scene(tmp_path, tiny)
    scene.save(1)
    assert scene.synchronize()
    scene.save(2)
    store.fault = staticmethod(refuse)
    scene.mirror.start()
    assert scene.mirror.finish(0.3) == [2]
    assert "has no whole copy of step 2" in scene.log.warnings[-1]
    assert "its newest is of step 1" in scene.log.warnings[-1]
    assert len(scene.log.warnings) == 2, "one warning for all repetitions, and one at the end"


def test_damage_on_the_disk_is_not_copied(store: Any, tiny: Any, tmp_path: Path) -> None:
    scene = Scene(tmp_path, tiny)
    scene.save(1)
    path = scene.run.checkpoints / step_name(1) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert scene.synchronize()
    assert scene.whole() == {}
    assert "has changed on the disk" in scene.log.warnings[0]


def test_a_file_that_is_gone_from_the_disk_stops_no_other_copy(store: Any, tiny: Any, tmp_path: Path) -> None:
    scene = Scene(tmp_path, tiny)
    scene.save(1)
    scene.save(2)
    (scene.run.checkpoints / step_name(2) / "model.safetensors").unlink()
    assert scene.synchronize()
    assert list(scene.whole()) == [1]


def test_the_newest_whole_checkpoint_of_disk_and_mirror(store: Any, tiny: Any, tmp_path: Path) -> None:
    scene = Scene(tmp_path, tiny)
    for step in (1, 2):
        scene.save(step)
        assert scene.synchronize()
    finder = CheckpointFinder(scene.run.path, MIRROR, scene.log.warn)
    damaged = scene.run.checkpoints / step_name(2) / "state.json"
    damaged.write_bytes(b"{}")
    newest = finder.newest()
    assert newest is not None
    assert newest.name == step_name(2), "the copy replaces the damaged one"
    assert verify(newest)
    store.objects[f"{BUCKET}/prefix/run/checkpoints/{step_name(2)}/model.safetensors"] = b""
    shutil.rmtree(scene.run.checkpoints)
    newest = finder.newest()
    assert newest is not None
    assert newest.name == step_name(1), "half a copy does not count"
    commit(scene.run.checkpoints, tiny(9))
    store.fault = staticmethod(RandomFaults(1, 1.0))
    newest = finder.newest()
    assert newest is not None
    assert newest.name == step_name(9), "without a network the disk counts"
    shutil.rmtree(scene.run.checkpoints)
    with pytest.raises(UserError):
        finder.newest()


@pytest.mark.parametrize("name", ["../../outside", "/etc/outside", ".hidden", "a/b"])
def test_a_manifest_cannot_write_outside(store: Any, tiny: Any, tmp_path: Path, name: str) -> None:
    import hashlib
    import json

    from redline.training.checkpoint import canonical_json

    body = {"schema": 1, "step": 1, "files": {name: {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}}}
    manifest = {**body, "digest": hashlib.sha256(canonical_json(body)).hexdigest()}
    folder = f"{BUCKET}/prefix/run/checkpoints/{step_name(1)}"
    store.objects |= {f"{folder}/manifest.json": canonical_json(manifest), f"{folder}/{name}": b"x"}
    assert json.loads(store.objects[f"{folder}/manifest.json"])["digest"]
    (tmp_path / "run").mkdir()
    with pytest.raises(DamagedCheckpointError):
        MirroredRun.at(f"{MIRROR}/run").fetch(1, tmp_path / "run" / "checkpoints")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
