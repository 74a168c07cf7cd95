"""A lock.json whose model was changed: eval, sample, export, model.init_from and resume all refuse it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from redline.errors import UserError
from redline.evaluate.init_from import open_initial
from redline.evaluate.opened_run import open_run
from redline.export.folder import export_run
from redline.recipe.lock import locked_recipe, make_lock, model_identity, read_lock, write_lock
from redline.training.checkpoint import Snapshot, commit, read_state, read_tensors, remove_checkpoint

STEP = "checkpoints/step-00000002"
# of each key, another value than the one it has
EDITS: dict[str, Callable[[Any], Any]] = {
    "rope_theta": lambda theta: 2 * theta,
    "norm_eps": lambda eps: 10 * eps,
    "qk_norm": lambda on: not on,
    "softcap": lambda cap: (cap or 0.0) + 30.0,
    "mlp": lambda kind: "swiglu" if kind == "relu2" else "relu2",
    "d_ff": lambda width: 2 * width,
}


@pytest.fixture
def run(world: Any, tmp_path: Path) -> Path:
    trainer = world.run(tmp_path / "run", "train.steps=2")
    write_lock(tmp_path / "run", make_lock("toy", "id", trainer.resolved, trainer.objective.data.facts))
    return tmp_path / "run"


def resume(run: Path) -> None:
    from redline.launch.start import resume_run

    assert resume_run(str(run), ["train.steps=3"], dry_run=False) == 0


USES: dict[str, Callable[[Path], Any]] = {
    "eval": lambda run: open_run(run, device="cpu"),
    "sample": lambda run: open_run(run, writes_only=True, device="cpu"),
    "export": lambda run: export_run(run, None, run.parent / "exported"),
    "init_from": lambda run: open_initial(str(run), run.parent),
    "resume": resume,
}


def edit(run: Path, **changes: Any) -> None:
    lock = json.loads((run / "lock.json").read_text())
    lock["recipe"]["model"] |= changes
    (run / "lock.json").write_text(json.dumps(lock))


@pytest.mark.parametrize("use", USES)
def test_a_changed_model_is_refused(run: Path, use: str, no_pictures: None) -> None:
    whole = (run / "lock.json").read_text()
    model = json.loads(whole)["recipe"]["model"]
    for key, other in EDITS.items():
        edit(run, **{key: other(model[key])})
        with pytest.raises(UserError) as refused:
            USES[use](run)
        assert f"model.{key}" in refused.value.what, "the key is named"
        (run / "lock.json").write_text(whole)
    # neither changes what the model computes
    edit(run, attention="dense", dropout=0.0, embedding_std=0.5, kernels="torch")
    USES[use](run)


def test_a_checkpoint_of_an_older_release_still_loads(run: Path, no_pictures: None) -> None:
    path = run / STEP
    state = read_state(path)
    del state["identity"]["model"]
    tensors = {stem: read_tensors(path, stem) for stem in ("model", "optimizer")}
    remove_checkpoint(path)
    commit(run / "checkpoints", Snapshot(2, tensors, state))
    for use in USES.values():
        use(run)


def test_the_identity_has_all_keys_to_compare(run: Path) -> None:
    recorded = read_state(run / STEP)["identity"]["model"]
    assert recorded == model_identity(locked_recipe(run, read_lock(run)).recipe)
    assert {"model.rope_theta", "model.norm_eps", "model.qk_norm", "model.softcap", "model.mlp"} <= recorded.keys()
    assert not {"model.attention", "model.kernels", "model.base", "model.dropout"} & recorded.keys()


def test_job_options_that_change_the_computation_are_in_the_identity(world: Any) -> None:
    recipe = world.recipe("objective=block_diffusion", "block_diffusion.block_size=8", "data.pack=false")
    assert model_identity(recipe)["block_diffusion.block_size"] == 8
    assert "block_diffusion.sampler" not in model_identity(recipe), "that may be another one later"
