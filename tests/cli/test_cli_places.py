"""Paths that cannot be written, or not read again, are refused with one message before any work is done."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from redline.errors import UserError
from redline.launch import start as running


@pytest.fixture(params=["/proc/nope", "a file"])
def no_cache(request: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    place = request.param
    if place == "a file":
        place = tmp_path_factory.mktemp("taken") / "file"
        place.touch()
    monkeypatch.setenv("REDLINE_CACHE", str(place))


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize(
    "words",
    [
        ("train", "RECIPE", "--run", "run"),
        ("train", "RECIPE", "--dry-run"),
        ("train", "RECIPE", "--dry-run", "data.source=[CORPUS, embedded]", "data.tokenizer=train:300"),
        ("train", "RECIPE", "--dry-run", "data.stream=true"),
        ("profile", "RECIPE"),
    ],
    ids=" ".join,
)
def test_an_unusable_cache_folder(
    inside: Any, recipe: str, corpus: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    answer = inside(*(word.replace("RECIPE", recipe).replace("CORPUS", str(corpus)) for word in words))
    assert answer.code == 1
    assert "the cache cannot be written (No" in answer.message
    assert "REDLINE_CACHE" in answer.message, "how to fix it"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_cache")
def test_other_text_without_a_cache(inside: Any, home: Path, corpus: Path) -> None:
    answer = inside("eval", "latest", "--data", str(corpus), cwd=home)
    assert answer.code == 1
    assert "the cache cannot be written" in answer.message


@pytest.mark.usefixtures("no_cache")
def test_a_base_cannot_be_unpacked_without_a_cache(tmp_path: Path) -> None:
    from redline.models.pretrained import unpack_gguf

    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(UserError, match="the cache cannot be written"):
        unpack_gguf(tmp_path / "a.gguf", lambda _: None)


@pytest.mark.usefixtures("no_cache")
def test_teachers_cannot_be_kept_without_a_cache() -> None:
    import numpy as np
    import torch

    from redline.jobs.latent_prefix.teacher import TeacherStates

    with pytest.raises(UserError, match="the cache cannot be written"):
        TeacherStates({}, rows=1, k=1, width=2, dtype=torch.float32)._write(np.zeros(1, int), torch.zeros(1, 1, 2))


def test_tokens_that_cannot_be_written(inside: Any, corpus: Path) -> None:
    answer = inside("prepare", str(corpus), "--tokenizer", "bytes", "--out", "/proc/x")
    assert answer.code == 1
    assert "/proc/x: the output cannot be written (No such file or directory)" in answer.message
    assert "--out" in answer.message, "how to fix it"


@pytest.mark.parametrize("kind", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_write_errors_outside_the_cache(inside: Any, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    def refused() -> None:
        raise OSError(kind, os.strerror(kind), "/some/file")

    monkeypatch.setattr("redline.cli.greeting.greet", refused)
    answer = inside()
    assert answer.code == 1
    assert answer.message.startswith(f"redline: /some/file: {os.strerror(kind)}. ")


@pytest.mark.parametrize("kind", [errno.ENOENT, errno.ENOTDIR])
def test_possible_bugs_are_shown_with_a_traceback(inside: Any, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    def missing() -> None:
        raise OSError(kind, os.strerror(kind), "/some/file")

    monkeypatch.setattr("redline.cli.greeting.greet", missing)
    assert "Traceback" in inside().err


@pytest.mark.parametrize("below", ["", "/below"])
@pytest.mark.parametrize("sweep", [(), ("--sweep", "train.lr=0.1,0.2"), ("--supervise",)], ids=str)
def test_a_path_that_no_checkpoint_could_be_read_from(
    inside: Any, recipe: str, tmp_path: Path, below: str, sweep: tuple[str, ...]
) -> None:
    answer = inside("train", recipe, *sweep, "--run", os.fsdecode(b"r\xe9") + below)
    assert answer.code == 2
    assert "the path is not UTF-8" in answer.message
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_moved_to_such_a_path(inside: Any, home: Path, tmp_path: Path) -> None:
    """Otherwise the run would start again although it has intact checkpoints."""
    name = os.fsdecode(b"r\xe9")
    shutil.copytree((home / "runs/latest").resolve(), tmp_path / name)
    answer = inside("train", "--resume", name, "train.steps=9")
    assert answer.code == 2
    assert "rename the folder." in answer.message


def test_in_a_folder_of_such_a_path_a_run_is_read_again(inside: Any, recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"r\xe9")
    folder.mkdir()
    quick = ("train.steps=1", "eval.samples=0")
    assert inside("train", recipe, *quick, "--run", "run", cwd=folder).code == 0
    assert "run at step 1 " in inside("eval", "run", cwd=folder).out


def test_a_run_is_read_and_resumed_from_any_folder(inside: Any, recipe: str, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "notes")
    (tmp_path / "elsewhere/notes").mkdir(parents=True)
    (tmp_path / "elsewhere/notes/other.txt").write_text("another text of the same name")
    (tmp_path / "bytes").mkdir()  # a name, whatever lies there
    assert inside("train", recipe, "data.source=./notes", "--run", "runs/a").code == 0
    there = inside("eval", "runs/a", "--json").out
    away = inside("eval", "../runs/a", "--json", cwd=tmp_path / "elsewhere")
    assert json.loads(away.out)["loss"] == json.loads(there)["loss"]
    again = inside("train", "--resume", "../runs/a", "train.steps=7", cwd=tmp_path / "elsewhere")
    assert (again.code, "step 7" in again.err) == (0, True), again.err


@pytest.mark.parametrize(
    ("place", "why"), [("runs", "the folder of all runs"), ("", "the current folder"), (".", "the current folder")]
)
def test_the_folder_of_all_runs_and_the_current_folder_are_refused_as_a_run(
    inside: Any, recipe: str, tmp_path: Path, place: str, why: str
) -> None:
    refused = inside("train", recipe, "--run", place)
    assert (refused.code, why in refused.message) == (2, True)
    assert not (tmp_path / "lock.json").exists()


def test_two_runs_started_in_the_same_second(tmp_path: Path, monkeypatch: Any) -> None:
    """The second run checks for the folder before the first has created it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("redline.launch.start.time", Mock(strftime=lambda form: "20260101-000000"))
    first, second = running.unused_run_path("toy"), running.unused_run_path("toy")
    assert running._reserve(first, "toy").name == "toy-20260101-000000"
    assert running._reserve(second, "toy").name == "toy-20260101-000000-2"


