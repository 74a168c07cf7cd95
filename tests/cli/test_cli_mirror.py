"""checkpoint.mirror through the command line: machines that are gone, stores that do not answer, mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import torch

from redline import remote
from redline.errors import EXIT_PREEMPTED
from redline.recipe.lock import read_lock
from redline.runs.events import read_events
from redline.training import mirror as mirroring
from redline.training.checkpoint import committed_steps, step_name, verify
from several import Fork, free_port, rank_environment
from stores import BUCKET, Gate, ObjectStore, object_store

MIRROR = f"gs://{BUCKET}/prefix"
OPTIONS = ("train.steps=12", "checkpoint.every=3", "checkpoint.best=false", "model.dropout=0.1")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ObjectStore]]:
    monkeypatch.setattr(remote, "_PAUSE_S", 0.0)
    with object_store() as found:
        yield found


@pytest.fixture
def train(inside: Any, world: Any) -> Callable[..., Any]:
    words = ["quickstart", *world.tiny, f"data.source={world.corpus}", *OPTIONS]
    return lambda *more: inside("train", *words, *more)


@pytest.fixture
def preempted_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make SIGTERM arrive while a step is computed, once."""

    def at(number: int) -> None:
        from redline.training.step import Step

        original, sent = Step.__call__, list[int]()

        def step(self: Any, count: int, *rest: Any) -> Any:
            if count == number and not sent:
                sent.append(count)
                os.kill(os.getpid(), signal.SIGTERM)
            return original(self, count, *rest)

        monkeypatch.setattr(Step, "__call__", step)

    return at


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["type"] == "step"]


def warnings(run: Path) -> str:
    return " ".join(event["message"] for event in read_events(run / "events.jsonl").of_type("warning"))


def test_a_preempted_run_continues_on_a_machine_with_an_empty_disk(
    store: Any, train: Any, inside: Any, preempted_at: Any, tensors_of: Any, tmp_path: Path
) -> None:
    assert train("--run", "runs/whole").code == 0
    whole = tmp_path / "runs/whole"
    preempted_at(7)
    assert train("--run", "runs/one", f"checkpoint.mirror={MIRROR}").code == EXIT_PREEMPTED
    shutil.rmtree(tmp_path / "runs/one")
    resumed = inside("train", "--resume", f"{MIRROR}/one")
    assert resumed.code == 0, resumed.err
    run = tmp_path / "runs/one"
    assert read_events(run / "events.jsonl").resumes[0]["resumed_from"] == 8
    assert losses(run) == losses(whole)
    last, expected = tensors_of(run / "checkpoints" / step_name(12)), tensors_of(whole / "checkpoints" / step_name(12))
    assert all(torch.equal(tensor, last[name]) for name, tensor in expected.items())
    assert read_lock(run)["recipe"]["checkpoint"]["mirror"] == MIRROR
    # The run has ended, and so it has in every way to name it.
    for words in (
        ["--resume", f"{MIRROR}/one"],
        ["--resume", "one", f"checkpoint.mirror={MIRROR}"],
        ["--run", "runs/one", "--continue", f"checkpoint.mirror={MIRROR}", *OPTIONS],
    ):
        shutil.rmtree(run)
        again = inside("train", *words)
        assert again.code == 0, again.err
        assert "finished   already, at step 12" in again.err
        assert losses(run) == losses(whole)


