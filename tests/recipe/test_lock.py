"""The lock stores the recipe, and only a few keys may change on resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redline.errors import RecipeError, UsageError, UserError
from redline.hardware.machine import Machine
from redline.recipe.load import STOPS, flatten, load
from redline.recipe.lock import locked_recipe, make_lock, read_lock, write_lock
from redline.recipe.resolve import DataFacts, resolve
from redline.vocabulary import RECIPE_LOCK_FILE

MACHINE = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
DATA = DataFacts(257, 100_000, 5_000, "data", "bytes", "tokenizer")


@pytest.fixture
def lock(tmp_path: Path) -> dict[str, Any]:
    loaded = load("quickstart", ["train.steps=10", "train.hours=null", "train.betas=[0.8, 0.9]"])
    write_lock(tmp_path, make_lock("quickstart", "abc", resolve(loaded.recipe, MACHINE, DATA), DATA))
    return read_lock(tmp_path)


def test_round_trip(lock: dict[str, Any], tmp_path: Path) -> None:
    resolved = resolve(
        load("quickstart", ["train.steps=10", "train.hours=null", "train.betas=[0.8, 0.9]"]).recipe, MACHINE, DATA
    )
    again = locked_recipe(tmp_path, lock)
    assert again.name == "quickstart"
    assert again.recipe.model_dump() == resolved.recipe.model_dump()
    assert resolve(again.recipe, MACHINE, DATA).recipe.model_dump() == resolved.recipe.model_dump()
    left = {key for key, value in flatten(lock["recipe"]) if value == "auto"}
    assert left <= {"model.attention", "train.fp8", "parallel.shard_size", "parallel.accumulate"}


def test_one_cycle_of_an_older_lock_keeps_its_shape(tmp_path: Path) -> None:
    loaded = load("quickstart", ["train.steps=10", "train.hours=null", "train.schedule=one_cycle"])
    write_lock(tmp_path, make_lock("quickstart", "abc", resolve(loaded.recipe, MACHINE, DATA), DATA))
    lock = read_lock(tmp_path)
    now = locked_recipe(tmp_path, lock).recipe.train
    assert (now.schedule, now.pct_start, now.warmup_steps) == ("one_cycle", 0.3, 3)
    for key in ("pct_start", "cycle_momentum"):
        del lock["recipe"]["train"][key]  # as versions wrote it that did not know them
    old = resolve(locked_recipe(tmp_path, lock).recipe, MACHINE, DATA).recipe.train
    assert (old.schedule, old.pct_start, old.warmup_steps) == ("cosine_cycle", None, 3)


def test_the_content_of_the_lock(lock: dict[str, Any]) -> None:
    assert lock["seed"] == 1337
    assert lock["run_id"] == "abc"
    assert lock["data"] == vars(DATA)
    assert lock["machine"]["name"] == "a CPU"
    assert {"redline", "python", "torch"} <= lock["versions"].keys()
    assert {"commit", "dirty"} == lock["git"].keys()
    assert all(choice["reason"] for choice in lock["choices"])


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["train.steps=20"], "train.steps", 20),
        (["train.tokens=1M"], "train.tokens", 1_000_000),
        (["train.hours=90m"], "train.hours", 1.5),
        (["train.max_hours=2"], "train.hours", 2.0),
        (["train.epochs=2"], "train.epochs", 2.0),
        (["train.target_loss=2.5"], "train.target_loss", 2.5),
        (["eval.every=7"], "eval.every", 7),
        (["eval={every: 7}"], "eval.every", 7),
        (["checkpoint.keep=5"], "checkpoint.keep", 5),
        (["+monitor.log_every=3"], "monitor.log_every", 3),
        (["train.seed=1337"], "train.seed", 1337),
    ],
)
def test_resumable_keys_may_change(
    lock: dict[str, Any], tmp_path: Path, overrides: list[str], key: str, value: Any
) -> None:
    before, after = (dict(flatten(locked_recipe(tmp_path, lock, o).recipe.model_dump())) for o in ([], overrides))
    assert after[key] == value
    counted = set(STOPS) if key in STOPS else set()  # a typed one replaces the others
    assert {k for k in after if after[k] != before[k]} <= {key, *counted}


def test_an_alias_is_noted(lock: dict[str, Any], tmp_path: Path) -> None:
    (note,) = locked_recipe(tmp_path, lock, ["train.max_hours=2"]).notes
    assert {"train.max_hours", "train.hours"} <= {*note.split()}


def test_other_changes_are_refused_with_the_differences(lock: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        locked_recipe(tmp_path, lock, ["train.lr=0.5", "model.layers=99", "train.steps=20", "train.optimzer=adamw"])
    text = caught.value.message()
    assert f"train.lr=0.5 (it is {lock['recipe']['train']['lr']!r} in this run)" in text
    assert f"model.layers=99 (it is {lock['recipe']['model']['layers']!r} in this run)" in text
    assert "Did you mean 'train.optimizer'?" in text
    assert "train.steps" not in text
    assert "new run" in text


@pytest.mark.parametrize(
    "override", ["eval.evry=3", "eval.every.x=3", "monitor.a.b=3", "train.steps=-1", "train.steps=null"]
)
def test_a_mistake_on_resume_is_a_recipe_error(lock: dict[str, Any], tmp_path: Path, override: str) -> None:
    with pytest.raises(RecipeError, match=override.partition("=")[0].rpartition(".")[0]):
        locked_recipe(tmp_path, lock, [override, "train.epochs=null"])


def test_both_spellings_are_refused_on_resume_too(lock: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"another spelling of train\.hours"):
        locked_recipe(tmp_path, lock, ["train.hours=3", "train.max_hours=2"])


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '"x"', "{", '{"schema": 1}', '{"schema": 1, "recipe": 3}', '{"schema": 99}']
)
def test_a_damaged_lock_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / RECIPE_LOCK_FILE).write_text(content)
    with pytest.raises(UserError, match=r"lock\.json: (is damaged|has schema 99)") as caught:
        read_lock(tmp_path)
    assert caught.value.fix


def test_no_lock_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run"):
        read_lock(tmp_path)


def test_the_file_is_plain_json(lock: dict[str, Any], tmp_path: Path) -> None:
    assert json.loads((tmp_path / RECIPE_LOCK_FILE).read_text()) == lock
    assert [path.name for path in tmp_path.iterdir()] == [RECIPE_LOCK_FILE], "no temporary file stays"
