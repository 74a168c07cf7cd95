"""`redline keys` and `redline recipes NAME` answer at once, from what is in the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli_help import best_of, slowness

from redline.recipe.load import load, shipped


def test_a_recipe_is_shown_as_it_is_written(inside: Any) -> None:
    for name in ("quickstart", "qlora-8b"):
        assert inside("recipes", name).out == shipped()[name].read_text(encoding="utf-8")
    shown = json.loads(inside("recipes", "quickstart", "--json").out)
    assert shown["name"] == "quickstart"
    assert shown["recipe"] == load("quickstart").recipe.model_dump(mode="json")
    assert shown["recipe"]["train"]["clip"] == 1.0, "with the defaults"


def test_a_recipe_file_is_shown_too_unless_it_is_wrong(inside: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# mine\nmodel: {size: auto}\ntrain: {steps: 5}\n")
    assert inside("recipes", "mine.yaml").out.startswith("# mine\n")
    (tmp_path / "mine.yaml").write_text("model: {size: auto}\ntrain: {stepz: 5}\n")
    answer = inside("recipes", "mine.yaml")
    assert (answer.code, answer.out) == (2, "")
    assert "Did you mean 'train.steps'?" in answer.message
    answer = inside("recipes", "quickstrat")
    assert answer.code == 2
    assert "Did you mean 'quickstart'?" in answer.message


def test_the_sections_are_listed(inside: Any) -> None:
    out = inside("keys").out
    assert all(f"\n  {section} " in out for section in ("model", "model.lora", "train", "finetune", "block_diffusion"))
    rows = {row["section"]: row["keys"] for row in json.loads(inside("keys", "--json").out)}
    assert "train.lr" in rows["train"]
    assert rows[""] == ["objective", "description"]


def test_a_section_lists_its_keys(inside: Any) -> None:
    out = inside("keys", "model").out
    assert "  layers = auto " in out
    assert "model.lora" in out.splitlines()[-1]
    assert {row["name"] for row in json.loads(inside("keys", "eval", "--json").out)} >= {"eval.every", "eval.patience"}


def test_a_key_is_explained(inside: Any) -> None:
    lines = [" ".join(line.split()) for line in inside("keys", "train.lr").out.splitlines()]
    for line in (
        "type auto or number > 0",
        "default auto",
        "auto becomes lr_base · √(global_batch / batch_base)",
        "aliases train.learning_rate, learning_rate",
        "on resume cannot change",
        "qlora-8b 2e-4",
    ):
        assert line in lines
    assert inside("keys", "batch_size").out.startswith("batch_size is an alias of train.micro_batch.\n")
    found = json.loads(inside("keys", "train.steps", "--json").out)
    assert found["resumable"]
    assert found["recipes"]["qlora-smollm2"] == 60
    assert "`" not in found["text"] + found["type"]


def test_an_unknown_key_is_a_usage_error(inside: Any) -> None:
    answer = inside("keys", "train.lrr")
    assert (answer.code, answer.out) == (2, "")
    assert "Did you mean 'train.lr'?" in answer.message


def test_the_verb_of_another_tool_is_answered_with_keys(inside: Any) -> None:
    assert "Did you mean `redline keys train.lr`?" in inside("explain", "train.lr").message


def test_both_take_at_most_300_ms_and_no_torch(redline: Any, tmp_path: Path) -> None:
    limit = 0.3 * slowness()
    for words in (("keys", "train.lr"), ("keys",), ("recipes", "quickstart")):
        assert best_of(8, lambda words=words: redline(*words, cwd=tmp_path)) <= limit, words
    program = (
        "import sys\nfrom redline.cli.main import run\nsys.argv = ['redline', 'keys', 'train.lr']\nrun()\n"
        "print(*{'torch', 'numpy', 'matplotlib'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


@pytest.mark.parametrize("columns", [40, 100])
def test_lines_fit_the_terminal(inside: Any, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, inside("keys", "train.schedule").out.splitlines())) <= columns
