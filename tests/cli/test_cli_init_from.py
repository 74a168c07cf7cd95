"""model.init_from: a new run starts from the weights of another run, and records which."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import UserError
from redline.evaluate.init_from import open_initial
from redline.runs.events import read_events


@pytest.fixture
def source(home: Path, tmp_path: Path) -> Path:
    """Copy the trained run to runs/old, which the test may delete."""
    shutil.copytree((home / "runs/latest").resolve(), tmp_path / "runs/old")
    return tmp_path / "runs/old"


def evaluations(run: Path) -> list[tuple[int, float]]:
    return [(e["step"], e["loss"]) for e in read_events(run / "events.jsonl") if e["type"] == "eval"]


def test_the_new_run_starts_at_the_loss_of_the_old_one(source: Path, recipe: str, inside: Any, tmp_path: Path) -> None:
    answer = inside("train", recipe, "model.init_from=old", "train.steps=2", "--run", "runs/new")
    assert answer.code == 0, answer.err
    assert evaluations(tmp_path / "runs/new")[0] == (0, evaluations(source)[-1][1])
    lock, old = (json.loads((tmp_path / f"runs/{name}/lock.json").read_text()) for name in ("new", "old"))
    manifest = json.loads((source / "checkpoints/step-00000006/manifest.json").read_text())
    assert lock["init_from"] == {
        "source": f"{source}@6",
        "run_id": old["run_id"],
        "step": 6,
        "weights": "raw",
        "fingerprint": manifest["files"]["model.safetensors"]["sha256"],
    }
    assert lock["run_id"] != old["run_id"]
    assert old["init_from"] is None
    assert lock["recipe"]["model"]["init_from"] == "old"


def test_a_resume_does_not_need_the_source_run(
    source: Path, recipe: str, inside: Any, tmp_path: Path, tensors_of: Callable[..., Any]
) -> None:
    """Two steps, a resume and two more equal four steps bit for bit, although the source run is deleted."""
    words = ("train", recipe, "model.init_from=old@3", "train.schedule=constant", "train.ema=0.9", "eval.every=2")
    assert inside(*words, "train.steps=4", "--run", "runs/whole").code == 0
    assert inside(*words, "train.steps=2", "--run", "runs/parts").code == 0
    shutil.rmtree(source)
    assert inside("train", "--resume", "parts", "train.steps=4").code == 0
    whole, parts = (tensors_of(tmp_path / f"runs/{name}/checkpoints/step-00000004") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_resume_without_a_checkpoint_starts_with_the_same_weights(
    source: Path, recipe: str, inside: Any, tmp_path: Path
) -> None:
    assert inside("train", recipe, "model.init_from=old@3", "train.steps=1", "--run", "new").code == 0
    shutil.rmtree(tmp_path / "new/checkpoints")
    assert inside("train", "--resume", "new").code == 0
    starts = [loss for step, loss in evaluations(tmp_path / "new") if step == 0]
    assert starts[-1] == evaluations(source)[1][1], "of step 3 again"
    shutil.rmtree(tmp_path / "new/checkpoints")
    shutil.rmtree(source)
    answer = inside("train", "--resume", "new")
    assert answer.code == 2
    assert "There is no such run." in answer.message


def test_averaged_weights_are_used_if_there_are_any(source: Path, recipe: str, inside: Any, tmp_path: Path) -> None:
    assert inside("train", recipe, "train.ema=0.5", "train.steps=3", "--run", "averaged").code == 0
    found = open_initial(str(tmp_path / "averaged"), tmp_path)
    assert found.weights == "ema"
    assert inside("train", recipe, "model.init_from=averaged", "train.steps=1", "--run", "new").code == 0
    assert evaluations(tmp_path / "new")[0][1] == evaluations(tmp_path / "averaged")[-1][1]


def test_weights_can_come_from_an_exported_folder(source: Path, recipe: str, inside: Any, tmp_path: Path) -> None:
    assert inside("export", "old", "--out", "model").code == 0
    shutil.rmtree(source.parent)
    assert inside("train", recipe, "model.init_from=model", "train.steps=1", "--run", "new").code == 0
    lock = json.loads((tmp_path / "new/lock.json").read_text())
    assert (lock["init_from"]["step"], lock["init_from"]["source"]) == (6, str(tmp_path / "model"))
    begins = evaluations(tmp_path / "new")[0][1]
    assert inside("train", recipe, "train.steps=1", "--run", "fresh").code == 0
    assert begins < evaluations(tmp_path / "fresh")[0][1] - 0.01, "not where a fresh model begins"
    (tmp_path / "model/model.safetensors").write_bytes(b"no")
    answer = inside("train", recipe, "model.init_from=model", "--run", "other")
    assert answer.code == 1
    assert "Export the model again." in answer.message
    assert not (tmp_path / "other").exists()


def test_automatic_shapes_are_taken_from_the_source(source: Path, recipe: str, inside: Any, tmp_path: Path) -> None:
    """quickstart leaves its size to the plan; with init_from the weights decide."""
    words = ("data.tokenizer=bytes", "data.seq_len=32", "train.hours=null", "train.epochs=null", "train.steps=1")
    quick = ("train.device=cpu", "train.compile=false", "eval.samples=0", "eval.sequences=2", "model.qk_norm=false")
    data = f"data.source={json.loads((source / 'lock.json').read_text())['recipe']['data']['source']}"
    answer = inside("train", "quickstart", "model.init_from=old", data, *words, *quick, "--run", "new")
    assert answer.code == 0, answer.err
    model = json.loads((tmp_path / "new/lock.json").read_text())["recipe"]["model"]
    assert (model["layers"], model["d_model"], model["heads"], model["d_ff"]) == (2, 32, 2, 64)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("model.init_from=nothing",), 2, "model.init_from=nothing: There is no such run."),
        (("model.init_from=old@99",), 1, "no checkpoint @99. Steps with a checkpoint: 3, 6."),
        (("model.init_from=old@soon",), 2, "Write @best"),
        (("model.init_from=",), 2, "model.init_from: is empty."),
        (
            ("model.init_from=old", "model.layers=3", "model.tied=false"),
            2,
            "old@6 has another shape: model.layers is 2 there and 3 here, model.tied is True there and False here. "
            "Use that shape: model.layers=2 model.d_model=32 model.heads=2 model.d_ff=64 model.tied=true",
        ),
        (("model.init_from=old", "model.heads=4"), 2, "model.heads is 2 there and 4 here"),
        (("model.init_from=old", "model.head_dim=32"), 2, "model.head_dim is 16 there and 32 here"),
        (("model.init_from=old", "data.tokenizer=train:300"), 2, "data.tokenizer=bytes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.usefixtures("source")
def test_incompatible_weights_are_a_one_line_error(
    recipe: str, inside: Any, tmp_path: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    answer = inside("train", recipe, *words, "--run", "new")
    assert answer.code == code, answer.err
    assert says in answer.message
    assert not (tmp_path / "new").exists()


def test_a_different_rope_theta_is_warned_of(source: Path, recipe: str, inside: Any) -> None:
    answer = inside("train", recipe, "model.init_from=old", "model.rope_theta=5e4", "--dry-run")
    assert answer.code == 0
    assert "model.rope_theta was 10000.0 when" in answer.err


def test_weights_of_another_shape_are_named() -> None:
    from redline.training.checkpoint import copy_weights

    with pytest.raises(UserError, match=r"here: a .*\[2\].*\[3\]"):
        copy_weights({"a": torch.zeros(3)}, {"a": torch.zeros(2)}, "here")
    with pytest.raises(UserError, match=r"here: a is missing.*\[3\]"):
        copy_weights({"a": torch.zeros(3)}, {}, "here")
