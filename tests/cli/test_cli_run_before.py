"""Runs, prepared folders and exports made before the package was restructured are still read.

Commit e243af6 made `run_before/`: a tiny run on `tests/data/prepared_before/folder` that trained eight steps with a
checkpoint every four, and its export. To stand for a crash, the checkpoint of step 8 was removed and the log was cut
after step 6. `expected.json` holds what the whole run logged. Never record it anew to make a failing test pass: users
have such directories.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from redline.runs.events import read_events

BEFORE = Path(__file__).with_name("run_before")
TOKENS = Path(__file__).parents[1] / "data/prepared_before/folder"
EXPECTED = json.loads((BEFORE / "expected.json").read_text())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the prepared tokens and the crashed run, as the user who began it would have."""
    shutil.copytree(TOKENS, tmp_path / "tokens")
    shutil.copytree(BEFORE / "run", tmp_path / "runs/before")
    lock = tmp_path / "runs/before/lock.json"
    lock.write_text(lock.read_text().replace('"began_in": "PROJECT"', f'"began_in": {json.dumps(str(tmp_path))}'))
    return tmp_path


def logged(run: Path, kind: str, fields: tuple[str, ...]) -> list[dict[str, float]]:
    """The events of a kind that count: those before the resume, up to its step, and all after it."""
    events = read_events(run / "events.jsonl")
    resumed = next(place for place, event in enumerate(events) if event.get("resumed_from"))
    kept = [event for event in events[:resumed] if event.get("step", 0) <= 4] + events[resumed:]
    return [{field: event[field] for field in fields} for event in kept if event["type"] == kind]


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Equal but for the last digits, which depend on the processor."""
    assert [set(row) for row in found] == [set(row) for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=2e-4), row


def test_an_older_run_is_resumed_evaluated_and_reported(inside: Callable[..., Any], project: Path) -> None:
    done = inside("train", "--resume", "before", cwd=project)
    assert done.code == 0, done.err
    assert_close(logged(project / "runs/before", "step", ("step", "loss", "lr", "grad_norm")), EXPECTED["steps"])
    evaluations = EXPECTED["evaluations"]
    assert_close(logged(project / "runs/before", "eval", ("step", "loss", "bits_per_byte")), evaluations)
    answer = json.loads(inside("eval", "before", "--json", cwd=project).out)
    assert_close([{key: answer[key] for key in EXPECTED["eval"]}], [EXPECTED["eval"]])
    headline = json.loads(inside("report", "before", "--json", cwd=project).out)["headline"]
    wanted = dict(EXPECTED["report_headline"])
    assert headline["mfu_formula"] == wanted.pop("mfu_formula")
    assert_close([{key: headline[key] for key in wanted}], [wanted])


def test_an_older_crashed_run_is_listed_and_its_checkpoint_exported(inside: Callable[..., Any], project: Path) -> None:
    (listed,) = json.loads(inside("runs", "--json", cwd=project).out)
    assert (listed["name"], listed["status"], listed["step"]) == ("before", "crashed", 6)
    assert inside("export", "before", "--out", "model", cwd=project).code == 0
    exported = load_file(project / "model/model.safetensors")
    before = load_file(BEFORE / "export/model.safetensors")
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in exported.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in before.items()
    }


def test_an_older_export_is_loaded_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(BEFORE / "export"), dtype=torch.float32)
    tokens = torch.arange(32)[None]
    loss = model(tokens, labels=tokens).loss.item()
    assert loss == pytest.approx(EXPECTED["transformers_loss"], rel=2e-4)
