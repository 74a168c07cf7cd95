"""R3: after a power cut at any time, reported checkpoints are valid and no damaged one passes as valid."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from power import ROOT, Bytes, Disk, Names, Object, Operation, Recorder, Recording, Reported, Synced, after_cut

from redline.cache import sync as synced
from redline.errors import UserError
from redline.recipe.lock import read_lock, write_lock
from redline.recipe.schema import Checkpoint
from redline.runs.events import EventLog, read_events
from redline.runs.monitor import Monitor
from redline.training.checkpoint import (
    CheckpointManager,
    DamagedCheckpointError,
    Snapshot,
    Tensors,
    best_step,
    commit,
    committed_steps,
    newest_valid,
    remove_temporaries,
    step_name,
    verify,
)
from redline.training.control import RunDirectory
from redline.training.schedule import StepTimer
from redline.vocabulary import RECIPE_LOCK_FILE

KEEP = 2
RUN = "runs/tiny"
LOCKED = {"schema": 1, "run_id": "1", "recipe_name": "tiny", "recipe": {}}


# --- what is recorded


def tiny_files(step: int) -> dict[str, Tensors]:
    return {stem: {"w": torch.arange(8.0) + 100 * step + len(stem)} for stem in ("model", "optimizer")}


def best_at(step: int) -> int:
    """Return a best step: sometimes the current one, sometimes an earlier one."""
    return {1: 1, 2: 1, 3: 1}.get(step, 4)


def tiny_state(step: int) -> dict[str, Any]:
    return {"step": step, "best": {"step": best_at(step), "loss": 1.0}}


class ReportingView:
    """Replaces the console: reports every checkpoint that the run shows as saved, which must then be committed."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def event(self, event: dict[str, Any]) -> None:
        if event["type"] == "checkpoint":
            self.recorder.report(event["step"], best_at(event["step"]))

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        pass

    def close(self) -> None:
        pass


def run_process(root: Path, recorder: Recorder, saves: int) -> None:
    """Start or resume a run as a process would, and save `saves` steps."""
    with (
        RunDirectory(root / RUN) as run,
        Monitor(EventLog(run.path / "events.jsonl"), ReportingView(recorder)) as monitor,
    ):
        remove_temporaries(run.checkpoints)
        if not (run.path / RECIPE_LOCK_FILE).exists():
            write_lock(run.path, LOCKED)
        newest = newest_valid(run.checkpoints)
        first = int(newest.name[5:]) + 1 if newest else 1
        manager = CheckpointManager(run, monitor, StepTimer(lambda: 0.0), Checkpoint(keep=KEEP))
        for step in range(first, first + saves):
            manager.save(step, tiny_files(step), tiny_state(step), best_at(step))
            manager.finish(step)


@dataclass(frozen=True)
class Case:
    name: str
    recording: Recording
    before: tuple[int, ...] = ()  # steps committed before the recording
    damaged: tuple[int, ...] = ()


def record(root: Path, act: Callable[[Recorder], None]) -> Recording:
    root.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(root, patch)
        act(recorder)
    return recorder.recording


def uninterrupted_case(root: Path) -> Case:
    return Case("begun", record(root, lambda recorder: run_process(root, recorder, 5)))


def killed_case(root: Path, calls: int) -> Case:
    """Kill one process and let another one resume."""

    def act(recorder: Recorder) -> None:
        with suppress(UserError), recorder.killed_after(calls):
            run_process(root, recorder, 3)
        run_process(root, recorder, 2)

    return Case(f"killed after {calls} calls", record(root, act))


def damaged_case(root: Path) -> Case:
    """Resume a run whose newest checkpoint is damaged, and save that step again."""
    (root / RUN).mkdir(parents=True)
    for step in (1, 2, 3):
        path = commit(root / RUN / "checkpoints", Snapshot(step, tiny_files(step), tiny_state(step))).path
    (path / "model.safetensors").write_bytes(b"nothing")
    write_lock(root / RUN, LOCKED)
    recording = record(root, lambda recorder: run_process(root, recorder, 3))
    return Case("damaged", recording, before=(1, 2), damaged=(3,))


def all_cases(folder: Path) -> list[Case]:
    """Record an uninterrupted run, a damaged one, and runs killed before and during a save."""
    killed = [killed_case(folder / str(calls), calls) for calls in range(0, 48, 2)]
    return [uninterrupted_case(folder / "whole"), damaged_case(folder / "damaged"), *killed]


