"""R1, R2 and R4 on the usual way to save: overwrite the old file, without digests. redline's own saving gets the same
trials, so that the figures are comparable. (`save_file` of safetensors renames its file into place since 0.8, so these
tests write the bytes themselves.)"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialised

from redline.training.checkpoint import Snapshot, apply_retention, commit, newest_valid, read_tensors

pytestmark = pytest.mark.soak  # most of what is tested here is not redline

Save = Callable[[Path, int, int], None]
Read = Callable[[Path], tuple[int, dict[str, torch.Tensor]]]
UNREADABLE = (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def tensors(step: int, width: int) -> dict[str, torch.Tensor]:
    """Tensors that depend on the step, so that a mixture of two steps can be recognised."""
    return {name: torch.full((width, 20), step + part / 8) for part, name in enumerate(("first", "second"))}


def save_one(folder: Path, step: int, width: int) -> None:
    """Save everything in one file."""
    content = {f"{part}.{name}": tensor for part in "mo" for name, tensor in tensors(step, width).items()}
    (folder / "all.safetensors").write_bytes(serialised({**content, "step": torch.tensor(step)}))


def read_one(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    content = load_file(folder / "all.safetensors")
    return int(content.pop("step")), content


def save_three(folder: Path, step: int, width: int) -> None:
    """Save weights, moments and the step in separate files."""
    for part in "mo":
        content = {f"{part}.{name}": tensor for name, tensor in tensors(step, width).items()}
        (folder / f"{part}.safetensors").write_bytes(serialised(content))
    (folder / "state.json").write_bytes(json.dumps({"step": step}).encode())


def read_three(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    step = json.loads((folder / "state.json").read_bytes())["step"]
    return int(step), {**load_file(folder / "m.safetensors"), **load_file(folder / "o.safetensors")}


def save_ours(folder: Path, step: int, width: int) -> None:
    parts = {stem: {f"{stem[0]}.{n}": t for n, t in tensors(step, width).items()} for stem in ("model", "optimizer")}
    commit(folder, Snapshot(step, parts, {"step": step, "best": None}))
    apply_retention(folder, 2, fresh=step)


def read_ours(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    path = newest_valid(folder)
    if path is None:
        raise OSError("no checkpoint")
    content = {name: t for stem in ("model", "optimizer") for name, t in read_tensors(path, stem).items()}
    return int(path.name[5:]), content


WAYS: dict[str, tuple[Save, Read]] = {
    "one file in place": (save_one, read_one),
    "three files in place": (save_three, read_three),
    "redline": (save_ours, read_ours),
}


def judge(read: Read, folder: Path, width: int) -> str:
    """Return `whole`, `lost` if nothing can be read, or `wrong` if what is read was never saved."""
    try:
        step, content = read(folder)
    except UNREADABLE:
        return "lost"
    expected = {f"{part}.{name}": tensor for part in "mo" for name, tensor in tensors(step, width).items()}
    same = content.keys() == expected.keys() and all(torch.equal(content[name], t) for name, t in expected.items())
    return "whole" if same else "wrong"


@pytest.mark.parametrize("kills", [40, pytest.param(400, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("way", WAYS)
def test_killed_while_saving(fork: Any, tmp_path: Path, say: Any, way: str, kills: int) -> None:
    """Kill a process that only saves, 2 MB each time, at a random instant after its first save."""
    save, read = WAYS[way]
    rng, seen, width = random.Random(1), Counter[str](), 6400
    for trial in range(kills):
        folder = tmp_path / str(trial)
        folder.mkdir()

        def action(child: Any, folder: Path = folder) -> int:
            save(folder, 1, width)
            child.say_ready()
            for step in range(2, 100_000):
                save(folder, step, width)
            return 1

        child = fork(action)
        child.await_ready()
        time.sleep(rng.uniform(0, 0.05))
        child.send(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        seen[judge(read, folder, width)] += 1
        shutil.rmtree(folder)
    say(f"R1, {way}: {kills} kills, {seen['lost']} left nothing to read, {seen['wrong']} a mixture of two saves")
    bad = seen["lost"] + seen["wrong"]
    assert bad == 0 if way == "redline" else bad > 0


@pytest.mark.parametrize("way", WAYS)
def test_killed_before_each_operation(fork: Any, calls: Any, tmp_path: Path, say: Any, way: str) -> None:
    """Kill the second save before each of its disk operations, and within each write."""
    save, read = WAYS[way]
    seen, folder = Counter[str](), tmp_path / "c"

    def save_and_die(at: int) -> None:
        with calls(at, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            save(folder, 2, 16)

    for at in range(1, 500):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        save(folder, 1, 16)
        if fork(lambda _, at=at: save_and_die(at)).wait() == 0:
            break
        seen[judge(read, folder, 16)] += 1
    trials = sum(seen.values())
    say(f"R2, {way}: {trials} operations, {seen['lost']} left nothing to read, {seen['wrong']} a mixture of two saves")
    bad = seen["lost"] + seen["wrong"]
    assert trials >= 2
    assert bad == 0 if way == "redline" else bad > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_is_detected(tmp_path: Path, say: Any, way: str) -> None:
    """Flip one bit in each byte of the save."""
    save, read = WAYS[way]
    save(tmp_path, 1, 16)
    rng, seen = random.Random(4), Counter[str]()
    for file in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        original = file.read_bytes()
        for index in range(len(original)):
            flipped = bytearray(original)
            flipped[index] ^= 1 << rng.randrange(8)
            file.write_bytes(flipped)
            seen[judge(read, tmp_path, 16)] += 1
        file.write_bytes(original)
    trials = sum(seen.values())
    say(f"R4, {way}: {trials} flipped bits, {seen['wrong']} read without an error, {seen['lost']} detected")
    assert trials > 5000
    if way == "redline":
        assert (seen["wrong"], seen["whole"]) == (0, 0), "detected; there is no other checkpoint to fall back to"
    else:
        assert seen["wrong"] > trials / 2
