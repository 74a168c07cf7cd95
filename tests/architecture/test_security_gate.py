"""No line runs code that a file or a stranger holds, and nothing is served to the network unless somebody asks for it.

Most of these rules are ruff's: `S` and `TID251` in pyproject.toml, which `make lint` applies. Each is shown here to
report what it is there for; what ruff has no rule for is checked on the syntax tree.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from test_source import ROOT, dotted

FILES = sorted(path for folder in ("src", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
YAML_LOADER = ROOT / "src/redline/recipe/load.py"

# --- ruff's rules


REPORTED_BY_RUFF = [
    "import pickle",
    "from pickle import loads",
    "import shelve as s",
    "from marshal import loads",
    "torch.load(path)",
    "torch.load(path, weights_only=True)",
    "load = torch.load",
    "from torch import load",
    "torch.hub.load('a/b', 'c')",
    "torch.jit.load(path)",
    "torch.serialization.add_safe_globals([A])",
    "pandas.read_pickle(path)",
    "yaml.load(text, Loader=yaml.Loader)",
    "yaml.load(text, Loader=yaml.UnsafeLoader)",
    "yaml.unsafe_load(text)",
    "from yaml import FullLoader",
    "eval('1')",
    "builtins.eval('1')",
    "exec(code)",
    "import runpy",
    "importlib.import_module(name)",
    "importlib.util.spec_from_file_location('a', path)",
    "subprocess.run(command, shell=True)",
    "subprocess.getoutput('ls')",
    "os.system('ls')",
    "os.popen('ls')",
    "from os import system",
    "from subprocess import getoutput",
    "tempfile.mktemp()",
    "from tempfile import mktemp",
    "tarfile.open(path).extractall(out)",
    "archive.extractall(out, filter='fully_trusted')",
    "shutil.unpack_archive(path)",
    "import zipfile",
    "socket.socket().bind(('0.0.0.0', 80))",
    "app.run(host='0.0.0.0')",
    "jinja2.Environment(loader=x)",
    "jinja2.Environment(autoescape=False)",
    "jinja2.Template(text)",
    "markupsafe.Markup(text)",
    "requests.get(url, verify=False)",
    "ssl._create_unverified_context()",
]
IMPORTS = (
    "import builtins, importlib, importlib.util, jinja2, markupsafe, os, pandas, requests, shutil, socket, ssl, "
    "subprocess, tarfile, tempfile, torch, yaml\n"
)
SECURITY_RULE = re.compile(r"S\d+|TID251")


@cache
def reported() -> dict[int, str]:
    """Return the security rule that ruff reports for each planted line, by its number, with the project's settings."""
    planted = IMPORTS + "\n".join(REPORTED_BY_RUFF) + "\n"
    # beside this interpreter, where the environment's programs are
    command = [str(Path(sys.executable).with_name("ruff")), "check", "--output-format=concise", "--no-cache"]
    command += ["--stdin-filename", "src/redline/planted.py", "-"]
    result = subprocess.run(command, cwd=ROOT, input=planted, capture_output=True, text=True, check=False)
    found = re.findall(r"planted\.py:(\d+):\d+: (\w+)", result.stdout)
    assert found, result.stderr
    return {int(line): rule for line, rule in found if SECURITY_RULE.fullmatch(rule)}


@pytest.mark.parametrize("line", REPORTED_BY_RUFF)
def test_ruff_reports(line: str) -> None:
    assert REPORTED_BY_RUFF.index(line) + 2 in reported()  # after the line of imports, counted from 1


def test_only_one_place_loads_yaml_with_a_loader_of_its_own() -> None:
    """It is excused from ruff's rule, because its loader derives from the safe one."""
    excused = [path for path in FILES if "noqa: S506" in path.read_text(encoding="utf-8")]
    assert excused == [YAML_LOADER]
    source = YAML_LOADER.read_text(encoding="utf-8")
    assert "class _Loader(yaml.SafeLoader)" in source
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if dotted(call.func) == "yaml.load"]
    assert [[(word.arg, dotted(word.value)) for word in call.keywords] for call in loads] == [[("Loader", "_Loader")]]


# --- what ruff has no rule for


Rule = Callable[[ast.AST], str | None]
PROCESSES = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_output", "check_call")}
ALL_INTERFACES = {"", "0.0.0.0", "::", "*"}
SERVERS = {
    *("HTTPServer", "ThreadingHTTPServer", "TCPServer", "ThreadingTCPServer"),
    *("create_server", "bind", "run_app", "run"),
}


def compiles_text(node: ast.AST) -> str | None:
    """Text compiled to code, or a module imported by a name that is a text."""
    if isinstance(node, ast.Call) and dotted(node.func) in ("compile", "__import__"):
        return f"{dotted(node.func)}()"
    return None


def allows_code(node: ast.AST) -> str | None:
    """An option that lets a file or a text run code, unless it is the constant False."""
    if isinstance(node, ast.Call):
        for word in node.keywords:
            allowed = not (isinstance(word.value, ast.Constant) and word.value.value is False)
            if word.arg in ("shell", "trust_remote_code", "allow_pickle") and allowed:
                return f"{dotted(node.func)}({word.arg}=…)"
    if isinstance(node, ast.Dict):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        values = [value.value for value in node.values if isinstance(value, ast.Constant)]
        return "trust_remote_code" if "trust_remote_code" in keys and True in values else None
    return None


