"""Planning and reading runs, in an environment that has no torch."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import redline

ROOT = Path(__file__).parents[2]

LIBRARY = """
import importlib.util, json, sys
assert importlib.util.find_spec("torch") is None
import redline
plan = redline.plan("pretrain-350m", gpu="h100")
run = redline.open_run(sys.argv[1])
figures = {"micro": plan.batch.micro, "step": run.metrics["step"], "loss": run.metrics["loss"], "status": run.status}
print(json.dumps({**figures, "report": str(run.report("page.html")), "steps": run.recipe.train.steps}))
for call in (redline.train, run.evaluate, run.sample, run.model, lambda: run.export("out")):
    try:
        call()
    except redline.UserError as error:
        assert "torch is not installed" in str(error) and "pip install 'torch>=" in str(error), error
    else:
        raise AssertionError(call)
"""


def test_the_page_lists_every_requirement_but_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ pip install (numpy .*)$", page, re.MULTILINE)
    assert {*command.split(), "torch"} == {Requirement(line).name for line in project["dependencies"]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tiny: tuple[str, ...]) -> Path:
    """Return a run that was trained where torch is installed."""
    path = tmp_path_factory.mktemp("trained") / "run"
    redline.train("quickstart", *tiny, "train.steps=3", f"data.source={corpus}", run=path, show=False)
    return path


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """Return a folder with the run, as runs/three."""
    shutil.copytree(finished, tmp_path / "runs/three")
    return tmp_path


def test_the_library_plans_and_reads_runs(without_torch: Any, copied: Path) -> None:
    done = without_torch.python(LIBRARY, "three", cwd=copied)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    trained = redline.Run(copied / "runs/three").metrics
    assert answer["loss"] == trained["loss"]
    assert (answer["step"], answer["steps"], answer["status"], answer["micro"]) == (3, 3, "finished", 64)
    assert "<svg" in (copied / answer["report"]).read_text(encoding="utf-8")
    assert not (copied / "out").exists()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("--help", "redline train quickstart"),
        ("recipes", "pretrain-350m"),
        ("plan pretrain-350m --gpu h100", "350.4M parameters"),
        ("plan quickstart train.device=cpu", "numpy measured this CPU"),
        ("runs", "three"),
        ("report three --out page.html", "page.html"),
        ("launch pretrain-350m", "#SBATCH"),
    ],
)
def test_these_commands_need_no_torch(without_torch: Any, copied: Path, command: str, says: str) -> None:
    done = without_torch.redline(*command.split(), cwd=copied, REDLINE_CACHE=str(copied / "cache"))
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


@pytest.mark.parametrize(
    "command", ["train", "train --gpus 2", "train --resume three", "train quickstart --sweep train.lr=1e-3,2e-3",
                "eval three", "sample three", "export three --out out", "plan quickstart --probe", "profile quickstart"]
)  # fmt: skip
def test_these_commands_name_torch_and_how_to_install_it(without_torch: Any, copied: Path, command: str) -> None:
    done = without_torch.redline(*command.split(), cwd=copied)
    assert done.returncode == 1
    assert done.stderr.startswith("redline: torch is not installed.")
    assert done.stderr.endswith("Install it: `pip install 'torch>=2.11,<2.14'`.\n")
    assert sorted(path.name for path in copied.iterdir()) == ["runs"]
    assert sorted(path.name for path in (copied / "runs").iterdir()) == ["three"]
