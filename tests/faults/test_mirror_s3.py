"""The mirror against a real S3 server (moto's) through s3fs, with a proxy between them that breaks requests.

`make soak` and `make nightly` install what this needs, the extra `soak`. REDLINE_RESULTS names a JSON file to which
each call adds its figures, and REDLINE_SOAK_S the seconds of a call: a long soak can be interrupted and goes on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_proxy import FaultyProxy
from test_mirror import KEEP, Log, Scene

from redline import remote
from redline.errors import UserError
from redline.runs.events import read_events
from redline.training import mirror as mirroring
from redline.training.checkpoint import Snapshot, committed_steps, step_name
from redline.training.control import RunDirectory
from redline.training.mirror import Mirror, MirroredRun, mirrored_run, restore_run
from several import free_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
SERVER = """
import sys, time
from moto.server import ThreadedMotoServer
ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False).start()
time.sleep(1e6)
"""
MIRROR = "s3://runs/prefix"
STEPS = 20
SECONDS = float(os.environ.get("REDLINE_SOAK_S", "600"))  # of each test that goes on as long
RUN = (f"train.steps={STEPS}", "checkpoint.every=1", "checkpoint.keep=2", "model.dropout=0.1", "checkpoint.best=false")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A bucket behind a proxy, and the environment that leads to it."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    port = free_port()
    command, null = [sys.executable, "-c", SERVER, str(port)], subprocess.DEVNULL
    server = subprocess.Popen(command, stdout=null, stderr=null)
    proxy = FaultyProxy(port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "canary-of-the-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-of-the-secret-key")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(remote, "_PAUSE_S", 0.02)
    monkeypatch.setattr(mirroring, "_FIRST_PAUSE_S", 0.05)
    for _ in range(600):
        try:
            put = urllib.request.Request(f"http://127.0.0.1:{port}/runs", method="PUT")
            put.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request")
            urllib.request.urlopen(put)
            break
        except OSError:
            time.sleep(0.1)
    try:
        yield proxy
    finally:
        proxy.close()
        server.kill()
        server.wait()


class Tally:
    """The figures of one test, added up over all calls."""

    def __init__(self, name: str) -> None:
        self.name, self.file = name, os.environ.get("REDLINE_RESULTS")
        self.all = json.loads(Path(self.file).read_text()) if self.file and Path(self.file).exists() else {}
        self.before: dict[str, Any] = self.all.get(name, {})
        self.calls = int(self.before.get("calls", 0))

    def add(self, figures: dict[str, Any], say: Callable[[str], None]) -> None:
        total = _added(self.before, {"calls": 1, **figures})
        say(f"{self.name}: {json.dumps(total)}")
        if self.file:
            about = {"benchmark": "mirror-s3", "test": "tests/faults/test_mirror_s3.py", "versions": versions()}
            part = Path(self.file).with_suffix(".part")
            part.write_text(json.dumps({**about, **self.all, self.name: total}, indent=1) + "\n")
            part.replace(self.file)


def _added(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the sums; of a figure called `most_…` the larger one."""
    total = {**before}
    for key, value in now.items():
        if isinstance(value, dict):
            total[key] = _added(before.get(key, {}), value)
        else:
            total[key] = max(before.get(key, 0), value) if key.startswith("most_") else before.get(key, 0) + value
    return total


def versions() -> dict[str, str]:
    from importlib import metadata

    return {name: metadata.version(name) for name in ("s3fs", "aiobotocore", "botocore", "moto", "fsspec", "torch")}


