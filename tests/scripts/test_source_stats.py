"""scripts/source_stats.py measures a package as its docstring says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/source_stats.py"
FILES = {
    "__init__.py": "",
    "one.py": "# a comment\nimport json\n\n\ndef first():\n    return json\n",
    "two.py": "from redline import one\nfrom redline.sub.one import (\n    second,\n)\n",
    "sub/__init__.py": "",
    "sub/one.py": "def second():\n    # another\n    x = 1\n    return x\n" + "\n" * 60,
    "sub/three.py": "import redline.one\n",
}


def measured(*arguments: str | Path) -> dict[str, list[str]]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {name: values for name, *values in cells}


def test_a_small_package(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "src/redline" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    table = measured(tmp_path, tmp_path, "--static")
    assert table.pop("measure") == [str(tmp_path)] * 2
    table.pop("---")
    assert {name: int(values[0]) for name, values in table.items()} == {
        "files": 6,
        "code lines": 75,
        "functions": 2,
        "median function, lines": 3,
        "single-importer modules": 1,  # sub/one.py; one.py has two importers, two.py and sub/three.py none
        "comment lines": 2,
        "import lines": 6,
        "files under 60 lines": 5,
        "repeated base names": 1,
    }


@pytest.mark.soak
def test_a_batch_passes_the_loader_the_step_and_the_report() -> None:
    lines = subprocess.run(
        [sys.executable, str(SCRIPT), str(ROOT), "--files"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    files = {line.strip() for line in lines if not line.startswith(("|", "On"))}
    assert {"data/loader.py", "jobs/causal_lm/objective.py", "training/step.py", "runs/events.py"} <= files
    assert not any(name.startswith(("cli/", "planning/", "hardware/", "launch/")) for name in files)
