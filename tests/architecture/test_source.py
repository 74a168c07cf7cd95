"""What the source of every module must have, and the names that must stay free for the public API."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import redline
from redline.recipe.load import known_keys
from redline.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/redline"
# What `redline.NAME` is for users. `import redline.plan.flops` would replace a function `plan` by a module.
PUBLIC_API = {"Recipe", "plan", "prepare", "train", "open_run", "register_job"}


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` as written; "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def test_every_recipe_key_is_read_somewhere() -> None:
    """A key that nothing reads would have no effect. Reading is `.name`, or the text of its name."""
    readers = [path for path in PACKAGE.rglob("*.py") if path.name not in ("schema.py", "aliases.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in readers]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words = {key: key.rpartition(".")[2] for key in known_keys(Recipe)}
    assert [key for key, word in words.items() if word not in attributes | texts] == []


def test_no_file_names_a_developers_machine() -> None:
    files = [path for folder in ("src", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    pattern = re.compile(r"/root/|/home/\w+/")
    assert [str(path) for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []


def test_no_module_takes_the_name_of_a_public_function() -> None:
    assert not PUBLIC_API & {module.name for module in pkgutil.iter_modules(redline.__path__)}


def test_importing_every_module_leaves_the_public_names_free() -> None:
    for module in pkgutil.walk_packages(redline.__path__, "redline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert [name for name in PUBLIC_API if isinstance(getattr(redline, name, None), ModuleType)] == []


# --- the conventions that are written down more than once


def test_pre_commit_uses_the_pinned_ruff() -> None:
    pins = re.findall(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["rev"] for hook in hooks if hook["repo"].endswith("/ruff-pre-commit")] == [f"v{pins[0]}"]


def test_continuous_integration_runs_what_contributors_run() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert commands["test"] == [".ci/run"]
    assert "make wheel" in commands["wheel"]
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("exec make test")


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_map_names_files_that_exist(page: str) -> None:
    """`data/loader.py` is below src/redline; `tests/data` and `scripts/docs.py` are below the root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    names = [name for name in re.findall(r"(?:[a-z_]+/)+[\w.-]+\.(?:py|js|json)\b", text) if "NAME" not in name]
    assert len(names) > 10
    assert [name for name in names if not ((PACKAGE / name).exists() or (ROOT / name).exists())] == []


def test_each_decision_begins_with_one_sentence_which_the_index_repeats() -> None:
    folder = ROOT / "docs/decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    for page in sorted(folder.glob("0*.md")):
        paragraphs = page.read_text(encoding="utf-8").split("\n\n")
        assert paragraphs[0].startswith(f"# {page.name[:4]}: ")
        decision = " ".join(paragraphs[1].split())
        assert decision.startswith("**Decision.** "), page.name
        assert f"[{page.name[:4]}]({page.name}) | {decision.removeprefix('**Decision.** ')} |" in index, page.name
