"""What no line of the project may do, and what every file must have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from redline.recipe.load import known_keys
from redline.recipe.schema import Recipe

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/redline"
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
YAML_LOADER = PACKAGE / "recipe/load.py"
UNSAFE_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}


def dotted(node: ast.expr) -> str:
    """`a.b.c` as written; what is no such chain is empty."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{name.name}" for name in node.names)


def forbidden_call(call: ast.Call) -> str | None:
    name = dotted(call.func)
    options = {word.arg: word.value for word in call.keywords}
    if name in ("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec"):
        return f"{name}()"
    if name in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"):
        return f"{name}()"
    if name in ("torch.load", "joblib.load"):
        return f"{name}()"
    if name.startswith("yaml.") and name.split(".")[1] in ("load", "load_all", "unsafe_load", "full_load"):
        return f"{name}()"
    if name in ("np.load", "numpy.load") and "allow_pickle" in options:
        return f"{name}(allow_pickle=…)"
    for word in ("shell", "trust_remote_code"):
        value = options.get(word)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            return f"{name}({word}=…)"
    return None


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        names = list(imported(node))
        found += [f"line {node.lineno}: import {n}" for n in names if n.split(".")[0] in UNSAFE_MODULES]  # type: ignore[attr-defined]
        found += [f"line {node.lineno}: import {n}" for n in names if n in ("torch.load", "os.system", "os.popen")]  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and (what := forbidden_call(node)):
            found.append(f"line {node.lineno}: {what}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_a_file_holds(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    found = offences(source)
    if path == YAML_LOADER:  # the one place that loads YAML, with a loader that is safe by inheritance
        assert "class _Loader(yaml.SafeLoader)" in source
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        loads = [call for call in calls if dotted(call.func) == "yaml.load"]
        assert [[(w.arg, dotted(w.value)) for w in call.keywords] for call in loads] == [[("Loader", "_Loader")]]
        found = [line for line in found if not line.endswith("yaml.load()")]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import shelve as s",
        "from marshal import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "from torch import load",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "eval('1')",
        "exec(code)",
        "__import__(name)",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=flag)",
        "os.system('ls')",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_gate_itself_sees(line: str) -> None:
    assert offences(f"def f():\n    {line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "re.compile('a')",
        "torch.compile(f)",
        "self.load(x)",
        "subprocess.run(c, shell=False)",
        "json.load(f)",
    ],
)
def test_the_gate_lets_pass(line: str) -> None:
    assert offences(line) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_has_a_docstring(path: Path) -> None:
    if path.name not in ("__init__.py", "__main__.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_every_recipe_key_is_read_somewhere() -> None:
    """A key that nothing reads would be a dead option. Read is `.name`, or the name as a text."""
    readers = [path for path in PACKAGE.rglob("*.py") if path.name not in ("schema.py", "aliases.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in readers]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    words = {key: key.rpartition(".")[2] for key in known_keys(Recipe)}
    assert [key for key, word in words.items() if word not in attributes | texts] == []


def test_the_source_speaks_of_the_project_alone() -> None:
    """No path of a developer's machine, no note to oneself."""
    pattern = re.compile(r"/root/|/home/\w+/|\bTODO\b|\bFIXME\b|\bXXX\b")
    assert [str(path) for path in FILES if pattern.search(path.read_text(encoding="utf-8"))] == []