def test_faults_between_the_mirror_and_s3(
    s3: FaultyProxy, tiny: Any, tmp_path: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request in ten goes wrong, over saves, copies and restarts; every copy is fetched and compared after each."""
    tally = Tally("faults")
    chance, step, failed, checks = random.Random(7 + tally.calls), 0, 0, 0
    s3.reseed(tally.calls)
    scene, saved = Scene(tmp_path, tiny, MIRROR), 0
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        s3.share = 0.1
        action = chance.choice(("save", "save", "synchronize", "synchronize", "synchronize", "kill"))
        if action == "save":
            step, saved = step + 1, saved + 1
            scene.save(step)
        elif action == "synchronize":
            failed += not scene.synchronize()
        else:
            scene.begin()
        s3.share = 0.0
        if action == "synchronize":
            scene.check(tmp_path / "restored")
            checks += len(scene.whole())
    scene.begin()
    assert scene.synchronize()
    assert sorted(scene.whole()) == committed_steps(scene.run.checkpoints)
    copies = len({*scene.log.copied()})
    assert copies > 0
    figures = {"requests": s3.requests, "faults": dict(s3.faults), "saves": saved, "steps_copied": copies}
    figures |= {"passes_that_failed": failed, "copies_fetched_and_compared": checks, "lost": 0, "half": 0}
    tally.add(figures, say)


def test_a_multipart_upload_is_verified(s3: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 5 << 20)
    (tmp_path / "restored").mkdir()

    def large(step: int) -> Snapshot:
        generator = torch.Generator().manual_seed(step)
        tensors = {"model": {"weight": torch.randn(3_300_000, generator=generator)}}
        return Snapshot(step, tensors, {"step": step, "best": None, "identity": {}})

    scene = Scene(tmp_path, large, MIRROR)
    read_back: list[str] = []
    original = remote.Store._remote_sha256
    monkeypatch.setattr(
        remote.Store, "_remote_sha256", lambda self, name, size: read_back.append(name) or original(self, name, size)
    )
    scene.save(1)
    assert scene.synchronize()
    assert read_back == [], "the composite MD5 of 3 parts is known"
    s3.share, s3.kinds = 0.2, ("partial upload", "reset", "lost answer", "500")
    for step in (2, 3, 4):
        scene.save(step)
        while not scene.synchronize():
            pass
    s3.share = 0.0
    scene.check(tmp_path / "restored" / "checkpoints")


def test_a_wrong_clock_stops_no_run_and_loses_nothing(s3: FaultyProxy, tiny: Any, tmp_path: Path) -> None:
    scene = Scene(tmp_path, tiny, MIRROR)
    scene.save(1)
    assert scene.synchronize()
    s3.share, s3.kinds = 1.0, ("clock",)
    scene.save(2)
    scene.mirror.start()
    assert scene.mirror.finish(3) == [2]
    assert "refuses the clock" in " ".join(scene.log.warnings)
    s3.share = 0.0
    assert list(scene.whole()) == [1]
    scene.begin()
    assert scene.synchronize()
    assert sorted(scene.whole()) == [1, 2]


def test_missing_buckets_and_credentials(s3: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="the bucket nothing does not exist"):
        mirroring.check_mirror("s3://nothing/prefix", tmp_path / "run", resumed=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match="no credentials"):
        mirroring.check_mirror(MIRROR, tmp_path / "run", resumed=False)


def losses(run: Path) -> list[tuple[int, float]]:
    return [(e["step"], e["loss"]) for e in read_events(run / "events.jsonl") if e["type"] == "step"]


@pytest.mark.parametrize("kills", [50])
def test_killed_runs_continue_on_empty_disks(
    s3: FaultyProxy, fork: Any, world: Any, tmp_path: Path, say: Any, tensors_of: Any, kills: int
) -> None:
    """A run is killed at a random instant and its disk is lost; the next machine restores it from the bucket."""
    import s3fs  # noqa: F401 - imported before the forks, which would each import it

    tally = Tally("kills")
    kills -= tally.before.get("kills", 0)
    chance, killed, runs, lost, behind = random.Random(3 + tally.calls), 0, 0, 0, [0]
    s3.reseed(tally.calls)
    world.run(tmp_path / "whole", *RUN)
    expected = tensors_of(tmp_path / "whole/checkpoints" / step_name(STEPS))
    seconds = time.monotonic()

    def attempt(child: Any, run: Path) -> int:
        with RunDirectory(run) as directory:
            finder = mirroring.CheckpointFinder(run, MIRROR, lambda text: None)
            resumed = (run / "lock.json").exists()
            newest = finder.newest() if resumed else None
            monitor = Log()
            mirror = Mirror(mirrored_run(run, MIRROR), directory, monitor, keep=KEEP)  # type: ignore[arg-type]
            trainer = world.trainer(directory, *RUN, checkpoint=newest, mirror=mirror)
            mirror.monitor = trainer.monitor
            (run / "lock.json").write_text(
                json.dumps({"schema": 1, "run_id": run.name, "recipe_name": "a", "recipe": {}})
            )
            trainer.monitor.emit("start", schema=1, resumed_from=trainer.state.step if resumed else None)
            mirror.start()
            child.say_ready()
            code = trainer.run().exit_code
            assert mirror.finish(120) == []
            trainer.monitor.log.close()
        return int(code)

    end = seconds + SECONDS
    while killed < kills and time.monotonic() < end:
        runs += 1
        run, url = tmp_path / f"run-{runs}", f"{MIRROR}/run-{runs}"
        while True:
            s3.share = 0.05
            child = fork(lambda child, run=run: attempt(child, run))
            if killed < kills and time.monotonic() < end:
                child.await_ready(120)
                time.sleep(chance.uniform(0, 1.5))
                child.send(signal.SIGKILL)
            code = child.wait()
            assert code in (0, -signal.SIGKILL), code
            s3.share = 0.0
            if code == 0:
                break
            killed += 1
            events = read_events(run / "events.jsonl") if run.exists() else []
            reported = max((e["step"] for e in events if e["type"] == "mirror"), default=0)
            saved = max((e["step"] for e in events if e["type"] == "checkpoint"), default=0)
            shutil.rmtree(run, ignore_errors=True)
            remote_run = MirroredRun.at(url)
            if remote_run.lock() is not None:
                restore_run(url, run, lambda text: None)
            newest = max(committed_steps(run / "checkpoints"), default=0)
            lost += newest < reported
            assert lost == 0, (reported, newest)
            behind.append(saved - newest)
        assert losses(run) == losses(tmp_path / "whole")
        got = tensors_of(run / "checkpoints" / step_name(STEPS))
        assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    figures = {"kills": killed, "runs": runs, "reported_copies_lost": lost, "runs_with_another_curve": 0}
    figures |= {"steps_not_copied_yet": sum(behind), "most_steps_not_copied_yet": max(behind)}
    figures |= {"requests": s3.requests, "faults": dict(s3.faults), "seconds": round(time.monotonic() - seconds)}
    tally.add(figures, say)
