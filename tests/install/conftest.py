"""A wheel of this checkout, and environments that hold the wheel and only the packages that it requires."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment, outside of the checkout, into which the wheel is installed."""

    folder: Path

    @property
    def site_packages(self) -> Path:
        return next((self.folder / "lib").glob("python3*/site-packages"))

    def redline(self, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the `redline` command that the wheel installed."""
        return self._run([str(self.folder / "bin/redline"), *words], cwd, variables)

    def python(self, program: str, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return self._run([str(self.folder / "bin/python"), "-c", program, *words], cwd, variables)

    def _run(self, command: list[str], cwd: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment = {**own, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **variables}
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as `make wheel` does."""
    pytest.importorskip("hatchling", reason="hatchling builds the wheel; `make tools` installs it")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("redline-*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the wheel and its requirements, without any extra."""
    return make_environment(tmp_path_factory.mktemp("installed"), wheel)


@pytest.fixture(scope="session")
def without_torch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the wheel and its requirements, except torch and what only torch requires."""
    return make_environment(tmp_path_factory.mktemp("without-torch"), wheel, without=("torch",))


def make_environment(folder: Path, wheel: Path, without: Iterable[str] = ()) -> Environment:
    """Make a virtual environment, install the wheel into it, and link the packages that the wheel requires.

    The links point to the packages of the environment that runs the tests. A package that redline uses but does not
    require is missing here, as it is on a user's machine.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    environment = Environment(folder)
    done = subprocess.run(install_command(environment, wheel), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (own,) = environment.site_packages.glob("redline-*.dist-info")
    for name in required_packages(metadata.Distribution.at(own), {canonicalize_name(name) for name in without}):
        link_package(name, environment.site_packages)
    return environment


def install_command(environment: Environment, wheel: Path) -> list[str]:
    """Return the command that installs the wheel alone, by uv or by pip: `make setup` may have installed only one."""
    python, own_uv = str(environment.folder / "bin/python"), Path(sys.prefix, "bin/uv")
    if uv := shutil.which("uv") or (str(own_uv) if own_uv.is_file() else None):
        return [uv, "pip", "install", "--offline", "--no-deps", "--quiet", "--python", python, str(wheel)]
    pytest.importorskip("pip", reason="there is neither uv nor pip to install the wheel with")
    return [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", str(wheel)]


def required_packages(distribution: metadata.Distribution, without: set[str]) -> set[str]:
    """Return the packages that a distribution requires on this machine, directly or through others."""
    found: set[str] = set()
    pending = [(distribution, "")]
    while pending:
        parent, extras = pending.pop()
        for line in parent.requires or []:
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            wanted = any(
                requirement.marker is None or requirement.marker.evaluate({"extra": extra})
                for extra in ("", *extras.split())
            )
            if not wanted or name in without or name in found:
                continue
            found.add(name)
            pending.append((metadata.distribution(name), " ".join(requirement.extras)))
    return found


def link_package(name: str, site_packages: Path) -> None:
    """Link the top-level files and folders of an installed package into another environment."""
    distribution = metadata.distribution(name)
    if distribution.files is None:
        pytest.skip(f"{name} was installed without a list of its files")
    for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
        link = site_packages / top
        if not link.is_symlink() and not top.endswith(".pth"):
            link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
