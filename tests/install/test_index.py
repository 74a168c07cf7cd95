"""Installations from a package index, which take a minute or more: by `uv tool install` and by pip."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]  # a plain torch would bring gigabytes of CUDA packages
EXTRAS = ("data", "finetune", "fp8", "low-bit", "wandb")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def call(*command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        command, cwd=cwd, env={**own, **variables}, capture_output=True, text=True, timeout=800, check=False
    )


def installed(*command: str, cwd: Path, **variables: str) -> None:
    """Run an installer. Skip the test if it cannot reach a package index; fail for any other reason."""
    done = call(*command, cwd=cwd, **variables)
    output = done.stdout + done.stderr
    unreachable = ("Failed to fetch", "Temporary failure", "Network is unreachable", "NewConnectionError", "dns error")
    if done.returncode and any(words in output for words in unreachable):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, output[-3000:]


def trains(program: Path, tiny: tuple[str, ...], home: Path) -> None:
    done = call(str(program), "train", "quickstart", *tiny, "train.steps=5", "--run", "run", cwd=home)
    assert done.returncode == 0, done.stderr
    assert (home / "run/report.html").is_file()


def test_uv_installs_the_wheel_as_a_tool(wheel: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    own = Path(sys.prefix, "bin/uv")
    uv = shutil.which("uv") or (str(own) if own.is_file() else None)
    if uv is None:
        pytest.skip("uv is not installed")
    asked = call(sys.executable, "-m", "pip", "config", "get", "global.find-links", cwd=tmp_path).stdout
    links = [f"--find-links={place}" for place in (os.environ.get("PIP_FIND_LINKS") or asked).split()]
    places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    command = (uv, "tool", "install", "--python", sys.executable, *CONSTRAINTS, *links, str(wheel))
    installed(*command, cwd=tmp_path, **places)
    program = tmp_path / "bin/redline"
    assert call(str(program), "recipes", cwd=tmp_path).stdout.count("\n") > 10
    report = json.loads(call(str(program), "doctor", "--json", cwd=tmp_path).stdout)
    fixes = {extra["name"]: extra["fix"] for extra in report["extras"]}
    prefix = tmp_path / "tools/redline"
    assert fixes["finetune"] == f"`uv pip install --python {prefix} 'redline[finetune]'`"
    fix = (uv, "pip", "install", "--dry-run", "--python", str(prefix), *CONSTRAINTS, *links, "redline[finetune]")
    done = call(*fix, cwd=tmp_path)
    assert "transformers==" in done.stderr, done.stderr
    trains(program, tiny, tmp_path)


def test_pip_installs_the_checkout_and_every_extra_resolves(tiny: tuple[str, ...], tmp_path: Path) -> None:
    """The copy of the checkout is deleted after the installation: nothing may need it later."""
    folder, copy = tmp_path / "venv", tmp_path / "checkout"
    tracked = call("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).stdout.splitlines()
    if not tracked:
        pytest.skip("git lists the files of the checkout, and this is none")
    for name in (name for name in tracked if (ROOT / name).is_file()):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    venv.create(folder, with_pip=True, symlinks=True)
    pip = (str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", *CONSTRAINTS)
    report = tmp_path / "report.json"
    wanted = f".[{','.join(EXTRAS)}]"
    installed(*pip, "--dry-run", "--quiet", "--report", str(report), wanted, cwd=copy)
    found: dict[str, Any] = {
        item["metadata"]["name"].lower(): item["metadata"]["version"]
        for item in json.loads(report.read_text())["install"]
    }
    assert {"redline", "torch", "transformers", "bitsandbytes", "torchao", "datasets", "wandb"} <= found.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*project["optional-dependencies"]} - {"dev"} == {*EXTRAS}
    installed(*pip, "--quiet", ".", cwd=copy)
    shutil.rmtree(copy)
    trains(folder / "bin/redline", tiny, tmp_path)
