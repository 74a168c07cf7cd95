"""Help is fast and complete."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from redline.cli.main import app

VERBS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def best_of(count: int, command: Callable[[], Any]) -> float:
    """Return CPU seconds of the command, which do not depend on other load of the machine."""

    def spent() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    times = []
    for _ in range(count):
        begin = spent()
        command()
        times.append(spent() - begin)
    return min(times)


def slowness() -> float:
    """Return how slow this machine is, relative to the one of the limits below, where these imports take 0.14 s."""
    libraries = [sys.executable, "-c", "import pydantic, rich.console, typer"]
    return max(1.0, best_of(5, lambda: subprocess.run(libraries, check=True)) / 0.14)


def test_help_takes_at_most_300_ms(redline: Any, tmp_path: Path) -> None:
    assert "train" in redline("--help", cwd=tmp_path).out
    assert best_of(5, lambda: redline("--help", cwd=tmp_path)) <= 0.3 * slowness()


def test_help_imports_nothing_heavy() -> None:
    """Loading a recipe and reading runs do not import torch either, which alone takes seconds."""
    modules = (
        "redline.cli.main, redline.launch.start, redline.recipe.load, redline.recipe.resolve, redline.runs.summary"
    )
    program = (
        f"import sys, {modules}; print(*{{'torch', 'matplotlib', 'tokenizers', 'transformers'}} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_two_examples(verb: str, inside: Any) -> None:
    answer = inside(verb, "--help")
    assert answer.code == 0
    examples = [line for line in answer.out.partition("Examples:")[2].splitlines() if f"redline {verb}" in line]
    assert len(examples) >= 2


def test_the_version(inside: Any) -> None:
    from redline import __version__

    assert inside("--version").out == f"redline {__version__}\n"


def test_help_shows_the_verbs(inside: Any) -> None:
    answer = inside("--help")
    assert answer.code == 0
    assert all(verb in answer.out for verb in VERBS)


def test_recipes(inside: Any) -> None:
    import json

    rows = json.loads(inside("recipes", "--json").out)
    assert {"quickstart", "pretrain-350m"} <= {row["name"] for row in rows}
    text = inside("recipes").out
    assert all(row["description"] in text for row in rows)


def test_a_bad_recipe_is_answered_at_once(redline: Any, tmp_path: Path) -> None:
    words = ("train", "pretrain-350m", "train.stepz=3", "train.lr=abc", "--run", "out")
    answer = redline(*words, cwd=tmp_path)
    assert answer.code == 2
    assert "Did you mean 'train.steps'?" in answer.message
    assert "train.lr" in answer.message
    assert list(tmp_path.iterdir()) == []
    assert best_of(3, lambda: redline(*words, cwd=tmp_path)) <= 0.6 * slowness()


def test_the_doctor_needs_no_optional_packages() -> None:
    """The doctor reports missing packages, so the command line may import nothing heavier than typer and rich."""
    program = "import sys; sys.modules['pydantic'] = sys.modules['torch'] = sys.modules['numpy'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}from redline.cli.main import app; import redline.cli.doctor"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
