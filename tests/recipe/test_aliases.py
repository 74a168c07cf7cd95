"""Aliases of recipe keys are translated, with a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redline.errors import RecipeError
from redline.recipe.aliases import ALIASES
from redline.recipe.load import OLDER_NAMES, known_keys, load, shipped
from redline.recipe.lock import spelled_as_locked, write_lock
from redline.recipe.schema import Recipe

# alias → what is written, what the canonical key then holds
SAID: dict[str, tuple[str, Any]] = {
    "train.micro_batch_size": ("4", 4),
    "batch_size": ("4", 4),
    "train.gradient_accumulation": ("2", 2),
    "train.gradient_accumulation_steps": ("2", 2),
    "gradient_accumulation": ("2", 2),
    "gradient_accumulation_steps": ("2", 2),
    "early_stopping_patience": ("3", 3),
    "max_batch_memory_gb": ("72", 72.0),
    "learning_rate": ("4e-4", 4e-4),
    "max_hours": ("1.5", 1.5),
    "attn_implementation": ("flash_attention_2", "flash"),
    "use_flash_attn": ("true", "auto"),
    "use_flash_attention": ("false", "dense"),
    "compile_model": ("true", True),
    "mixed_precision": ("bf16", "bf16"),
    "num_workers": ("16", 16),
    "train.learning_rate": ("1e-4", 1e-4),
    "train.max_hours": ("3", 3.0),
    "model.attn_backend": ("flash_attn", "auto"),
    "model.gradient_checkpointing": ("true", "full"),
    "trainer.compile": ("false", False),
    "trainer.precision": ("bf16-mixed", "bf16"),
    "train.bf16": ("true", "bf16"),
    "loader.num_workers": ("3", 3),
    "data.num_workers": ("3", 3),
    "max_seq_len": ("512", 512),
    "pack": ("false", False),
    "lora.r": ("8", 8),
    "lora.alpha": ("32", 32.0),
    "lora.dropout": ("0.1", 0.1),
    "lora.target_modules": ("[v_proj, q_proj]", ("q_proj", "v_proj")),
    "lora.rslora": ("true", True),
    "bnb_4bit.quant_type": ("nf4", "nf4"),
    "bnb_4bit.use_double_quant": ("false", False),
    "bnb_4bit.compute_dtype": ("bfloat16", "bf16"),
}


def recipe_for(alias: str) -> str:
    """Where such a key does something."""
    return "qlora-smollm2" if alias.startswith(("lora.", "bnb_4bit.")) else "quickstart"


def get(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = getattr(recipe, part)
    return recipe


def test_every_alias_leads_to_a_key_that_exists() -> None:
    keys = set(known_keys(Recipe))
    assert set(ALIASES.values()) <= keys
    assert not set(ALIASES) & keys


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_as_override(alias: str) -> None:
    text, value = SAID[alias]
    loaded = load(recipe_for(alias), [f"{alias}={text}"])
    assert get(loaded.recipe, ALIASES[alias]) == value
    (note,) = loaded.notes
    assert {alias, ALIASES[alias]} <= {*note.split()}


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_in_a_file(alias: str, tmp_path: Path) -> None:
    text, value = SAID[alias]
    *sections, last = alias.split(".")
    inner = f"{{{last}: {text}}}"
    section = sections[0] if sections else None
    lines = {"model": "{size: 1m}", "train": "{steps: 5}"}
    if recipe_for(alias) != "quickstart":
        lines = {"objective": "finetune", "model": "{base: ./base}", "train": "{steps: 5}"}
    if section in lines:
        lines[section] = lines[section].replace("{", inner[:-1] + ", ")
    elif section:
        lines[section] = inner
    else:
        lines[last] = text
    path = tmp_path / "mine.yaml"
    path.write_text("".join(f"{key}: {content}\n" for key, content in lines.items()))
    loaded = load(str(path))
    assert get(loaded.recipe, ALIASES[alias]) == value
    (note,) = loaded.notes
    assert {alias, ALIASES[alias]} <= {*note.split()}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.precision=16-mixed", "train.precision", "fp16"),
        ("trainer.precision=32", "train.precision", "fp32"),
        ("trainer.precision=32-true", "train.precision", "fp32"),
        ("train.bf16=false", "train.precision", "auto"),
        ("mixed_precision=fp16", "train.precision", "fp16"),
        ("mixed_precision=no", "train.precision", "fp32"),
        ("use_flash_attn=false", "model.attention", "dense"),
        ("model.attn_backend=sdpa", "model.attention", "auto"),
        ("model.attn_backend=dense", "model.attention", "dense"),
        ("model.attn_backend=flex", "model.attention", "flex"),
    ],
)
def test_values_are_translated(override: str, key: str, value: str) -> None:
    assert get(load("quickstart", [override]).recipe, key) == value


@pytest.mark.parametrize("alias", ALIASES)
def test_two_spellings_that_differ_are_refused_in_one_place(alias: str) -> None:
    text, _ = SAID[alias]
    with pytest.raises(RecipeError, match=f"another spelling of {ALIASES[alias]} .* command line"):
        load("quickstart", [f"{alias}={text}", f"{ALIASES[alias]}=null"])


def test_two_spellings_with_equal_values_are_accepted() -> None:
    """The guides' own YAML says bf16 twice."""
    words = ["train.bf16=true", "bnb_4bit.compute_dtype=bfloat16"]
    assert load("qlora-smollm2", words).recipe.train.precision == "bf16"


def test_an_override_wins_over_the_file_whatever_the_spelling(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {size: 1m}\ntrain: {steps: 5, learning_rate: 1e-3}\n")
    assert load(str(path), ["train.lr=2e-3"]).recipe.train.lr == 2e-3
    path.write_text("model: {size: 1m}\ntrain: {steps: 5, lr: 1e-3}\n")
    assert load(str(path), ["train.learning_rate=2e-3"]).recipe.train.lr == 2e-3


@pytest.mark.parametrize(("older", "name"), OLDER_NAMES.items())
def test_a_renamed_recipe_is_known_by_its_older_name(older: str, name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert older not in shipped()
    by_older, by_name = load(older, ["train.steps=3"]), load(name, ["train.steps=3"])
    assert (by_older.name, by_older.recipe.model_dump()) == (name, by_name.recipe.model_dump())
    assert [older in note for note in by_older.notes if note not in by_name.notes] == [True]
    for locked in (older, name):
        lock = {"schema": 1, "run_id": "1", "recipe_name": locked, "recipe": {}}
        write_lock(tmp_path, lock)
        assert {spelled_as_locked(typed, tmp_path) for typed in (older, name)} == {locked}
        assert spelled_as_locked("quickstart", tmp_path) == "quickstart"
        assert spelled_as_locked(None, tmp_path) is None
    assert spelled_as_locked(older, tmp_path / "no-run") == older
    (tmp_path / older).write_text("description: a file of the user's\nmodel: {size: 1m}\ntrain: {steps: 3}\n")
    assert load(older).recipe.description == "a file of the user's"
    assert spelled_as_locked(older, tmp_path) == older