# --- the guarantees


class Guarantees:
    """Checks the guarantees that must hold after any power cut."""

    def __init__(self, folder: Path) -> None:
        self.disk = Disk(folder / "disk")
        self._saved: dict[int, dict[str, bytes]] = {}
        self._reference = folder / "reference"
        self._known: dict[Any, list[str]] = {}
        self.resumed = 0

    @property
    def different(self) -> int:
        """Return the number of different states."""
        return len(self._known)

    def violations(self, case: Case, cut: int, rng: random.Random, resume: bool = False) -> list[str]:
        """Draw a state of the disk after a power cut, and return the guarantees that it violates."""
        tree = after_cut(case.recording, cut, rng)
        reported = case.recording.reported(cut)
        key = (case.name, len(reported), frozenset(tree.items()))
        if key not in self._known:
            self.disk.show(tree)
            self._known[key] = self._check(case, reported)
            if resume and not self._known[key]:
                self._known[key] = self._resume()
        return self._known[key]

    def _check(self, case: Case, reported: list[Reported]) -> list[str]:
        run = self.disk.root / RUN
        folder = run / "checkpoints"
        committed = {*case.before, *(report.step for report in reported)}
        named = committed_steps(folder)
        valid = [step for step in named if is_valid(folder / step_name(step))]
        newest, violations = newest_valid(folder), []
        if committed and (newest is None or int(newest.name[5:]) < max(committed)):
            violations.append("lost")
        if len(valid) < min(KEEP, len(committed)):
            violations.append("too few")
        if set(named) - set(valid) - set(case.damaged):
            violations.append("half")
        if any(files_of(folder / step_name(step)) != self._expected(step) for step in valid):
            violations.append("wrong")
        if {best_step(folder), *(report.best for report in reported[-1:])} - {*valid} and committed:
            violations.append("best lost")
        if committed and not has_lock(run):
            violations.append("not a run")
        read_events(run / "events.jsonl")
        return violations

    def _resume(self) -> list[str]:
        """Check that the next process cleans up and can save."""
        self.resumed += 1
        with pytest.MonkeyPatch.context() as patch, RunDirectory(self.disk.root / RUN) as run:
            patch.setattr(os, "fsync", lambda descriptor: None)  # saves time: the real disk does not lose power
            remove_temporaries(run.checkpoints)
            newest = newest_valid(run.checkpoints)
            step = int(newest.name[5:]) + 1 if newest else 1
            path = commit(run.checkpoints, Snapshot(step, tiny_files(step), tiny_state(step))).path
            fine = newest_valid(run.checkpoints) == path
            leftovers = [entry for entry in run.checkpoints.iterdir() if not entry.name.startswith("step-")]
        self.disk.reset()
        return [] if fine and not leftovers else ["cannot resume"]

    def _expected(self, step: int) -> dict[str, bytes]:
        if step not in self._saved:
            snapshot = Snapshot(step, tiny_files(step), tiny_state(step))
            self._saved[step] = files_of(commit(self._reference, snapshot).path)
        return self._saved[step]


def is_valid(path: Path) -> bool:
    try:
        return bool(verify(path))
    except DamagedCheckpointError:
        return False


def has_lock(run: Path) -> bool:
    try:
        return read_lock(run) == LOCKED
    except UserError:
        return False


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def cut_at_random(cases: list[Case], states: int, guarantees: Guarantees, enough: int | None = None) -> Counter[str]:
    """Count the violations at random power cuts; stop after `enough`."""
    rng, broken = random.Random(3), Counter[str]()
    for number in range(states):
        case = rng.choice(cases)
        cut = rng.randrange(len(case.recording.operations) + 1)
        broken.update(guarantees.violations(case, cut, rng, resume=number % 20 == 0))
        if enough is not None and broken.total() >= enough:
            break
    return broken


