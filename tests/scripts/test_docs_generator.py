"""The generated pages are up to date, and the JSON schema accepts and refuses what recipes do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from redline.errors import RecipeError
from redline.jobs.base import JOBS, options_of
from redline.recipe.aliases import ALIASES
from redline.recipe.load import known_keys, load, read_recipe, shipped
from redline.recipe.schema import Recipe

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def docs(module: Callable[[str], ModuleType]) -> Any:
    return module("docs")


def test_the_pages_are_up_to_date(
    docs: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["docs.py", "--check"])
    assert docs.main() == 0, capsys.readouterr().out


def test_a_stale_page_is_found(
    docs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = {tmp_path / path.name: text for path, text in docs.generated_files().items()}
    monkeypatch.setattr(docs, "generated_files", lambda: written)
    monkeypatch.setattr(docs, "pages", list)
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["docs.py", "--check"])
    assert docs.main() == 1
    monkeypatch.setattr(sys, "argv", ["docs.py"])
    assert docs.main() == 0
    monkeypatch.setattr(sys, "argv", ["docs.py", "--check"])
    assert docs.main() == 0
    (tmp_path / "recipe.md").write_text("old")
    assert docs.main() == 1
    assert "recipe.md is out of date" in capsys.readouterr().out


def test_every_key_is_there_with_a_type_and_a_text() -> None:
    page = (DOCS / "recipe.md").read_text(encoding="utf-8")
    rows = {row[0]: row for row in re.findall(r"^\| `([\w.]+)`(?: ↻)? \| (.+?) \| (.+?) \| (.+) \|$", page, re.M)}
    own = {f"{job}.{key}" for job in JOBS for key in known_keys(options_of(job))}
    assert set(rows) == {*known_keys(Recipe)} | own
    assert rows["model.lora.target_modules"][1].startswith("`all-linear` or a list of `q_proj`, ")
    assert rows["train.lr"][1] == "`auto` or number > 0"
    assert rows["train.steps"][1] == "whole number ≥ 1 or `null`"
    assert "lr_base · √" in rows["train.lr"][3]
    assert "`train.micro_batch_size`" in rows["train.micro_batch"][3]
    assert "| `train.steps` ↻ |" in page
    assert "| `model.layers` |" in page


# --- JSON schema: just enough of a validator for what pydantic writes


def accepts(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema and not any(accepts(form, value, root) for form in schema["anyOf"]):
        return False
    if "enum" in schema and not any(value == word and type(value) is type(word) for word in schema["enum"]):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    return _has_type(schema, value) and _within(schema, value) and _fields(schema, value, root)


def _has_type(schema: dict[str, Any], value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {
        "number": number,
        "integer": number and value == int(value),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    return "type" not in schema or kinds[schema["type"]]


def _within(schema: dict[str, Any], value: Any) -> bool:
    if isinstance(value, str):
        fits = len(value) >= schema.get("minLength", 0)
        return fits and bool(re.search(schema.get("pattern", ""), value))
    if not isinstance(value, int | float):
        return True
    low, above, high = (schema.get(k) for k in ("minimum", "exclusiveMinimum", "maximum"))
    return (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)


def _fields(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    if not isinstance(value, dict) or "properties" not in schema:
        return True
    known = schema["properties"]
    strangers = set(value) - set(known)
    fine = all(accepts(known[key], item, root) for key, item in value.items() if key in known)
    return fine and not (strangers and schema.get("additionalProperties") is False)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "recipe.schema.json").read_text(encoding="utf-8"))
    return found


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_pass(schema: dict[str, Any], name: str) -> None:
    assert accepts(schema, read_recipe(shipped()[name]), schema)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("train.steps", [1, 100, "512k", "2.5B", None], [0, -4, "many", True, [1]]),
        ("train.lr", ["auto", 1e-3], ["fast", 0, -1e-3]),
        ("train.hours", [1.5, "90m", "2h"], ["long", 0]),
        ("train.optimizer", ["adamw", "paged_adamw_8bit"], ["sgd", 3]),
        ("train.grad_checkpointing", ["full", True, False], ["some"]),
        ("train.compile", ["auto", True], ["yes", 1]),
        ("train.memory_fraction", [0.9, 1], [0, 1.5]),
        ("model.size", [None, "auto", "350m"], ["351m"]),
        ("data.source", ["./notes"], [3, ""]),
        ("monitor.wandb", [True, False, "project"], [3, None]),
        ("checkpoint.best", [True], ["true", 0]),
        ("train.stepz", [], [3]),
    ],
)
def test_editor_and_recipe_agree(schema: dict[str, Any], key: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert accepts(schema, nested(key, value), schema), value
        assert load("pretrain-350m", [f"{key}={json.dumps(value)}"]).recipe
    for value in bad:
        assert not accepts(schema, nested(key, value), schema), value
        with pytest.raises(RecipeError):
            load("pretrain-350m", [f"{key}={json.dumps(value)}"])


def test_other_spellings_are_known_and_struck_through(schema: dict[str, Any]) -> None:
    for alias in ALIASES:
        assert accepts(schema, nested(alias, 4), schema), alias
    assert schema["properties"]["batch_size"] == {
        "description": "Another spelling of train.micro_batch.",
        "deprecated": True,
    }


def test_texts_are_plain(schema: dict[str, Any]) -> None:
    text = schema["$defs"]["Train"]["properties"]["lr"]["description"]
    assert text == "peak learning rate of AdamW"
    described = json.dumps(schema, ensure_ascii=False)
    assert "](" not in described
