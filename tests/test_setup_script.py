"""The decisions of scripts/setup.py: which torch to use, when nothing is to do, and advice about the driver."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = '[project]\ndependencies = ["torch>=2.11,<2.14", "torch-like>=1", "numpy>=2.0"]\n'
PYPROJECT += '[project.optional-dependencies]\ndev = ["pytest>=8"]\n'
SMI = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |"
GPUS = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0d1e)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-77aa)\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "constraints.txt").write_text("numpy==2.3.5\ntorch==2.13.0\n")
    return tmp_path


def interpreter(script: ModuleType, **about: object) -> object:
    seen = {"torch": "2.12.1+cu130", "cuda": "13.0", "sees_gpu": True, "prefix": "/env", "base_prefix": "/usr"}
    return script.Interpreter(**{"path": "/env/bin/python", "version": (3, 12, 1), **seen, **about})


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.13.0", (2, 13, 0)),
        ("2.11.0+cu130", (2, 11, 0)),
        ("2.12.0a0+gitabc.nv26.1", (2, 12, 0)),
        ("12.4", (12, 4)),
        ("unknown", ()),
    ],
)
def test_versions_are_compared_as_numbers(script: ModuleType, text: str, version: tuple[int, ...]) -> None:
    assert script.parse_version(text) == version


@pytest.mark.parametrize("torch", ["2.11.0+cu130", "2.13.0", "2.12.0a0+nv26.1"])
def test_a_torch_that_sees_the_gpu_is_kept(script: ModuleType, torch: str) -> None:
    python = interpreter(script, torch=torch)
    assert script.reusable([python], PYPROJECT) is python


@pytest.mark.parametrize(
    "about",
    [
        {"torch": None, "cuda": None, "sees_gpu": False},
        {"torch": "2.9.1"},  # as text it would be the newer one
        {"torch": "2.14.0"},
        {"sees_gpu": False},
        {"cuda": None},  # a ROCm build says that it sees a GPU, too
        {"version": (3, 10, 13)},
    ],
)
def test_a_torch_that_does_not_fit_is_not_kept(script: ModuleType, about: dict[str, object]) -> None:
    assert script.reusable([interpreter(script, **about)], PYPROJECT) is None


def test_the_first_fitting_interpreter_wins(script: ModuleType) -> None:
    blind, good, later = (interpreter(script, sees_gpu=sees) for sees in (False, True, True))
    assert script.reusable([blind, good, later], PYPROJECT) is good


def test_the_range_comes_from_the_real_pyproject_and_the_pin_is_in_it(script: ModuleType) -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = interpreter(script, torch=pins["torch"])
    assert script.reusable([pinned], (ROOT / "pyproject.toml").read_text()) is pinned


def test_pinned_torch_is_installed_with_the_project(script: ModuleType) -> None:
    steps = script.install_steps(PYPROJECT, extras=frozenset({"dev", "data"}), reuse=None, constraints=Path("c.txt"))
    assert steps == [["-c", "c.txt", "-e", ".[data,dev]"]]


@pytest.mark.parametrize(("extras", "tools"), [(set(), []), ({"dev"}, ["pytest>=8"])])
def test_a_kept_torch_is_never_asked_for(script: ModuleType, extras: set[str], tools: list[str]) -> None:
    kept, chosen = interpreter(script), frozenset(extras)
    steps = script.install_steps(PYPROJECT, extras=chosen, reuse=kept, constraints=Path("c.txt"))
    assert steps == [["-c", "c.txt", "torch-like>=1", "numpy>=2.0", *tools], ["--no-deps", "-e", "."]]


def test_triton_is_added_only_for_tests_and_only_where_torch_brought_none(script: ModuleType, tmp_path: Path) -> None:
    def steps(*extras: str, kept: Any = None) -> Any:
        return script.interpreter_steps(frozenset(extras), kept, tmp_path)

    expected = [[script.TRITON]] if sys.platform == "linux" else []
    assert (steps(), steps("dev")) == ([], expected)
    assert steps("dev", kept=interpreter(script)) == []
    (tmp_path / "lib" / "python3.12" / "site-packages" / "triton-3.8.0.dist-info").mkdir(parents=True)
    assert steps("dev") == []


def test_a_kept_torch_is_what_the_constraints_say(script: ModuleType) -> None:
    assert script.pin_torch("numpy==2.3.5\ntorch==2.13.0\ntorchao==1\n", "2.12.0+cu130") == (
        "numpy==2.3.5\ntorch==2.12.0+cu130\ntorchao==1\n"
    )


@pytest.mark.parametrize(
    ("made", "requested", "ready"),
    [("", "", True), ("", "dev", False), ("dev", "", True), ("data dev", "dev", True), ("dev", "data dev", False)],
)
def test_a_set_up_with_more_serves_for_less(
    script: ModuleType, clone: Path, made: str, requested: str, ready: bool
) -> None:
    stamp = script.stamp_text(clone, frozenset(made.split()))
    assert script.stamped_extras(stamp) == set(made.split())
    assert script.is_ready(stamp, clone, frozenset(requested.split())) is ready


def test_no_stamp_is_not_ready(script: ModuleType, clone: Path) -> None:
    assert not script.is_ready("", clone, frozenset())


def test_an_unknown_extra_is_named(clone: Path) -> None:
    (clone / "scripts").mkdir()
    copy = Path(shutil.copy(ROOT / "scripts" / "setup.py", clone / "scripts"))
    done = subprocess.run([sys.executable, "-S", str(copy), "parquet"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "there is no extra 'parquet'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_file_makes_the_stamp_stale(script: ModuleType, clone: Path, name: str) -> None:
    stamp = script.stamp_text(clone, frozenset({"dev"}))
    (clone / name).write_text((clone / name).read_text() + "# changed\n")
    assert not script.is_ready(stamp, clone, frozenset())


def test_a_moved_clone_makes_the_stamp_stale(script: ModuleType, clone: Path) -> None:
    moved = clone / "elsewhere"
    moved.mkdir()
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(clone / name, moved)
    assert not script.is_ready(script.stamp_text(clone, frozenset({"dev"})), moved, frozenset())


def test_an_existing_venv_is_kept_only_if_it_is_of_the_right_kind(script: ModuleType) -> None:
    def config(system: str, where: str = "/clone/.venv", home: str = "/usr/bin") -> str:
        command = f"/usr/bin/python3 -m venv {where}"
        return f"home = {home}\ninclude-system-site-packages = {system}\ncommand = {command}\n"

    venv, kept = Path("/clone/.venv"), interpreter(script)
    assert script.venv_serves(config("false"), venv, None)
    assert script.venv_serves(config("true"), venv, kept)
    assert not script.venv_serves(config("true"), venv, None)
    assert not script.venv_serves(config("false"), venv, kept)
    assert not script.venv_serves(config("false", where="/old/.venv"), venv, None)
    assert not script.venv_serves(config("true", home="/conda/envs/other/bin"), venv, kept)


def test_nvidia_smi_is_read(script: ModuleType) -> None:
    assert script.parse_driver(SMI, GPUS) == script.Driver("NVIDIA H100 80GB HBM3", "550.54.15", "12.4")
    newer = "| NVIDIA-SMI 590.44    Driver Version: 590.44    CUDA UMD Version: 13.1 |"
    assert script.parse_driver(newer, GPUS).cuda == "13.1"


def test_an_old_driver_is_explained_with_both_ways_out(script: ModuleType) -> None:
    blind = interpreter(script, torch="2.13.0", cuda="13.0", sees_gpu=False)
    advice = script.gpu_advice(script.parse_driver(SMI, GPUS), blind)
    for part in ("550.54.15", "CUDA 12.4", "torch 2.13.0", "CUDA 13.0", "Update the NVIDIA driver", "=cu126", "CPU"):
        assert part in advice
    assert "cu126" not in script.gpu_advice(script.Driver("NVIDIA V100", "470.1", "11.4"), blind)


def test_a_cpu_build_beside_a_gpu_is_explained(script: ModuleType) -> None:
    cpu = interpreter(script, torch="2.13.0+cpu", cuda=None, sees_gpu=False)
    assert "torch 2.13.0+cpu is a CPU build" in script.gpu_advice(script.parse_driver(SMI, GPUS), cpu)


def test_a_driver_that_fits_but_shows_no_gpu_points_to_the_environment(script: ModuleType) -> None:
    blind = interpreter(script, cuda="12.8", sees_gpu=False)  # newer than 12.4, but of the same major version
    assert "CUDA_VISIBLE_DEVICES" in script.gpu_advice(script.parse_driver(SMI, GPUS), blind)


def test_a_failing_nvidia_smi_is_quoted(script: ModuleType) -> None:
    driver = script.Driver(trouble="Failed to initialize NVML: Driver/library version mismatch")
    advice = script.gpu_advice(driver, interpreter(script, sees_gpu=False))
    assert "Driver/library version mismatch" in advice
    assert "reboot" in advice


def test_nothing_is_said_when_nothing_is_wrong(script: ModuleType) -> None:
    driver, blind = script.parse_driver(SMI, GPUS), interpreter(script, sees_gpu=False)
    assert script.gpu_advice(driver, interpreter(script)) == ""
    assert script.gpu_advice(None, blind) == ""
    assert script.gpu_advice(script.parse_driver(SMI, "No devices found."), blind) == ""


def test_find_links_of_pip_are_passed_on(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "one two")
    assert script.find_links() == ["--find-links=one", "--find-links=two"]


def test_the_venv_being_made_is_not_an_active_environment(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(script.VENV))
    monkeypatch.setattr(sys, "executable", str(script.VENV_PYTHON))
    assert str(script.VENV_PYTHON) not in script.active_pythons()
    assert script.active_pythons()


def test_a_ready_clone_returns_without_touching_anything(clone: Path, script: ModuleType) -> None:
    (clone / "scripts").mkdir()
    copy = Path(shutil.copy(ROOT / "scripts" / "setup.py", clone / "scripts"))
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").write_text("")
    (clone / ".venv" / ".redline-stamp").write_text(script.stamp_text(clone.resolve(), frozenset({"dev"})))
    before = sorted(clone.rglob("*"))
    offline = {"PATH": "/usr/bin:/bin", "UV": "none", "PIP_NO_INDEX": "1"}  # for the day this test fails
    done = subprocess.run([sys.executable, "-S", str(copy)], capture_output=True, text=True, env=offline)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(clone.rglob("*")) == before
