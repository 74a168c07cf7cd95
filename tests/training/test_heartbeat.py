"""Heartbeats survive a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from redline.training import control
from redline.training.control import FOLDER_VARIABLE, Heartbeat, read_heartbeats


@pytest.fixture
def heart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Heartbeat]]:
    monkeypatch.setattr(control, "EVERY_S", 0.01)
    begun: list[Heartbeat] = []

    def start(folder: Path) -> Heartbeat:
        monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
        begun.append(Heartbeat())
        begun[-1].start(0)
        return begun[-1]

    yield start
    for one in begun:
        one.end(0, "")


def _beats_after(folder: Path, moment: float) -> bool:
    """Wait for a heartbeat from after `moment`; return whether it arrives."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if read_heartbeats(folder).get(0, {}).get("time", 0) > moment:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_a_failed_heartbeat_is_tried_again(
    heart: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    heart(tmp_path)
    assert _beats_after(tmp_path, 0)
    failed: list[float] = []

    def refuse(*_: Any) -> int:
        failed.append(time.monotonic())
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        patch.setattr(control.os, "pwrite", refuse)
        deadline = time.monotonic() + 20
        while len(failed) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(failed) >= 3
    assert _beats_after(tmp_path, time.monotonic())


def test_a_full_disk_does_not_stop_heartbeats(heart: Any, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        heart(folder)
        assert _beats_after(folder, 0)
        with pytest.raises(OSError, match="No space left"):
            (folder / "rest").write_bytes(bytes(1 << 17))
        assert _beats_after(folder, time.monotonic())
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_removed_folder_ends_the_heartbeat(heart: Any, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    one = heart(folder)  # never existed
    deadline = time.monotonic() + 20
    while one._path is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert one._path is None
    assert not folder.exists()