def test_training_does_not_wait_for_the_store(
    store: Any, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    store.fault = staticmethod(gate)
    monkeypatch.setattr(mirroring, "FINAL_WAIT_S", 0.2)
    assert train("--run", "runs/one", f"checkpoint.mirror={MIRROR}").code == 0
    assert gate.reached.is_set()
    assert len(losses(tmp_path / "runs/one")) == 12
    assert "has no whole copy of step" in warnings(tmp_path / "runs/one")
    gate.open.set()


def test_a_preempted_run_says_what_was_not_copied(
    store: Any, train: Any, preempted_at: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    store.fault = staticmethod(gate)
    monkeypatch.setattr(mirroring, "PREEMPTED_WAIT_S", 0.2)
    preempted_at(7)
    assert train("--run", "runs/one", f"checkpoint.mirror={MIRROR}").code == EXIT_PREEMPTED
    assert "it has no checkpoint" in warnings(tmp_path / "runs/one")
    gate.open.set()


def test_a_store_that_fails_does_not_fail_the_run_nor_learn_a_secret(
    store: Any, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "canary/of+the/bucket/BBBBBBBBBBBBBBBBBBB"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setattr(mirroring, "FINAL_WAIT_S", 0.2)

    def refuse(kind: str, path: str) -> None:
        if "/checkpoints/" in path:
            raise OSError(f"403 for https://host/x?X-Amz-Signature=canary-signature with {secret}")

    store.fault = staticmethod(refuse)
    done = train("--run", "runs/one", f"checkpoint.mirror={MIRROR}")
    assert done.code == 0
    written = [path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    for text in (*written, *store.objects.values(), (done.out + done.err).encode()):
        assert secret.encode() not in text
        assert b"canary-signature" not in text
    assert "could not be copied" in warnings(tmp_path / "runs/one")


def test_new_runs_start_with_weights_from_a_mirror(store: Any, train: Any, inside: Any, tmp_path: Path) -> None:
    assert train("--run", "runs/one", f"checkpoint.mirror={MIRROR}").code == 0
    digest = weights_of(tmp_path / "runs/one")
    assert train("--run", "runs/two", f"model.init_from={MIRROR}/one@9").code == 0
    lock = read_lock(tmp_path / "runs/two")["init_from"]
    assert (lock["step"], lock["fingerprint"], lock["source"]) == (9, digest[9], f"{MIRROR}/one@9")
    shutil.rmtree(tmp_path / "runs/one/checkpoints" / step_name(12))
    assert train("--run", "runs/three", "model.init_from=runs/one").code == 0
    assert read_lock(tmp_path / "runs/three")["init_from"]["fingerprint"] == digest[12], "the mirror has a newer one"
    missing = train("--run", "runs/four", f"model.init_from={MIRROR}/one@5")
    assert "no whole checkpoint @5" in missing.message


def weights_of(run: Path) -> dict[int, str]:
    folder = run / "checkpoints"
    manifests = {s: json.loads((folder / step_name(s) / "manifest.json").read_text()) for s in committed_steps(folder)}
    return {step: manifest["files"]["model.safetensors"]["sha256"] for step, manifest in manifests.items()}


@pytest.mark.parametrize(
    ("mirror", "sentence", "fix"),
    [
        ("gs://nothing/prefix", "bucket nothing does not exist", "Check its name"),
        ("./folder", "not a URL", "s3://"),
        ("ftp://host/folder", "not a URL of a known kind", "s3://"),
        ("s3://", "names no bucket", "s3://NAME/PREFIX"),
        ("file://folder", "names no folder", "file:///FOLDER"),
        ("file:///no/such/folder", "folder does not exist", "Create it"),
        ("file:///proc", "no file can be written to this folder", "permissions"),
        ("gs://me:password-1234@bucket/x", "login or a signature", "credentials belong in the environment"),
        ("gs://bucket/x?X-Amz-Signature=password-1234", "login or a signature", "credentials belong"),
    ],
)
def test_mistakes_are_refused_before_anything_trains(
    store: Any, train: Any, tmp_path: Path, mirror: str, sentence: str, fix: str
) -> None:
    refused = train("--run", "runs/one", f"checkpoint.mirror={mirror}")
    assert refused.code == 2
    assert sentence in refused.message
    assert fix in refused.message
    assert "password-1234" not in refused.message
    assert not (tmp_path / "runs/one").exists()


class NoCredentialsError(Exception):
    """As botocore calls it."""


def test_a_store_without_credentials_or_permission_is_refused(store: Any, train: Any, tmp_path: Path) -> None:
    for error, sentence in ((NoCredentialsError("Unable to locate credentials"), "no credentials"),
                            (PermissionError("AccessDenied"), "refuses access")):  # fmt: skip

        def refuse(kind: str, path: str, error: Exception = error) -> None:
            if kind == "write":
                raise error

        store.fault = staticmethod(refuse)
        refused = train("--run", "runs/one", f"checkpoint.mirror={MIRROR}")
        assert refused.code == 2
        assert sentence in refused.message
        assert "GOOGLE_APPLICATION_CREDENTIALS" in refused.message
        assert not (tmp_path / "runs/one").exists()


def test_a_missing_bucket_is_named_when_a_run_is_resumed(store: Any, inside: Any) -> None:
    refused = inside("train", "--resume", "gs://nothing/prefix/one")
    assert refused.code == 1
    assert "bucket nothing does not exist" in refused.message


@pytest.mark.parametrize(("seconds", "sentence"), [(0, "refuses access"), (3600, "refuses the clock")])
def test_the_date_of_an_answer_tells_a_wrong_clock(seconds: int, sentence: str) -> None:
    """S3 gives no reason in its answer to a HEAD request."""
    error = PermissionError("Forbidden")
    error.__cause__ = cause = Exception("An error occurred (403) when calling the HeadObject operation: Forbidden")
    date = formatdate(time.time() + seconds, usegmt=True)
    cause.response = {"ResponseMetadata": {"HTTPHeaders": {"date": date}}}  # type: ignore[attr-defined] # as botocore's
    explained = remote.explain("s3://bucket/prefix", error)
    assert sentence in explained.what
    assert explained.passing == bool(seconds)


def test_a_missing_package_is_named(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    refused = train("--run", "runs/one", "checkpoint.mirror=s3://bucket/prefix")
    assert refused.code == 2
    assert "s3fs" in refused.message
    assert "remote" in refused.message


def test_another_run_of_the_same_name_is_not_overwritten(store: Any, train: Any, inside: Any, tmp_path: Path) -> None:
    assert train("--run", "runs/one", f"checkpoint.mirror={MIRROR}", "train.steps=3").code == 0
    (tmp_path / "runs/one").rename(tmp_path / "runs/old")
    refused = train("--run", "runs/one", f"checkpoint.mirror={MIRROR}")
    assert refused.code == 2
    assert f"redline train --resume {MIRROR}/one" in refused.message
    assert train("--run", "runs/one", "train.steps=3").code == 0
    other = inside("train", "--resume", f"{MIRROR}/one")
    assert other.code == 2
    assert "holds another run" in other.message
    assert "Runs there: one" in inside("train", "--resume", MIRROR).message


def on_two_nodes(
    folder: Path, *words: str, prepare: Callable[[int], None] = lambda rank: None
) -> tuple[list[int], str]:
    """Run a command on two ranks in two folders, as on two machines; return the exit codes and what they wrote."""
    port, forks = free_port(), []

    def node(rank: int) -> Callable[[], int]:
        def live() -> int:
            from redline.cli.main import run

            os.chdir(folder / f"node-{rank}")
            prepare(rank)
            sys.argv = ["redline", *words]
            return run()

        return live

    for rank in range(2):
        (folder / f"node-{rank}").mkdir(exist_ok=True)
        (folder / f"node-{rank}.log").unlink(missing_ok=True)
        apart = {**rank_environment(rank, 2, port), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        forks.append(Fork(node(rank), apart, folder / f"node-{rank}.log"))
    deadline = time.monotonic() + 120
    try:
        while any(fork.poll() is None for fork in forks) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        for fork in forks:
            fork.end()
    logs = "\n".join((folder / f"node-{rank}.log").read_text() for rank in range(2))
    return [int(fork.code or 0) for fork in forks], logs


def test_nodes_that_share_no_disk_continue_from_the_mirror(train: Any, world: Any, tmp_path: Path) -> None:
    """Each begins with an empty disk and ends with the same weights."""
    (tmp_path / "mirror").mkdir()
    mirror = f"file://{tmp_path}/mirror"
    assert train("--run", "runs/one", f"checkpoint.mirror={mirror}", "train.steps=6", "model.dropout=0").code == 0
    shutil.rmtree(tmp_path / "runs")
    codes, logs = on_two_nodes(tmp_path, "train", "--resume", f"{mirror}/one", "train.steps=12")
    assert codes == [0, 0], logs
    assert committed_steps(tmp_path / "node-0/runs/one/checkpoints")[-1] == 12
    assert committed_steps(tmp_path / "node-1/runs/one/checkpoints") == [6], "it fetched rank 0's"
    assert max(mirroring.MirroredRun.at(f"{mirror}/one").steps()) == 12


def test_nodes_with_shards_that_share_no_disk_save_in_the_mirror(
    train: Any, inside: Any, world: Any, tmp_path: Path
) -> None:
    """They lose a save to the store, and then both disks, and train as one process does."""
    (tmp_path / "mirror").mkdir()
    mirror = f"file://{tmp_path}/mirror"
    options = [*OPTIONS, "train.steps=6", "model.dropout=0", f"checkpoint.mirror={mirror}", "parallel.mode=fsdp"]
    words = ["train", "quickstart", *world.tiny, f"data.source={world.corpus}", *options, "--run", "runs/one"]

    def refuse_step_3(rank: int) -> None:
        original = remote.Store.upload

        def upload(self: Any, local: Path, name: str) -> str:
            if rank == 1 and step_name(3) in name:
                raise remote.StoreError("the store refuses access.", where=self.url, fix="Ask its owner.")
            return original(self, local, name)

        remote.Store.upload = upload  # type: ignore[method-assign] # in a fork

    codes, logs = on_two_nodes(tmp_path, *words, prepare=refuse_step_3)
    assert codes == [0, 0], logs
    copy = mirroring.MirroredRun.at(f"{mirror}/one")
    assert copy.steps() == [step for step, _ in copy.whole()] == [6]
    first = tmp_path / "node-0/runs/one"
    assert "the store refuses access" in warnings(first)
    assert committed_steps(first / "checkpoints") == [6]
    assert verify(first / "checkpoints" / step_name(6))
    assert list((tmp_path / "node-1/runs/one/checkpoints").iterdir()) == []
    for node in range(2):
        shutil.rmtree(tmp_path / f"node-{node}")
    codes, logs = on_two_nodes(tmp_path, "train", "--resume", f"{mirror}/one", "train.steps=12")
    assert codes == [0, 0], logs
    assert copy.steps()[-2:] == [9, 12]
    assert committed_steps(tmp_path / "node-1/runs/one/checkpoints") == [6]
    assert train("--run", "runs/alone", "model.dropout=0", "train.steps=6").code == 0
    assert inside("train", "--resume", "alone", "train.steps=12").code == 0
    assert losses(first) == pytest.approx(losses(tmp_path / "runs/alone"), abs=1e-4)


def test_nodes_with_shards_that_share_no_disk_need_a_mirror(world: Any, tmp_path: Path) -> None:
    options = [*OPTIONS, "parallel.mode=fsdp", "--run", "runs/one"]
    words = ["train", "quickstart", *world.tiny, f"data.source={world.corpus}", *options]
    codes, logs = on_two_nodes(tmp_path, *words)
    assert 0 not in codes
    assert "rank 1 cannot see this folder of rank 0" in logs
    assert "checkpoint.mirror" in logs
    assert not (tmp_path / "node-0/runs/one/lock.json").exists()


def test_a_node_without_the_checkpoint_says_so(train: Any, tmp_path: Path) -> None:
    """With whole weights on every rank, rank 0 saves alone; without a mirror nobody can resume elsewhere."""
    assert train("--run", "runs/one", "train.steps=6").code == 0
    for node in range(2):
        shutil.copytree(tmp_path / "runs", tmp_path / f"node-{node}/runs", symlinks=True)
    shutil.rmtree(tmp_path / "node-1/runs/one/checkpoints")
    codes, logs = on_two_nodes(tmp_path, "train", "--resume", "runs/one", "train.steps=12")
    assert 0 not in codes
    assert "this node does not have step-00000006" in logs
