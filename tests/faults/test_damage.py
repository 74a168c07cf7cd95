"""R4: any change of a checkpoint is noticed, and the run falls back. R14: no additional file is read."""

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
    """Two checkpoints, of which tests damage the second."""
    return commit(tmp_path / "c", tiny(1)).path, commit(tmp_path / "c", tiny(2)).path


def test_every_byte(pair: tuple[Path, Path], say: Any) -> None:
    _, path = pair
    chance, trials = random.Random(4), 0
    for name in FILES:
        whole = (path / name).read_bytes()
        for place in range(len(whole)):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << chance.randrange(8)
            (path / name).write_bytes(flipped)
            with pytest.raises(DamagedCheckpointError):
                verify(path)
            trials += 1
        (path / name).write_bytes(whole)
    verify(path)
    say(f"R4: {trials} flipped bits, one in every byte of a checkpoint: all noticed")
    assert trials > 5000


@pytest.mark.parametrize("name", FILES)
def test_wrong_lengths(pair: tuple[Path, Path], name: str) -> None:
    _, path = pair
    whole = (path / name).read_bytes()
    lengths = {0, 1, 7, 8, len(whole) // 3, len(whole) // 2, len(whole) - 8, len(whole) - 1}
    for changed in [*(whole[:n] for n in sorted(lengths)), whole + b"\n", whole + b" ", whole + bytes(4096)]:
        (path / name).write_bytes(changed)
        with pytest.raises(DamagedCheckpointError):
            verify(path)


def test_zeroed_pages(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    tensors = {"model": {"w": torch.randn(128, 128, generator=chance)}}
    path = commit(tmp_path, Snapshot(7, tensors, {"step": 7, "best": None})).path
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for start in range(0, len(whole), 4096):
        page = whole[start : start + 4096]
        file.write_bytes(whole[:start] + bytes(len(page)) + whole[start + len(page) :])
        with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors"):
            verify(path)


# every choice of files; all of them would be a checkpoint again, were it not for the directory's name
SWAPS = [names for count in (1, 2, 3, 4) for names in itertools.combinations(FILES, count)]


@pytest.mark.parametrize("names", SWAPS, ids="+".join)
def test_swapped_files(pair: tuple[Path, Path], tmp_path: Path, names: tuple[str, ...]) -> None:
    one, two = pair
    for name in names:
        (one / name).rename(tmp_path / "aside")
        (two / name).rename(one / name)
        (tmp_path / "aside").rename(two / name)
    for path in pair:
        with pytest.raises(DamagedCheckpointError):
            verify(path)
    assert newest_valid(one.parent) is None


@pytest.mark.parametrize("name", FILES)
def test_missing_files_fall_back(pair: tuple[Path, Path], name: str) -> None:
    one, two = pair
    (two / name).unlink()
    said: list[str] = []
    assert newest_valid(one.parent, said.append) == one
    assert len(said) == 1
    assert two.name in said[0]


def test_names_must_match_steps(pair: tuple[Path, Path]) -> None:
    """A checkpoint under the name of another step, and names that are no checkpoint's."""
    one, two = pair
    folder = one.parent
    renamed = two.rename(folder / step_name(9))
    with pytest.raises(DamagedCheckpointError):
        verify(renamed)
    for odd in ("step-000000009", "step-0000001", "step-00000001x", "step-٠٠٠٠٠٠٠٥", "step-00000001\n"):
        shutil.copytree(one, folder / odd)
    assert committed_steps(folder) == [1, 9]
    assert newest_valid(folder) == one


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
    one, two = pair
    folder = one.parent
    elsewhere = commit(tmp_path / "elsewhere", tiny(5)).path
    (folder / step_name(5)).symlink_to(elsewhere)
    with pytest.raises(DamagedCheckpointError, match="link"):
        verify(folder / step_name(5))
    assert newest_valid(folder) == two

    file = two / "model.safetensors"
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    with pytest.raises(DamagedCheckpointError):
        verify(two)
    assert newest_valid(folder) == one


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
    one, two = pair
    plain = open

    def failing(path: Any, *args: Any, **options: Any) -> Any:
        if os.fspath(path) == str(two / name):
            raise OSError(5, "Input/output error")
        return plain(path, *args, **options)

    monkeypatch.setattr("builtins.open", failing)
    monkeypatch.setattr("io.open", failing)
    assert newest_valid(one.parent) == one
