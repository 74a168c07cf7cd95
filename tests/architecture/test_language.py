"""No text of the repository falls back into phrases that had to be read twice."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# With a hyphen for each space, so that this file does not contain what it forbids.
PHRASES = [
    phrase.replace("-", " ")
    for phrase in (
        "the-last-look,-which",
        "who-was-asked-to-leave",
        "to-make-room,-none-looks",
        "be-there-none",
        "what-all-do-together-is-still-to-be-played",
        "alone-it-agrees-with-itself",
        "says-nothing-to-anyone",
        "away-with-it-as-far-as",
        "nobody's-home-is-known",
        "broke-off-without-a-word",
        "had-to-make-room",
        "by-so-many-gpus-of",
        "without-any,-processes",
        "there-is-something-already",
        "finished---hours",
        "after--step-628",
        "what-is-no-price",
    )
]


def texts() -> list[Path]:
    """Return the text files of the checkout, without what Git ignores where Git is there."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    folders = ("src", "docs", "tests", "scripts", "benchmarks", "examples")
    paths = [ROOT / name for name in listed.stdout.splitlines()] or [
        path for folder in folders for path in (ROOT / folder).rglob("*")
    ]
    kinds = {".py", ".md", ".toml", ".yaml", ".yml", ".js", ".css", ".html", ".j2", ".sh", ".ipynb", ".txt"}
    return [path for path in paths if path.suffix in kinds and path.is_file()]


def found(text: str) -> list[str]:
    line = re.sub(r"[\s#/]+", " ", text).lower()  # a phrase may be wrapped, also within a comment
    return [phrase for phrase in PHRASES if re.sub(r" +", " ", phrase) in line]


def test_no_text_has_one_of_the_phrases() -> None:
    paths = texts()
    assert len(paths) > 500
    assert {str(path.relative_to(ROOT)): hits for path in paths if (hits := found(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_would_be_found(phrase: str) -> None:
    assert found(f"# Some {phrase.upper()} here") == [phrase]
    words = phrase.split()
    assert found(" ".join(words[:2]) + "\n    # " + " ".join(words[2:])) == [phrase]
