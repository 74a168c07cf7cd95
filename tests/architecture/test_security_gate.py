"""What no line may do because a file may come from a stranger; test_source.py has the rules about running code."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_source import FILES, ROOT, dotted, imported, offences

BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
EVERY = sorted([*FILES, *BENCHMARKS])
Rule = Callable[[ast.AST], str | None]

# Code in a file of weights, of arguments or of text, by other doors than pickle's own.
LOADERS = {
    *("torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "torch.serialization.load"),
    *(
        "torch.serialization.add_safe_globals",
        "pandas.read_pickle",
        "pd.read_pickle",
        "joblib.load",
        "jsonpickle.decode",
    ),
    *("yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader", "yaml.CLoader", "yaml.unsafe_load", "yaml.full_load"),
    *("code.interact", "runpy.run_path", "runpy.run_module", "importlib.util.spec_from_file_location", "builtins.eval"),
    *("builtins.exec", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"),
}
EVERYWHERE = {"", "0.0.0.0", "::", "*"}
SERVERS = (
    "HTTPServer",
    "ThreadingHTTPServer",
    "TCPServer",
    "ThreadingTCPServer",
    "create_server",
    "bind",
    "run_app",
    "run",
)


def names_loader(node: ast.AST) -> str | None:
    """Called, handed on, or imported by name."""
    if isinstance(node, ast.Attribute) and dotted(node) in LOADERS:
        return dotted(node)
    if isinstance(node, ast.ImportFrom):
        return next((name for name in imported(node) if name in LOADERS), None)
    return None


def shell_text(node: ast.AST) -> str | None:
    """A command is a list of words: one text would be parsed by somebody."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = dotted(node.func)
    if name in (
        "subprocess.run",
        "subprocess.Popen",
        "subprocess.call",
        "subprocess.check_output",
        "subprocess.check_call",
    ):
        command = node.args[0]
        if isinstance(command, ast.JoinedStr | ast.BinOp) or (
            isinstance(command, ast.Constant) and " " in str(command.value)
        ):
            return f"{name} of a text"
    return None


def imports_by_text(node: ast.AST) -> str | None:
    """A module's name stands in the source, or begins there; it is never all of a variable."""
    if isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] == "import_module":
        name = node.args[0]
        begins = name.values[0] if isinstance(name, ast.JoinedStr) else name
        if not isinstance(begins, ast.Constant) or not str(begins.value).startswith(("redline.", "pydoc_data.")):
            return "import_module of a variable"
    return None


def temporary_name(node: ast.AST) -> str | None:
    """A name that another may take first."""
    if isinstance(node, ast.Attribute) and dotted(node) in ("tempfile.mktemp", "os.tempnam", "os.tmpnam"):
        return dotted(node)
    return (
        next((n for n in imported(node) if n == "tempfile.mktemp"), None) if isinstance(node, ast.ImportFrom) else None
    )


def archive(node: ast.AST) -> str | None:
    """Archives hold paths; only the data filter keeps them inside, and zipfile and shutil have none that says so."""
    if not isinstance(node, ast.Call):
        return None
    name = dotted(node.func)
    if name.endswith("unpack_archive"):
        return "unpack_archive"
    if name.rpartition(".")[2] in ("extractall", "extract"):
        chosen = [
            word.value.value for word in node.keywords if word.arg == "filter" and isinstance(word.value, ast.Constant)
        ]
        return None if chosen == ["data"] else f"{name} without filter='data'"
    return None


def open_to_all(node: ast.AST) -> str | None:
    """Whatever is served, this machine alone sees it unless someone asks for more."""
    if not isinstance(node, ast.Call) or dotted(node.func).rpartition(".")[2] not in SERVERS:
        return None
    values = [*node.args, *(word.value for word in node.keywords if word.arg in ("host", "address", "server_address"))]
    first = [value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value for value in values]
    hosts = [value.value for value in first if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return f"{dotted(node.func)} on all interfaces" if any(host in EVERYWHERE for host in hosts) else None


def unescaped(node: ast.AST) -> str | None:
    """HTML is written by templates that escape."""
    if not isinstance(node, ast.Call):
        return None
    name = dotted(node.func).rpartition(".")[2]
    if name in ("Markup", "Template") and dotted(node.func) != "string.Template":
        return name
    if name == "Environment":
        escapes = [word.value for word in node.keywords if word.arg == "autoescape"]
        on = len(escapes) == 1 and isinstance(escapes[0], ast.Constant) and escapes[0].value is True
        return None if on else "Environment without autoescape"
    return None


def trusting(node: ast.AST) -> str | None:
    """Certificates are checked, and nobody's code is fetched."""
    if isinstance(node, ast.Call):
        options = {word.arg: word.value for word in node.keywords}
        verify = options.get("verify")
        if (
            isinstance(verify, ast.Constant)
            and verify.value is False
            and dotted(node.func).startswith(("requests", "httpx"))
        ):
            return "verify=False"
        if dotted(node.func).endswith("_create_unverified_context"):
            return "no check of certificates"
    if isinstance(node, ast.Dict):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        values = [value.value for value in node.values if isinstance(value, ast.Constant)]
        return "trust_remote_code" if "trust_remote_code" in keys and True in values else None
    return None


RULES: tuple[Rule, ...] = (
    *(names_loader, shell_text, imports_by_text, temporary_name, archive, open_to_all, unescaped, trusting),
)


def harms(source: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(source)))
    return [f"line {getattr(node, 'lineno', 0)}: {what}" for node in nodes for rule in RULES if (what := rule(node))]


