"""R2: a save that is killed before any of its file operations leaves the old checkpoint or the new one."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.training.checkpoint import (
    DamagedCheckpointError,
    apply_retention,
    commit,
    committed_steps,
    newest_valid,
    remove_temporaries,
    step_name,
    verify,
)

KEEP = 2


def third_of_three(folder: Path, tiny: Any) -> None:
    for step in (1, 2):
        commit(folder, tiny(step))


def damaged_third(folder: Path, tiny: Any) -> None:
    """The step is saved over a damaged checkpoint of the same step."""
    for step in (1, 2, 3):
        commit(folder, tiny(step))
    (folder / step_name(3) / "model.safetensors").write_bytes(b"nothing")


def very_first(folder: Path, tiny: Any) -> None:
    pass


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("before", [third_of_three, damaged_third, very_first])
def test_a_kill_before_any_operation_of_a_save_loses_nothing(
    fork: Any, calls: Any, tiny: Any, tmp_path: Path, say: Any, before: Callable[..., None]
) -> None:
    base, folder = tmp_path / "base", tmp_path / "checkpoints"
    before(base, tiny)
    old = newest_valid(base)
    least = min(KEEP, len(committed_steps(base)) - len(damaged_steps(base)))

    def save(at: int) -> None:
        with calls(at, die):
            commit(folder, tiny(3))
            apply_retention(folder, KEEP, fresh=3)

    for at in range(1, 500):
        shutil.rmtree(folder, ignore_errors=True)
        if base.exists():
            shutil.copytree(base, folder)
        code = fork(lambda _, at=at: save(at)).wait()
        assert code in (0, -signal.SIGKILL)
        newest = newest_valid(folder)
        assert newest in (folder / old.name if old else None, folder / step_name(3))
        assert damaged_steps(folder) <= damaged_steps(base)
        assert len(committed_steps(folder)) - len(damaged_steps(folder)) >= least
        remove_temporaries(folder)
        assert not folder.exists() or all(entry.name.startswith("step-") for entry in folder.iterdir())
        commit(folder, tiny(3))
        assert newest_valid(folder) == folder / step_name(3), "the next save works"
        if code == 0:
            break
    say(f"R2: {at - 1} operations of a save ({before.__name__}), killed before each")
    assert code == 0
    assert at > 15, "the operations were counted"


def damaged_steps(folder: Path) -> set[int]:
    """Return directories with the name of a checkpoint that are not valid."""
    found = set()
    for step in committed_steps(folder):
        try:
            verify(folder / step_name(step))
        except DamagedCheckpointError:
            found.add(step)
    return found
