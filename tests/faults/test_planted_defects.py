"""R18: each defect planted in saving, resuming or skipping is caught by a fault test."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planted
import pytest
import test_damage
import test_disk_full
import test_save_operations
import test_two_runs
import torch
from planted import Plant, always
from test_power_loss import Guarantees, all_cases, cut_at_random

from redline.runs.events import read_events
from redline.training import checkpoint, optim, step
from redline.training import checkpoint as saving
from redline.training.checkpoint import HostCopy, commit, committed_steps, step_name, verify
from redline.training.control import RunDirectory
from redline.training.optim import Adam, Ema

RUNS = ("whole", "parts")

# --- the checks: the fault tests themselves, called as pytest would


class Suite:
    """Calls a fault test with its fixtures."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    def fixture(self, name: str) -> Any:
        return self._request.getfixturevalue(name)

    def run(self, test: Callable[..., None], **fixtures: Any) -> None:
        fixtures = {"say": lambda text: None, **fixtures}  # figures measured with a planted defect must not be printed
        wanted = inspect.signature(test).parameters
        test(**{name: fixtures[name] if name in fixtures else self.fixture(name) for name in wanted})

    def pair(self) -> tuple[Path, Path]:
        """Return two checkpoints, of which tests damage the second."""
        folder, tiny = self.fixture("tmp_path") / "pair", self.fixture("tiny")
        return commit(folder, tiny(1)).path, commit(folder, tiny(2)).path


def r2(suite: Suite) -> None:
    suite.run(
        test_save_operations.test_a_kill_before_any_operation_of_a_save_loses_nothing,
        before=test_save_operations.third_of_three,
    )


def r3(suite: Suite) -> None:
    folder = suite.fixture("tmp_path")
    assert not cut_at_random(all_cases(folder), 1000, Guarantees(folder), enough=1)


def r4_bytes(suite: Suite) -> None:
    suite.run(test_damage.test_every_byte, pair=suite.pair())


def r4_missing(suite: Suite) -> None:
    suite.run(test_damage.test_missing_files_fall_back, pair=suite.pair(), name="model.safetensors")


def r4_names(suite: Suite) -> None:
    suite.run(test_damage.test_names_must_match_steps, pair=suite.pair())


def r4_links(suite: Suite) -> None:
    suite.run(test_damage.test_links_are_not_followed_out_of_the_run, pair=suite.pair())


def r4_additional(suite: Suite) -> None:
    suite.run(test_damage.test_additional_files_are_refused_unread, pair=suite.pair(), name="extra.safetensors")


def r5(suite: Suite) -> None:
    suite.run(test_disk_full.test_a_save_survives_an_error_in_any_operation, code=errno.ENOSPC)


def r7(suite: Suite) -> None:
    """Six steps equal three, a resume and three more, bit for bit; each step has its own noise."""
    world, folder, read = suite.fixture("world"), suite.fixture("tmp_path"), suite.fixture("tensors_of")
    options = ("train.steps=6", "train.ema=0.9", "model.dropout=0.1", "train.schedule=cosine")
    with noise() as seeds:
        world.run(folder / "whole", *options)
    assert len({*seeds[-12:]}) == 12, "the noise of six steps of two micro-batches repeats"
    world.run(folder / "parts", *options, stop_at=3)
    assert world.run(folder / "parts", *options, resume=True).state.step == 6
    whole, parts = ([e for e in read_events(folder / r / "events.jsonl") if e["type"] == "step"] for r in RUNS)
    keys = ("step", "tokens", "loss", "lr", "grad_norm")
    assert [[e[k] for k in keys] for e in whole] == [[e[k] for k in keys] for e in parts]
    expected, got = (read(folder / run / "checkpoints" / step_name(6)) for run in RUNS)
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


@contextmanager
def noise() -> Iterator[list[int]]:
    """Record the seeds of a run's micro-batches, in order."""
    seeds: list[int] = []
    plain = step.micro_batch_seed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "micro_batch_seed", lambda *place: (seeds.append(plain(*place)), seeds[-1])[1])
        yield seeds


def r8(suite: Suite, optimizer: str = "adamw") -> None:
    """Two steps that are not finite change no tensor by one bit."""
    world, folder = suite.fixture("world"), suite.fixture("tmp_path")
    with RunDirectory(folder / "run") as run:
        trainer = world.trainer(run, f"train.optimizer={optimizer}", "train.ema=0.9", "train.steps=4")
        seen: list[dict[str, torch.Tensor]] = []

        def keep(number: int) -> None:
            seen.append({f"{f}/{n}": t.clone() for f, ts in trainer.tensors().items() for n, t in ts.items()})

        plain, first = trainer.objective.loss, next(iter(trainer.parameters.values()))

        def loss(batch: Any) -> Any:
            value = float("nan") if trainer.state.step in (1, 2) else 0.0
            return {n: type(t)(t.sum + value * first.sum(), t.weight, t.coefficient) for n, t in plain(batch).items()}

        world.around(trainer, after=keep)
        trainer.objective.loss = loss
        trainer.run()
    assert all(before.equal(seen[2][name]) for name, before in seen[0].items()), "a bad step changed something"
    assert not all(before.equal(seen[3][name]) for name, before in seen[2].items()), (
        "the next good step must change the weights"
    )


