"""No code knows a job by its name, so that adding one changes no other module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from redline.jobs.base import JOBS

PACKAGE = Path(__file__).parents[2] / "src/redline"
ALLOWED = {
    "jobs/base.py": "the registry",
    "recipe/schema.py": "the default of `objective`, and the help of keys",
    "recipe/load.py": "the default of `objective`",
    "recipe/aliases.py": "aliases of keys",
    "hardware/facts.py": "the names of extras in pyproject.toml",
    "launch/extras.py": "the names of extras in pyproject.toml",
    "models/pretrained.py": "the extra that installs transformers and gguf",
    "data/chat_template.py": "the extra that installs transformers, and the key of the template in errors",
    "cli/suggestions.py": "commands of other tools that users type",
    "cli/bench.py": "comparisons that were moved to benchmarks/, some of them named like a job",
}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if not re.match(r"jobs/\w+/", str(path.relative_to(PACKAGE)))]
NAME = re.compile(rf"\b({'|'.join(JOBS)})\b")


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Find job names in strings, attributes and variables; docstrings and comments may explain with an example."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = node.value
        elif isinstance(node, ast.Attribute):
            text = node.attr
        else:
            continue
        if found := NAME.search(text):
            yield node.lineno, found[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_code_outside_of_a_job_names_it(path: Path) -> None:
    if str(path.relative_to(PACKAGE)) not in ALLOWED:
        assert list(names_in(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line", ["x = 'finetune'", "recipe.latent_prefix", "f'set finetune.learn={x}'", "['causal_lm']"]
)
def test_a_name_is_found(line: str) -> None:
    assert list(names_in(line))


def test_jobs_and_objectives_are_not_asked_what_they_have() -> None:
    """They have a type; `hasattr` would hide a method that a job forgot."""
    probing = re.compile(r"\b(hasattr|getattr)\((\w*job\w*|objective|runtime|\w+\.objective|data), \"")
    found = [str(path) for path in PACKAGE.rglob("*.py") if probing.search(path.read_text(encoding="utf-8"))]
    assert found == []
