"""Folders that a killed `prepare` or `export` leaves are removed by the next one, and no others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.cache import atomic_dir, cache_dir
from redline.data.prepare import prepare_cached, prepare_source
from redline.data.sources import Reading
from redline.data.tokenizer import load_tokenizer
from redline.errors import UserError
from redline.export.folder import export_run

Make = Callable[[Path, Callable[[], None]], Any]


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.fixture(params=["prepare", "export"])
def make(request: pytest.FixtureRequest, corpus: Path, world: Any, tmp_path: Path, monkeypatch: Any) -> Make:
    """Make a folder there, and call `within` when it is half written."""
    if request.param == "prepare":

        def prepare(out: Path, within: Callable[[], None]) -> Any:
            tokenizer = load_tokenizer("bytes")
            return prepare_source(
                str(corpus), tokenizer, out, Reading(), workers=1, progress=lambda now: now.tokens and within()
            )

        return prepare
    from redline.export import folder
    from redline.recipe.lock import make_lock, write_lock

    trainer = world.run(tmp_path / "run", "train.steps=1")
    write_lock(tmp_path / "run", make_lock("toy", "id", trainer.resolved, trainer.objective.data.facts))
    write_tensors = folder.write_tensors

    def export(out: Path, within: Callable[[], None]) -> Any:
        def half(*arguments: Any) -> None:
            write_tensors(*arguments)
            within()

        monkeypatch.setattr(folder, "write_tensors", half)
        return export_run(tmp_path / "run", None, out)

    return export


def started(fork: Any, make: Make, out: Path) -> Any:
    """A process that has written half a folder and waits there."""

    def act(child: Any) -> None:
        def within() -> None:
            child.say_ready()
            time.sleep(600)

        make(out, within)

    child = fork(act)
    child.await_ready()
    return child


def test_the_next_process_removes_folders_of_a_killed_one(fork: Any, make: Make, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    child = started(fork, make, place / "out")
    assert len(hidden(place)) == 1
    child.send(signal.SIGKILL)
    child.wait()
    assert len(hidden(place)) == 1, "no process was left to remove it"
    make(place / "out", lambda: None)
    assert hidden(place) == []
    assert (place / "out").is_dir()


def test_the_folder_of_a_live_process_stays(fork: Any, make: Make, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    child = started(fork, make, place / "out")
    live = hidden(place)
    make(place / "out", lambda: None)
    assert hidden(place) == live
    child.send(signal.SIGKILL)
    child.wait()


def test_folders_of_other_paths_and_names_stay(tmp_path: Path) -> None:
    others = (".other.123-0123abcd.tmp", ".out.hidden", ".out.12-xyz.tmp", ".git", ".out.1-0123abcd.tmp.kept")
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.12-0123abcd.tmp").write_text("a file, not a folder")
    (tmp_path / ".out.13-0123abcd.tmp").symlink_to(tmp_path / ".git")
    with atomic_dir(tmp_path / "out") as temporary:
        (temporary / "file").write_text("content")
    assert hidden(tmp_path) == sorted([*others, ".out.12-0123abcd.tmp", ".out.13-0123abcd.tmp"])
    assert (tmp_path / "out/file").read_text() == "content"


def test_old_folders_of_older_releases_are_removed_when_their_process_is_dead(tmp_path: Path, fork: Any) -> None:
    dead = fork(lambda _: 0)
    dead.wait()
    fresh, old, living = (
        tmp_path / f".out.{pid}-0123abc{n}" for n, pid in enumerate((dead.pid, dead.pid, os.getppid()))
    )
    for path in (fresh, old, living):
        path.mkdir()
    for path in (old, living):
        os.utime(path, (1, 1))
    with atomic_dir(tmp_path / "out"):
        pass
    assert hidden(tmp_path) == sorted([fresh.name, living.name])


def test_in_the_cache_folders_of_neighbours_are_removed_too(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "cache"))
    (cache_dir() / "data/.abc.123-0123abcd.tmp").mkdir(parents=True)
    prepare_cached(str(corpus), "bytes")
    assert hidden(cache_dir() / "data") == []


def test_a_failure_leaves_nothing_and_content_is_never_replaced(tmp_path: Path) -> None:

    def fail(folder: Path) -> None:
        (folder / "file").write_text("half")
        raise UserError("no")

    with pytest.raises(UserError), atomic_dir(tmp_path / "out") as temporary:
        fail(temporary)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with atomic_dir(tmp_path / "out") as temporary:
        (temporary / "file").write_text("first")
    with pytest.raises(OSError), atomic_dir(tmp_path / "out") as temporary:
        (temporary / "file").write_text("second")
    assert (tmp_path / "out/file").read_text() == "first"
    assert hidden(tmp_path) == []