@pytest.mark.parametrize("out", [".", "/", ""])
def test_a_report_is_a_file(inside: Any, home: Path, out: str) -> None:
    answer = inside("report", "latest", "--out", out, cwd=home)
    assert answer.code == 1
    assert "The report cannot be written: this is a folder. Name a file with --out." in answer.message


def test_a_report_in_a_read_only_place(inside: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    answer = inside("report", "latest", cwd=home)
    assert answer.code == 1
    assert "The report cannot be written (Read-only file system). Choose a place with --out" in answer.message


def test_a_profile_checks_the_folder_first(inside: Any, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.launch.profile.profile_recipe", lambda *_, **__: pytest.fail("worked in vain"))
    answer = inside("profile", recipe, "--out", "/proc/x")
    assert answer.code == 1
    assert "/proc/x: the output cannot be written (No such file or directory)" in answer.message
    assert "--out" in answer.message, "how to fix it"


def test_a_profile_in_a_folder_that_is_read_only(
    inside: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "mine").mkdir()
    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    answer = inside("profile", recipe, "--out", "mine")
    assert answer.code == 1
    assert "mine: the output cannot be written (Read-only file system)." in answer.message


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("no.")], ids=str)
def test_a_failed_profile_leaves_no_folder(
    inside: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("redline.launch.profile.profile_recipe", stopped)
    assert inside("profile", recipe).code != 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    assert inside("profile", recipe, "--out", "mine").code != 0
    assert (tmp_path / "mine").is_dir(), "what was there stays"


def test_a_run_that_cannot_start_leaves_no_folder(inside: Any, world: Any, tmp_path: Path, monkeypatch: Any) -> None:
    words = ["quickstart", *world.tiny, f"data.source={world.corpus}", "train.steps=1"]
    monkeypatch.setenv("REDLINE_DEADLINE", "soon")
    refused = inside("train", *words, "--run", str(tmp_path / "runs/never"))
    assert refused.code == 1
    assert "'soon' is not a time" in refused.message
    assert not (tmp_path / "runs/never").exists()
    own = tmp_path / "runs/own/tokenizer.json"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    assert inside("train", *words, "--run", str(own.parent)).code == 1
    assert own.read_text() == "mine", "what was there before is not ours to remove"
    monkeypatch.delenv("REDLINE_DEADLINE")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("redline.launch.session.write_lock", Mock(side_effect=full))
    refused = inside("train", *words, "--run", str(tmp_path / "runs/never"))
    assert refused.code == 1
    assert "No space left on device. Free some" in refused.message
    assert not (tmp_path / "runs/never").exists()