@pytest.mark.parametrize("path", EVERY, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_line_trusts_a_stranger(path: Path) -> None:
    assert harms(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.name)
def test_benchmarks_run_nothing_that_a_file_holds(path: Path) -> None:
    assert offences(path.read_text(encoding="utf-8")) == []


PLANTED = {
    names_loader: [
        "torch.load(path, weights_only=True)",
        "load = torch.load",
        "from torch import load",
        "torch.hub.load('a/b', 'c')",
        "torch.jit.load(path)",
        "pd.read_pickle(path)",
        "yaml.load(text, Loader=yaml.UnsafeLoader)",
        "from yaml import FullLoader",
        "runpy.run_path(path)",
        "from os import system",
        "from subprocess import getoutput",
    ],
    shell_text: ["subprocess.run('ls -l')", "subprocess.Popen(f'cat {path}')", "subprocess.call('rm ' + path)"],
    imports_by_text: ["importlib.import_module(name)", "import_module(f'{name}.x')"],
    temporary_name: ["tempfile.mktemp()", "from tempfile import mktemp"],
    archive: [
        "tarfile.open(p).extractall(out)",
        "archive.extractall(out, filter='fully_trusted')",
        "shutil.unpack_archive(p)",
        "zipfile.ZipFile(p).extract(name)",
        "archive.extractall(out)",
    ],
    open_to_all: [
        "HTTPServer(('', 8000), Handler)",
        "http.server.ThreadingHTTPServer(('0.0.0.0', 80), Handler)",
        "sock.bind(('0.0.0.0', 80))",
        "app.run(host='0.0.0.0')",
        "socketserver.TCPServer(('::', 1), H)",
    ],
    unescaped: [
        "jinja2.Environment(loader=x)",
        "Environment(autoescape=False)",
        "Markup(text)",
        "jinja2.Template(text)",
    ],
    trusting: [
        "requests.get(url, verify=False)",
        "ssl._create_unverified_context()",
        "options = {'trust_remote_code': True}",
    ],
}


@pytest.mark.parametrize(("rule", "line"), [(rule, line) for rule, lines in PLANTED.items() for line in lines])
def test_every_rule_can_fail(rule: Rule, line: str) -> None:
    """R18: caught, and by the rule that is there for it."""
    found = [what for node in ast.walk(ast.parse(line)) if (what := rule(node))]
    assert found
    assert harms(line)


def test_every_rule_is_planted_against() -> None:
    assert set(PLANTED) == set(RULES)


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run(['ls', '-l'], check=True)",
        "subprocess.Popen(command)",
        "import_module(f'redline.jobs.{name}')",
        "archive.extractall(out, filter='data')",
        "HTTPServer(('127.0.0.1', 0), Handler)",
        "trainer.run()",
        "Environment(autoescape=True)",
        "tempfile.mkdtemp()",
        "re.search('a', b)",
    ],
)
def test_the_gate_lets_pass(line: str) -> None:
    assert harms(line) == []


# --- `assert` is for ourselves: Python leaves it out with -O, and it shows a traceback


READERS = [
    *(ROOT / "src/redline/data").rglob("*.py"),
    *(ROOT / "src/redline/recipe").glob("lo*.py"),
    *(ROOT / "src/redline/runs").rglob("*.py"),
    *((ROOT / "src/redline/models" / f"{name}.py") for name in ("families", "pretrained")),
    ROOT / "src/redline/evaluate/opened_run.py",
]
OURS = {  # what they check was not read from a file
    "self._file.tell() == self._begin": "a header that was just written",
    "not parameters": "the decoder's own names against its own",
}


def asserted(source: str) -> Iterator[str]:
    """What asserts check, but for those that only tell a type checker what is known."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
            if not all(_narrows(part) for part in parts):
                yield ast.unparse(node.test)


def _narrows(test: ast.expr) -> bool:
    if isinstance(test, ast.Call):
        return dotted(test.func) == "isinstance"
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)


@pytest.mark.parametrize("path", READERS, ids=lambda path: path.name)
def test_no_assert_judges_a_file(path: Path) -> None:
    assert [test for test in asserted(path.read_text(encoding="utf-8")) if test not in OURS] == []


def test_the_rule_about_asserts_can_fail() -> None:
    assert list(asserted("assert header['size'] < 10\nassert x is not None and isinstance(y, int)\nassert kind"))
    assert not list(asserted("assert x is not None\nassert isinstance(y, int)"))


# --- what is installed, and what a page shows


def test_versions_are_pinned() -> None:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted
    assert [line for line in wanted if not re.match(r"[\w.\-\[\]]+==[\w.+!]+(\s*;.*)?(\s*#.*)?$", line)] == []


@pytest.mark.parametrize("name", ["report.html.j2", "comparison.html.j2"])
def test_the_report_trusts_its_own_figures_alone(name: str) -> None:
    page = (ROOT / "src/redline/runs/report" / name).read_text()
    assert set(re.findall(r"\{\{([^}]*\|\s*safe[^}]*)\}\}", page)) == {" figure.svg | safe "}
    assert "autoescape false" not in page
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page), "it loads nothing from elsewhere"
