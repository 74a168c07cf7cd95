"""Defects to plant in saving, resuming and skipping steps. Each has lost work in a real trainer."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from redline import cache
from redline.training import checkpoint, control, step
from redline.training.checkpoint import (
    BackgroundSaver,
    Committed,
    DamagedCheckpointError,
    Snapshot,
    commit,
    committed_steps,
    step_name,
)
from redline.training.step import BatchLoader, Step
from redline.training.trainer import Trainer

Plant = Callable[[pytest.MonkeyPatch], None]

# --- saving


def always(owner: Any, name: str, value: Any) -> Plant:
    """Replace a function by one that does nothing and returns a constant."""
    return lambda patch: patch.setattr(owner, name, lambda *args, **options: value)


def only_sync(wanted: Callable[[Path], bool]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = cache.sync
        for module in (checkpoint, cache):
            patch.setattr(module, "sync", lambda path: original(path) if wanted(path) else None)

    return plant


def run_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(control, "make_folder", lambda path: path.mkdir(parents=True, exist_ok=True))


def synced_late(patch: pytest.MonkeyPatch) -> None:
    def commit_then_sync(folder: Path, snapshot: Snapshot) -> Committed:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(checkpoint, "sync", lambda path: None)
            done = commit(folder, snapshot)
        for path in (*done.path.iterdir(), done.path, folder, folder.parent):
            cache.sync(path)
        return done

    patch.setattr(checkpoint, "commit", commit_then_sync)


def manifest_first(*modules: Any) -> Plant:
    """Write under the final name with the manifest first, so that a kill leaves a fake checkpoint."""

    def commit_in_place(folder: Path, snapshot: Snapshot) -> Committed:
        complete, final = commit(folder.parent / "elsewhere", snapshot), folder / step_name(snapshot.step)
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir(parents=True)
        for file in sorted(complete.path.iterdir(), key=lambda file: file.name != "manifest.json"):
            (final / file.name).write_bytes(file.read_bytes())
            cache.sync(final / file.name)
        return Committed(final, snapshot.step, complete.bytes)

    def plant(patch: pytest.MonkeyPatch) -> None:
        for module in modules:
            patch.setattr(module, "commit", commit_in_place)

    return plant


def reported_early(patch: pytest.MonkeyPatch) -> None:
    original = BackgroundSaver._commit

    def report_then_commit(self: BackgroundSaver, snapshot: Snapshot, protect: tuple[int, ...]) -> None:
        self._on_saved(Committed(self.folder / step_name(snapshot.step), snapshot.step, 0), 0.0)
        original(self, snapshot, protect)

    patch.setattr(BackgroundSaver, "_commit", report_then_commit)


def snapshot_alive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint.HostCopy, "take", lambda self, files: files)


def removed_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "remove_checkpoint", shutil.rmtree)


def removal_not_synced(patch: pytest.MonkeyPatch) -> None:
    def remove(path: Path) -> None:
        doomed = path.rename(path.with_name(f".writing-removed-{path.name}"))
        checkpoint._delete(doomed)

    patch.setattr(checkpoint, "remove_checkpoint", remove)


def keeps_one_less(patch: pytest.MonkeyPatch) -> None:
    original = checkpoint.apply_retention
    patch.setattr(
        checkpoint, "apply_retention", lambda folder, keep, also, fresh: original(folder, keep - 1, also, fresh)
    )


def best_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = checkpoint.apply_retention
    patch.setattr(checkpoint, "apply_retention", lambda folder, keep, also, fresh: original(folder, keep, (), fresh))


# --- verifying


def manifest_unchecked(patch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> Any:
        try:
            return json.loads((path / "manifest.json").read_bytes())
        except (OSError, ValueError) as error:
            raise DamagedCheckpointError(str(error)) from None

    patch.setattr(checkpoint, "read_manifest", read)


def additional_accepted(patch: pytest.MonkeyPatch) -> None:
    def check(path: Path, files: dict[str, Any]) -> None:
        if any(checkpoint.file_digest(path / name) != entry["sha256"] for name, entry in files.items()):
            raise DamagedCheckpointError(path.name)

    patch.setattr(checkpoint, "_check_files", check)


def newest_unread(*modules: Any) -> Plant:
    def newest(folder: Path, say: Callable[[str], None] = lambda _: None) -> Path:
        return folder / step_name(committed_steps(folder)[-1])

    def plant(patch: pytest.MonkeyPatch) -> None:
        for module in modules:
            patch.setattr(module, "newest_valid", newest)

    return plant


# --- failing


def failure_swallowed(patch: pytest.MonkeyPatch) -> None:
    def commit_or_not(folder: Path, snapshot: Snapshot) -> Committed:
        try:
            return commit(folder, snapshot)
        except OSError:
            return Committed(folder / step_name(snapshot.step), snapshot.step, 0)

    patch.setattr(checkpoint, "commit", commit_or_not)


# --- resuming


def after_restore(change: Callable[[Trainer], None]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Trainer._restore
        patch.setattr(Trainer, "_restore", lambda self, path: (original(self, path), change(self))[0])

    return plant


def forget_moments(trainer: Trainer) -> None:
    for tensor in trainer.optimizer.tensors().values():
        tensor.zero_()


def forget_average(trainer: Trainer) -> None:
    assert trainer.ema
    for name, parameter in trainer.parameters.items():
        trainer.ema.average[name].copy_(parameter.detach())


def restart_schedule(trainer: Trainer) -> None:
    original, resumed_at = trainer._lr_factor, trainer.state.step
    trainer._lr_factor = lambda step: original(step - resumed_at)  # type: ignore[method-assign]


def restart_data(patch: pytest.MonkeyPatch) -> None:
    original = BatchLoader.__init__

    def start_at_the_first_batch(
        self: BatchLoader, objective: Any, plan: Any, device: Any, workers: int, first: int, **ranks: Any
    ) -> None:
        make = self._make
        self._make = lambda step: make(step - first)  # type: ignore[method-assign]
        original(self, objective, plan, device, workers, first, **ranks)

    patch.setattr(BatchLoader, "__init__", start_at_the_first_batch)


def seed_without_step(patch: pytest.MonkeyPatch) -> None:
    original = step.micro_batch_seed
    patch.setattr(step, "micro_batch_seed", lambda seed, number, micro, part=0: original(seed, 0, micro, part))


def seed_by_micro_batches_run(patch: pytest.MonkeyPatch) -> None:
    """Seed noise by the number of micro-batches since the process started instead of by the step."""
    original, micro_batches_run = Step.__init__, itertools.count()

    def begin(self: Step, *args: Any, **options: Any) -> None:
        nonlocal micro_batches_run
        micro_batches_run = itertools.count()
        original(self, *args, **options)

    patch.setattr(Step, "__init__", begin)
    patch.setattr(step, "micro_batch_seed", lambda *_: next(micro_batches_run))


# --- skipping


def ungated(owner: Any, name: str, place: int) -> Plant:
    """Set the flag that says to skip a bad step to zero."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            flag = args[place]
            no_skip = (flag[0], torch.zeros_like(flag[1])) if isinstance(flag, tuple) else torch.zeros_like(flag)
            return original(*args[:place], no_skip, *args[place + 1 :], **options)

        patch.setattr(owner, name, call)

    return plant


def never_bad(patch: pytest.MonkeyPatch) -> None:
    original = Step._measure
    patch.setattr(Step, "_measure", lambda self, loss: (original(self, loss)[0], torch.zeros(())))
