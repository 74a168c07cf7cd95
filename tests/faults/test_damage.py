"""R4: any change of a checkpoint is detected, and the run falls back to an older one. R14: no other file is read."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.training.checkpoint import (
    DamagedCheckpointError,
    Snapshot,
    apply_retention,
    commit,
    committed_steps,
    newest_valid,
    remove_temporaries,
    step_name,
    verify,
)

FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")


@pytest.fixture
def pair(tmp_path: Path, tiny: Callable[[int], Snapshot]) -> tuple[Path, Path]:
    """Return two checkpoints. Tests damage the second."""
    return commit(tmp_path / "c", tiny(1)).path, commit(tmp_path / "c", tiny(2)).path


def test_every_byte(pair: tuple[Path, Path], say: Any) -> None:
    _, path = pair
    rng, trials = random.Random(4), 0
    for name in FILES:
        original = (path / name).read_bytes()
        for index in range(len(original)):
            flipped = bytearray(original)
            flipped[index] ^= 1 << rng.randrange(8)
            (path / name).write_bytes(flipped)
            with pytest.raises(DamagedCheckpointError):
                verify(path)
            trials += 1
        (path / name).write_bytes(original)
    verify(path)
    say(f"R4: {trials} flipped bits, one in every byte of a checkpoint: all detected")
    assert trials > 5000


@pytest.mark.parametrize("name", FILES)
def test_wrong_lengths(pair: tuple[Path, Path], name: str) -> None:
    _, path = pair
    original = (path / name).read_bytes()
    lengths = {0, 1, 7, 8, len(original) // 3, len(original) // 2, len(original) - 8, len(original) - 1}
    for changed in [
        *(original[:n] for n in sorted(lengths)),
        original + b"\n",
        original + b" ",
        original + bytes(4096),
    ]:
        (path / name).write_bytes(changed)
        with pytest.raises(DamagedCheckpointError):
            verify(path)


def test_zeroed_pages(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {"model": {"w": torch.randn(128, 128, generator=generator)}}
    path = commit(tmp_path, Snapshot(7, tensors, {"step": 7, "best": None})).path
    file = path / "model.safetensors"
    original = file.read_bytes()
    for start in range(0, len(original), 4096):
        page = original[start : start + 4096]
        file.write_bytes(original[:start] + bytes(len(page)) + original[start + len(page) :])
        with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors"):
            verify(path)


# Every subset of the files. Swapping all of them gives intact checkpoints, but under the wrong directory names.
SWAPS = [names for count in (1, 2, 3, 4) for names in itertools.combinations(FILES, count)]


@pytest.mark.parametrize("names", SWAPS, ids="+".join)
def test_swapped_files(pair: tuple[Path, Path], tmp_path: Path, names: tuple[str, ...]) -> None:
    first, second = pair
    for name in names:
        (first / name).rename(tmp_path / "aside")
        (second / name).rename(first / name)
        (tmp_path / "aside").rename(second / name)
    for path in pair:
        with pytest.raises(DamagedCheckpointError):
            verify(path)
    assert newest_valid(first.parent) is None


@pytest.mark.parametrize("name", FILES)
def test_missing_files_fall_back(pair: tuple[Path, Path], name: str) -> None:
    first, second = pair
    (second / name).unlink()
    messages: list[str] = []
    assert newest_valid(first.parent, messages.append) == first
    assert len(messages) == 1
    assert second.name in messages[0]


def test_names_must_match_steps(pair: tuple[Path, Path]) -> None:
    """Refuse a checkpoint under the name of another step; ignore names that are not a checkpoint's."""
    first, second = pair
    folder = first.parent
    renamed = second.rename(folder / step_name(9))
    with pytest.raises(DamagedCheckpointError):
        verify(renamed)
    for odd in ("step-000000009", "step-0000001", "step-00000001x", "step-٠٠٠٠٠٠٠٥", "step-00000001\n"):
        shutil.copytree(first, folder / odd)
    assert committed_steps(folder) == [1, 9]
    assert newest_valid(folder) == first


class Mischief:
    """A pickle that would run code when it is loaded."""

    ran = False

    def __reduce__(self) -> Any:
        return (setattr, (Mischief, "ran", True))


@pytest.mark.parametrize(
    "name", ["model.pkl", "pytorch_model.bin", "training_args.bin", ".metadata", "extra.safetensors"]
)
def test_additional_files_are_refused_unread(pair: tuple[Path, Path], name: str) -> None:
    _, path = pair
    (path / name).write_bytes(pickle.dumps(Mischief()))
    with pytest.raises(DamagedCheckpointError, match="additional files"):
        verify(path)
    assert not Mischief.ran


def test_links_are_not_followed_out_of_the_run(pair: tuple[Path, Path], tmp_path: Path, tiny: Any) -> None:
    first, second = pair
    folder = first.parent
    elsewhere = commit(tmp_path / "elsewhere", tiny(5)).path
    (folder / step_name(5)).symlink_to(elsewhere)
    with pytest.raises(DamagedCheckpointError, match="link"):
        verify(folder / step_name(5))
    assert newest_valid(folder) == second

    file = second / "model.safetensors"
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    with pytest.raises(DamagedCheckpointError):
        verify(second)
    assert newest_valid(folder) == first


def test_links_are_replaced_and_their_targets_kept(pair: tuple[Path, Path], tmp_path: Path, tiny: Any) -> None:
    folder = pair[0].parent
    elsewhere = commit(tmp_path / "elsewhere", tiny(3)).path
    (folder / step_name(3)).symlink_to(elsewhere)
    (folder / step_name(4)).symlink_to(tmp_path / "nowhere")
    for step in (3, 4):
        assert not commit(folder, tiny(step)).path.is_symlink()
    (folder / ".writing-link").symlink_to(elsewhere)
    (folder / ".writing-file").write_bytes(b"")
    remove_temporaries(folder)
    apply_retention(folder, 1, fresh=4)
    verify(elsewhere)
    assert [entry.name for entry in folder.iterdir()] == [step_name(4)]


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_an_unreadable_disk_falls_back(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    first, second = pair
    plain = open

    def failing(path: Any, *args: Any, **options: Any) -> Any:
        if os.fspath(path) == str(second / name):
            raise OSError(5, "Input/output error")
        return plain(path, *args, **options)

    monkeypatch.setattr("builtins.open", failing)
    monkeypatch.setattr("io.open", failing)
    assert newest_valid(first.parent) == first
