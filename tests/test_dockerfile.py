"""The Dockerfile copies files that exist, and installs in the same way as a checkout."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from redline.cli.main import app

ROOT = Path(__file__).parents[1]
STEPS = [
    tuple(line.split(maxsplit=1))
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def of(kind: str) -> list[str]:
    return [words for name, words in STEPS if name == kind]


def copied() -> list[str]:
    return [source for step in of("COPY") for source in shlex.split(step)[:-1]]


def sent(path: str) -> bool:
    """Return whether .dockerignore lets a path through; the last matching line decides."""
    allowed = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(path, line.removeprefix("!")):
            allowed = line.startswith("!")
    return allowed


def test_only_known_steps_in_an_order_that_works() -> None:
    kinds = [kind for kind, _ in STEPS]
    assert set(kinds) <= {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENV", "ENTRYPOINT", "CMD"}
    assert kinds[0] == "FROM"
    assert kinds.index("COPY") < len(kinds) - 1 - kinds[::-1].index("RUN"), "setup runs on what was copied"


@pytest.mark.parametrize("source", copied())
def test_what_is_copied_is_there_and_is_sent(source: str) -> None:
    assert (ROOT / source).exists()
    assert sent(source)


def test_nothing_else_is_sent() -> None:
    assert {path.name for path in ROOT.iterdir() if sent(path.name)} == {*copied()}


def test_what_is_copied_is_enough_to_set_up(tmp_path: Path) -> None:
    """Run the script up to its first check; the rest downloads packages."""
    for source in copied():
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, tmp_path / source)
    wanted = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert (tmp_path / wanted["readme"]).is_file()
    script = [sys.executable, "-S", "scripts/setup.py", "no-such-extra"]
    errors = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True).stderr
    assert "there is no extra 'no-such-extra'" in errors


def test_its_commands_are_those_of_the_makefile_and_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    target = next(step for step in of("RUN") if step.startswith("make "))
    assert re.search(rf"^{target.split()[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    extras = next(step for step in of("ARG") if step.startswith("EXTRAS=")).split('"')[1].split()
    assert {*extras} <= {*project["optional-dependencies"]}
    (program,) = json.loads(of("ENTRYPOINT")[0])
    assert program in project["scripts"]
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    assert json.loads(of("CMD")[0])[0] in verbs


def test_its_python_is_one_that_is_tested() -> None:
    minor = int(re.match(r"python:3\.(\d+)", of("FROM")[0])[1])  # type: ignore[index]
    assert 11 <= minor <= 12
