"""The pages for users of other trainers name keys, options and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from redline.cli.main import app
from redline.errors import RecipeError
from redline.jobs.base import JOBS, options_of
from redline.recipe.load import known_keys, load
from redline.recipe.schema import Recipe

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("coming-from.md", "coming-from-pretraining.md")
VERBS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = {word for verb in VERBS.values() for option in verb.params for word in option.opts}
FOR_A_BASE = ("objective=finetune", "model.base=base", "model.size=null", "model.qk_norm=false", "data.tokenizer=base")
THINGS = {"RUN@best", "RUN@STEP", "bf16-true", "owt-bd3lm", "model.lora"}  # what is neither a key nor an option


def rows(page: str) -> list[tuple[str, str]]:
    """Return (other trainer's word, redline's word) of every row of the page's tables."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    assert all(len(row) == 2 for row in cells), "two columns each"
    return [(theirs, ours) for theirs, ours in cells if ours != "redline"]


def keys_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


OURS = sorted({word for page in PAGES for _, ours in rows(page) for word in keys_in(ours)} - THINGS)
KEYS = {*known_keys(Recipe)} | {f"{job}.{key}" for job in JOBS for key in known_keys(options_of(job))}


def check(word: str) -> None:
    if word.startswith("redline "):
        verb, *options = word.split()[1:]
        assert {option for option in options if option.startswith("--")} <= {
            name for option in VERBS[verb].params for name in option.opts
        }
    elif word.startswith("--"):
        assert word.split()[0] in OPTIONS
    else:
        key, given, _ = word.partition("=")
        assert key in KEYS
        if key == "objective":
            assert word.removeprefix("objective=") in JOBS
        elif given:
            load(
                "quickstart",
                [word, *FOR_A_BASE] if key.startswith(("finetune", "model.lora", "model.quant")) else [word],
            )


@pytest.mark.parametrize("word", OURS)
def test_what_a_table_names_is_there(word: str) -> None:
    check(word)


@pytest.mark.parametrize("page", PAGES)
def test_every_row_says_whose_it_is_and_what_becomes_of_it(page: str) -> None:
    assert len(rows(page)) > 40
    assert [row for row in rows(page) if not keys_in(row[0]) or not row[1]] == []


def test_what_is_not_there_would_be_noticed() -> None:
    for word in ("train.batch", "--colour", "redline export RUN --colour", "objective=rl"):
        with pytest.raises(AssertionError):
            check(word)
    with pytest.raises(RecipeError):
        check("train.schedule=poly")
