"""Tutorials and troubleshooting name recipe keys that exist, and messages that redline prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from redline.jobs.base import JOBS, options_of
from redline.recipe.load import known_keys
from redline.recipe.schema import Recipe

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("tutorial-*.md")), ROOT / "docs/troubleshooting.md"]
KEYS = {*known_keys(Recipe)} | {f"{job}.{key}" for job in JOBS for key in known_keys(options_of(job))}
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key}
SHORTEST = 12  # letters of a sentence that tell it from others


def spans(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def keys_in(text: str) -> list[str]:
    words = re.findall(r"(?<![\w./-])([a-z_]+\.[a-z_.]+)(?=[=\s]|$)", text)
    return [word for word in words if word.split(".")[0] in SECTIONS]


def printed() -> str:
    """Return every string of the source, one per line; implicitly concatenated strings are joined."""
    found = []
    for path in [*(ROOT / "src").rglob("*.py"), ROOT / "scripts/setup.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def fragments(sentence: str) -> list[str]:
    """Return the parts of a message that do not depend on the run."""
    sentence = sentence.removeprefix("warning  ")
    parts = re.split(r"\. |[\d.,]*\d[\d.,]*\w*|…|→|[(){}'\"]|\b(?:rtx4090|GiB|train\.lr)\b", sentence)
    return [part.strip(" :;,%=") for part in parts if len(part.strip(" :;,%=")) >= SHORTEST]


SENTENCES = [
    cell
    for line in (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
    for cell in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    if " " in cell and fragments(cell)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_is_one(page: Path) -> None:
    assert [key for span in spans(page) for key in keys_in(span) if key not in KEYS] == []


@pytest.fixture(scope="module")
def source() -> str:
    return printed()


@pytest.mark.parametrize("sentence", SENTENCES)
def test_redline_says_so(sentence: str, source: str) -> None:
    assert [part for part in fragments(sentence) if part not in source] == []


def test_other_words_would_be_noticed(source: str) -> None:
    assert len(SENTENCES) >= 10
    assert fragments("the data changed since that run began.")[0] not in source
    assert keys_in("redline train train.lrr=1e-3 data.source=x") == ["train.lrr", "data.source"]
    assert "train.lrr" not in KEYS
