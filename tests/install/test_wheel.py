"""The wheel, installed into an empty environment and used outside of the checkout."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from redline.hardware.facts import EXTRAS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "redline"

UNDECLARED = {  # modules that redline imports without declaring their packages
    "IPython": "a notebook has it; elsewhere nothing is shown",
    "pandas": "Events.to_pandas names it if it is missing",
    "pydantic_core": "pydantic requires it",
    "triton": "CUDA builds of torch require it; without it plain torch computes",
}

# Runs every `--help` in one process: the app has the verbs, and `run` is what the `redline` command calls.
EVERY_HELP = """
import contextlib, io, json, sys
from redline.cli.main import app, run
from typer.main import get_command

def verbs(command, words):
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs(inner, [*words, name])

pages = {}
for words in verbs(get_command(app), []):
    sys.argv = ["redline", *words, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run()
    pages[" ".join(words)] = [code, out.getvalue()]
print(json.dumps(pages))
"""

LIVE_PAGE = """
import json, sys
from pathlib import Path
from redline.runs.live.server import _PAGE, App
from redline.play.app import PlayApp
from redline.runs.live.watch import Watch
from werkzeug.test import Client

play = Client(PlayApp([]))
assert all(play.get(url, headers={"Host": "localhost"}).status_code == 200 for url in ("/", "/play.js", "/style.css"))
client = Client(App(Watch(Path(sys.argv[1]))))
answers = {url: client.get(url, headers={"Host": "localhost"}) for url in (*_PAGE, "/api/state")}
print(json.dumps({url: [answer.status_code, len(answer.data)] for url, answer in answers.items()}))
"""


@pytest.fixture(scope="module")
def home(installed: Any, tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which quickstart was trained for five steps, as runs/five."""
    folder = tmp_path_factory.mktemp("home")
    done = installed.redline("train", "quickstart", *tiny, "train.steps=5", "--run", "runs/five", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "src/redline"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("git lists the files of the package, and this is no git checkout")
    package = {name.removeprefix("src/") for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    assert {Path(name).suffix for name in package} >= {".py", ".yaml", ".html", ".js", ".css", ".svg", ".j2", ".json"}
    held = files_of(wheel)
    assert {name for name in held if ".dist-info/" not in name} == package
    assert {name.partition("/")[2] for name in held if ".dist-info/" in name} == {
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE",
    }  # fmt: skip


def test_the_package_is_the_one_of_the_wheel(installed: Any, tmp_path: Path) -> None:
    done = installed.python("import redline; print(redline.__file__)", cwd=tmp_path)
    assert Path(done.stdout.strip()).is_relative_to(installed.folder), done.stderr


def test_quickstart_trains_and_reports(home: Path) -> None:
    run = home / "runs/five"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["type"] == "step"] == [1, 2, 3, 4, 5]
    assert events[-1]["type"] == "stop"
    assert (run / "checkpoints/step-00000005/manifest.json").is_file()
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "font-family" in page, "the style sheet is part of the page"


def test_several_runs_are_compared_and_listed(installed: Any, home: Path) -> None:
    done = installed.redline("report", "five", "runs/five", "--out", "both.html", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "<svg" in (home / "both.html").read_text(encoding="utf-8")
    assert "five" in installed.redline("runs", cwd=home).stdout
    assert "5 steps" in installed.redline("watch", "five", "--once", cwd=home).stdout


def test_the_live_page_has_its_files(installed: Any, home: Path) -> None:
    done = installed.python(LIVE_PAGE, str(home / "runs"), cwd=home)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert len(answers) >= 10
    assert {url: answer for url, answer in answers.items() if answer[0] != 200 or answer[1] < 20} == {}


def test_every_help_is_printed(installed: Any, tmp_path: Path) -> None:
    done = installed.python(EVERY_HELP, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pages = json.loads(done.stdout)
    assert pages.keys() >= {"", "train", "plan", "doctor", "runs prune", "bench startup"}
    assert [words for words, (code, page) in pages.items() if code != 0 or "Usage: redline" not in page] == []


def test_recipes_and_a_plan(installed: Any, tmp_path: Path) -> None:
    rows = json.loads(installed.redline("recipes", "--json", cwd=tmp_path).stdout)
    assert {row["name"] for row in rows} == {path.stem for path in (PACKAGE / "recipes").glob("*.yaml")}
    done = installed.redline("plan", "pretrain-350m", "--gpu", "h100", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["gpu"] == "h100", done.stderr
    done = installed.redline("launch", "pretrain-350m", cwd=tmp_path)
    assert done.stdout.startswith("#!"), done.stderr


def test_the_doctor_names_the_missing_extras_and_their_recipes(installed: Any, tmp_path: Path) -> None:
    done = installed.redline("doctor", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    extras = {extra["name"]: extra for extra in report["extras"]}
    assert extras.keys() == EXTRAS.keys()
    finetune = extras["finetune"]
    assert "transformers" in finetune["missing"]
    assert "lora-8b" in finetune["recipes"]
    assert "quickstart" not in finetune["recipes"]
    assert finetune["fix"] == "`pip install 'redline[finetune]'`"
    assert (installed.folder / "bin/redline").is_file()


def test_a_recipe_that_needs_an_extra_says_so(installed: Any, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    done = installed.redline("train", "quickstart", "data.source=a.parquet", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "reading Parquet needs the pyarrow package. Install it: `pip install 'redline[data]'`" in done.stderr


def test_every_package_that_is_imported_is_declared() -> None:
    """A module that only a test environment happens to have would be missing on a user's machine."""
    imported: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                imported.add(node.module.partition(".")[0])
    imported -= {*sys.stdlib_module_names, "redline"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in EXTRAS)]
    declared = {canonicalize_name(Requirement(line).name) for lines in lists for line in lines}
    packages = metadata.packages_distributions()
    missing = {name for name in imported if canonicalize_name(packages.get(name, [name])[0]) not in declared}
    assert missing == {*UNDECLARED}


def test_make_wheel_is_what_the_workflow_builds() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^wheel: tools ## .*\n\t@.venv/bin/python -m hatchling build", makefile, re.MULTILINE)
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert "make wheel" in [step.get("run") for step in jobs["wheel"]["steps"]]


def test_the_extras_are_those_of_the_wheel(installed: Any) -> None:
    (own,) = installed.site_packages.glob("redline-*.dist-info")
    provided = metadata.Distribution.at(own).metadata.get_all("Provides-Extra") or []
    assert {*EXTRAS} <= {*provided}