def command_as_text(node: ast.AST) -> str | None:
    """A command that is one text: somebody would have to split it into words."""
    if isinstance(node, ast.Call) and node.args and dotted(node.func) in PROCESSES:
        command = node.args[0]
        text = isinstance(command, ast.Constant) and " " in str(command.value)
        return f"{dotted(node.func)} of a text" if text or isinstance(command, ast.JoinedStr | ast.BinOp) else None
    return None


def unfiltered_member(node: ast.AST) -> str | None:
    """A single member of an archive, extracted to wherever its path leads; of all of them, ruff knows."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "extract":
        filters = [word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)]
        return None if filters == ["data"] else "extract() without filter='data'"
    return None


def serves_all(node: ast.AST) -> str | None:
    """A server on all interfaces of this machine, however that is written; ruff knows only 0.0.0.0."""
    if not isinstance(node, ast.Call) or dotted(node.func).rpartition(".")[2] not in SERVERS:
        return None
    values = [*node.args, *(word.value for word in node.keywords if word.arg in ("host", "address", "server_address"))]
    first = [value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value for value in values]
    hosts = [value.value for value in first if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return f"{dotted(node.func)} on all interfaces" if ALL_INTERFACES.intersection(hosts) else None


RULES: tuple[Rule, ...] = (compiles_text, allows_code, command_as_text, unfiltered_member, serves_all)
PLANTED: dict[Rule, list[str]] = {
    compiles_text: ["compile(text, 'a', 'exec')", "__import__(name)"],
    allows_code: [
        "subprocess.run(command, shell=flag)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "options = {'trust_remote_code': True}",
    ],
    command_as_text: ["subprocess.run('ls -l')", "subprocess.Popen(f'cat {path}')", "subprocess.call('rm ' + path)"],
    unfiltered_member: ["archive.extract(name)", "archive.extract(name, filter='tar')"],
    serves_all: [
        "HTTPServer(('', 8000), Handler)",
        "http.server.ThreadingHTTPServer(('0.0.0.0', 80), Handler)",
        "app.run(host='*')",
        "socketserver.TCPServer(('::', 1), H)",
    ],
}


def violations(source: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(source)))
    return [f"line {getattr(node, 'lineno', 0)}: {what}" for node in nodes for rule in RULES if (what := rule(node))]


def test_no_file_breaks_a_rule_that_ruff_lacks() -> None:
    found = {str(path.relative_to(ROOT)): violations(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(("rule", "line"), [(rule, line) for rule, lines in PLANTED.items() for line in lines])
def test_each_rule_reports_what_it_is_there_for(rule: Rule, line: str) -> None:
    assert any(rule(node) for node in ast.walk(ast.parse(line)))


def test_each_rule_has_a_planted_line() -> None:
    assert set(PLANTED) == set(RULES)


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run(['ls', '-l'], check=True)",
        "subprocess.run(command, shell=False)",
        "subprocess.Popen(command)",
        "archive.extract(name, filter='data')",
        "HTTPServer(('127.0.0.1', 0), Handler)",
        "trainer.run()",
        "model.eval()",
        "re.compile('a')",
        "torch.compile(f)",
    ],
)
def test_harmless_lines_pass(line: str) -> None:
    assert violations(line) == []


# --- `assert` states what our own code guarantees: `python -O` removes it, and it shows users a traceback


READERS = [
    *(ROOT / "src/redline/data").rglob("*.py"),
    *(ROOT / "src/redline/recipe").glob("lo*.py"),
    *(ROOT / "src/redline/runs").rglob("*.py"),
    *((ROOT / "src/redline/models" / f"{name}.py") for name in ("families", "pretrained")),
    ROOT / "src/redline/evaluate/opened_run.py",
]
NOT_FROM_A_FILE = {
    "self._file.tell() == self._begin": "a header that was just written",
    "not parameters": "the decoder's own names against its own",
}


def asserted(source: str) -> Iterator[str]:
    """Yield what asserts check, except those that only tell the type checker what is known."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
            if not all(_narrows_a_type(part) for part in parts):
                yield ast.unparse(node.test)


def _narrows_a_type(test: ast.expr) -> bool:
    if isinstance(test, ast.Call):
        return dotted(test.func) == "isinstance"
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)


def test_no_assert_checks_what_was_read_from_a_file() -> None:
    found = {path.name: list(asserted(path.read_text(encoding="utf-8"))) for path in READERS}
    assert [test for tests in found.values() for test in tests if test not in NOT_FROM_A_FILE] == []


def test_the_rule_about_asserts_can_fail() -> None:
    assert list(asserted("assert header['size'] < 10\nassert x is not None and isinstance(y, int)\nassert kind"))
    assert not list(asserted("assert x is not None\nassert isinstance(y, int)"))


# --- what is installed, and what a page shows


def test_versions_are_pinned() -> None:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert [line for line in pins if not re.match(r"[\w.\-\[\]]+==[\w.+!]+(\s*;.*)?(\s*#.*)?$", line)] == []


@pytest.mark.parametrize("name", ["report.html.j2", "comparison.html.j2"])
def test_a_report_inserts_only_its_own_figures_unescaped(name: str) -> None:
    page = (ROOT / "src/redline/runs/report" / name).read_text()
    assert set(re.findall(r"\{\{([^}]*\|\s*safe[^}]*)\}\}", page)) == {" figure.svg | safe "}
    assert "autoescape false" not in page
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page), "it loads nothing from elsewhere"