@pytest.mark.parametrize("states", [2000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_power_cuts_lose_nothing(tmp_path: Path, say: Callable[[str], None], states: int) -> None:
    cases, guarantees = all_cases(tmp_path), Guarantees(tmp_path)
    broken = cut_at_random(cases, states, guarantees)
    operations = sum(len(case.recording.operations) for case in cases)
    say(
        f"R3: {states} power cuts within {operations} operations of {len(cases)} runs, {guarantees.different} different"
        f" states ({guarantees.resumed} of them resumed): {broken['lost']} commits lost, {broken['wrong']} undetected,"
        f" {broken.total()} guarantees violated"
    )
    assert not broken
    assert guarantees.different > states // 5
    assert guarantees.resumed > states // 100


# --- planted defects: an operation is omitted or moved


def unsynced(wanted: Callable[[Recording, Object], bool]) -> Callable[[Recording], list[Operation]]:
    def mutate(recording: Recording) -> list[Operation]:
        return [op for op in recording.operations if not (isinstance(op, Synced) and wanted(recording, op.inode))]

    return mutate


def commits(recording: Recording) -> list[tuple[Names, dict[Object, str]]]:
    """Find each rename that gives a checkpoint its name, and its files."""
    changes = [op for op in recording.operations if isinstance(op, Names)]
    named = [op for op in changes if len(op.changes) == 2 and op.changes[1][1].startswith("step-")]
    files = {op: {c[2]: c[1] for o in changes for c in o.changes if c[0] == op.changes[1][2] and c[2]} for op in named}
    return list(files.items())


def renamed_first(recording: Recording) -> list[Operation]:
    """Rename before the files are synced."""
    operations = list(recording.operations)
    for rename, files in commits(recording):
        operations.remove(rename)
        first = next(index for index, op in enumerate(operations) if isinstance(op, Synced) and op.inode in files)
        operations.insert(first, rename)
    return operations


def manifest_first(recording: Recording) -> list[Operation]:
    """Write the manifest before the other files."""
    operations = list(recording.operations)
    for rename, files in commits(recording):
        late = {file for file, name in files.items() if name != "manifest.json"}
        moved = [op for op in operations if subject(op) in late]
        operations = [op for op in operations if subject(op) not in late]
        begin = operations.index(rename)
        reports = [index for index, op in enumerate(operations) if index > begin and isinstance(op, Reported)]
        operations[reports[0] + 1 : reports[0] + 1] = moved
    return operations


def subject(operation: Operation) -> Object | None:
    """Return the file or folder that was written or synced."""
    if isinstance(operation, Bytes):
        return operation.file
    return operation.inode if isinstance(operation, Synced) else None


MUTANTS: dict[str, tuple[Callable[[Recording], list[Operation]], str]] = {
    "files are not synced": (unsynced(lambda recording, inode: inode not in recording.folders), "lost"),
    "folders are not synced": (unsynced(lambda recording, inode: inode in recording.folders), "lost"),
    "the folder of the runs is not synced": (unsynced(lambda recording, inode: inode == ROOT), "lost"),
    "the manifest is written before the files": (manifest_first, "lost"),
    "renamed before the files are synced": (
        renamed_first,
        "half",
    ),  # not reported yet, so none is lost, but one is incomplete
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_defect_loses_checkpoints(tmp_path: Path, say: Callable[[str], None], name: str) -> None:
    mutate, expected = MUTANTS[name]
    case, guarantees = uninterrupted_case(tmp_path / "whole"), Guarantees(tmp_path)
    operations = mutate(case.recording)
    assert operations != case.recording.operations
    mutant = replace(case, recording=replace(case.recording, operations=operations))
    broken = cut_at_random([mutant], 150, guarantees)
    say(f"R3: planted: {name}; of 150 power cuts {broken[expected]} found it ({expected})")
    assert broken[expected]


def test_the_simulated_disk_loses_only_what_was_not_synced(tmp_path: Path) -> None:
    def act(recorder: Recorder) -> None:
        for name in ("both", "name", "bytes"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "file").write_bytes(b"0123456789")
            for path in {"both": ("", "file"), "name": ("",), "bytes": ("file",)}[name]:
                synced(tmp_path / name / path)
        synced(tmp_path)

    recording, rng = record(tmp_path, act), random.Random(0)
    states = [after_cut(recording, len(recording.operations), rng) for _ in range(400)]
    contents = {name: {tree.get(f"{name}/file") for tree in states} for name in ("both", "name", "bytes")}
    assert contents["both"] == {b"0123456789"}
    assert contents["bytes"] == {b"0123456789", None}
    assert contents["name"] >= {b"", b"0123456789", b"01234", bytes(10), b"01234" + bytes(5)}
    assert None not in contents["name"]