def r8_muon(suite: Suite) -> None:
    r8(suite, "muon")


def r16(suite: Suite) -> None:
    suite.run(test_two_runs.test_a_killed_run_frees_its_directory)


def retention(suite: Suite) -> None:
    """Retention does not count damaged checkpoints."""
    folder, tiny = suite.fixture("tmp_path"), suite.fixture("tiny")
    for number in (1, 2, 3):
        commit(folder, tiny(number))
    (folder / step_name(2) / "state.json").write_bytes(b"{}")
    checkpoint.apply_retention(folder, 2, fresh=3)
    assert committed_steps(folder)[0] == 1
    assert verify(folder / step_name(1))


def copies(suite: Suite) -> None:
    """Training after the snapshot does not change it."""
    weight = torch.ones(3)
    copy = HostCopy().take({"model": {"w": weight}})["model"]["w"]
    weight.zero_()
    assert copy.tolist() == [1.0] * 3


# --- the table


@dataclass(frozen=True)
class Defect:
    what: str
    plant: Plant
    caught_by: Callable[[Suite], None]


DEFECTS = [
    Defect("files are not synced", planted.only_sync(Path.is_dir), r3),
    Defect("folders are not synced", planted.only_sync(Path.is_file), r3),
    Defect("files are synced after the rename", planted.synced_late, r3),
    Defect("the run's own name is not synced", planted.run_not_synced, r3),
    Defect("a removal is not synced", planted.removal_not_synced, r3),
    Defect("reported before it is committed", planted.reported_early, r3),
    Defect("one less is kept than asked for", planted.keeps_one_less, r3),
    Defect("the best is not kept", planted.best_forgotten, r3),
    Defect("the manifest is written first", planted.manifest_first(test_save_operations, saving), r2),
    Defect("removed under its own name", planted.removed_in_place, r2),
    Defect("damaged ones count as kept", always(checkpoint, "_is_intact", True), retention),
    Defect("files are not compared with the manifest", always(checkpoint, "_check_files", None), r4_bytes),
    Defect("sizes are compared, digests are not", always(checkpoint, "file_digest", ""), r4_bytes),
    Defect("the manifest's own digest is not compared", planted.manifest_unchecked, r4_bytes),
    Defect("the manifest's step is not compared", planted.manifest_unchecked, r4_names),
    Defect("the newest is taken unread", planted.newest_unread(test_damage), r4_missing),
    Defect("links are followed", always(Path, "is_symlink", False), r4_links),
    Defect("additional files are accepted", planted.additional_accepted, r4_additional),
    Defect("what failed is not removed", always(checkpoint, "_delete", None), r5),
    Defect("a save that failed is reported as done", planted.failure_swallowed, r5),
    Defect("the directory's lock is not taken", always(RunDirectory, "_lock", True), r16),
    Defect("the snapshot is not a copy", planted.snapshot_alive, copies),
    Defect("moments begin anew on resume", planted.after_restore(planted.forget_moments), r7),
    Defect("the average begins anew on resume", planted.after_restore(planted.forget_average), r7),
    Defect("the learning rate begins anew on resume", planted.after_restore(planted.restart_schedule), r7),
    Defect("the data begin anew on resume", planted.restart_data, r7),
    Defect("noise depends on what ran before", planted.seed_by_micro_batches_run, r7),
    Defect("noise does not depend on the step", planted.seed_without_step, r7),
    Defect("a bad step writes NaN into all", planted.never_bad, r8),
    Defect("a bad step writes NaN into AdamW's moments", planted.ungated(Adam, "step", 2), r8),
    Defect("a bad step writes NaN into Muon's momentum", planted.ungated(optim, "nesterov_", 3), r8_muon),
    Defect("a bad step moves the average", planted.ungated(Ema, "update", 1), r8),
]
OWN_CHECKS = [r7, r8, r8_muon, retention, copies]  # the other checks are tests of the suite, where they pass


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> Suite:
    return Suite(request)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.what)
def test_a_planted_defect_is_caught(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None], defect: Defect
) -> None:
    with monkeypatch.context() as patch:
        defect.plant(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            defect.caught_by(suite)
    say(f"R18: planted: {defect.what}; caught by {defect.caught_by.__name__}")


@pytest.mark.parametrize("check", OWN_CHECKS, ids=lambda check: check.__name__)
def test_without_a_defect_nothing_is_caught(suite: Suite, check: Callable[[Suite], None]) -> None:
    check(suite)
