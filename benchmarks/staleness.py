"""Whether the code behind a result changed since it was measured, by comparing definitions of two commits.

A definition is a function, a method, or what a module or class holds besides them. It is unchanged if the old package
has a definition with the same structure, anywhere: a definition that moved is unchanged, and so is one in which only
comments, docstrings or names differ that the package no longer has. Names that both commits have count: `add` and `sub`
are different functions.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/redline"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Definition:
    path: str  # of its file, relative to the package
    skeleton: str  # its structure, without names
    names: tuple[str, ...]  # in the order in which they occur


def changes_since(commit: str | None, modules: Sequence[str]) -> str:
    """Return "unchanged", "changed: 12 of 80 definitions", or "unknown" without the commit or the history.

    `modules` are files and folders of the package, such as `kernels` or `training/step.py`.
    """
    found = () if commit is None else _compared(commit)
    changed = [is_new for path, is_new in found if any(_inside(path, module) for module in modules)]
    if not changed:
        return UNKNOWN
    return f"changed: {sum(changed)} of {len(changed)} definitions" if any(changed) else "unchanged"


@cache
def _compared(commit: str) -> tuple[tuple[str, bool], ...]:
    """Return each definition of today's package: its file, and whether the package of the commit lacks it."""
    then, now = _package(commit), _package("HEAD")
    if not then:
        return ()
    shared = _names(then) & _names(now)
    known = {_structure(one, shared) for one in then}
    return tuple((one.path, _structure(one, shared) not in known) for one in now)


def first_commit(path: Path) -> str | None:
    """Return the commit that added a file; None if the history does not reach back to it."""
    if _git("rev-parse", "--is-shallow-repository") != b"false\n":
        return None
    found = _git("log", "--diff-filter=A", "--format=%H", "--", str(path.relative_to(ROOT)))
    return found.decode().split()[-1] if found and found.strip() else None


def _inside(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}/")


def _git(*words: str) -> bytes | None:
    """Return the output of a git command; None without git, without a history, or if the command fails."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


@cache
def _package(commit: str) -> tuple[Definition, ...]:
    """Return the definitions of the package at a commit; none if this repository does not have the commit."""
    archive = _git("archive", commit, "--", PACKAGE)
    if archive is None:
        return ()
    found: list[Definition] = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            file = files.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                path = member.name.removeprefix(f"{PACKAGE}/")
                found += (Definition(path, *parts) for parts in _skeletons(file.read().decode()))
    return tuple(found)


def definitions(source: str) -> Iterator[ast.AST]:
    """Yield each function and method of a module, and then what the module and its classes hold besides."""
    yield from _split(ast.parse(source))


def _split(holder: ast.Module | ast.ClassDef) -> Iterator[ast.AST]:
    rest: list[ast.stmt] = []
    for statement in _without_docstring(holder.body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield _plain(statement)
        elif isinstance(statement, ast.ClassDef):
            yield from _split(statement)
        elif not isinstance(statement, ast.Import | ast.ImportFrom | ast.If):  # imports move with every file
            rest.append(statement)
    yield from (_plain(statement) for statement in rest)


def _plain(tree: ast.AST) -> ast.AST:
    """Remove the docstrings inside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            node.body = _without_docstring(node.body) or [ast.Pass()]
    return tree


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_text else body


_NAMED = frozenset({"id", "attr", "arg", "name"})
_IGNORED = frozenset({"ctx", "type_comment", "returns", "annotation", "kind"})  # types compute nothing


@cache  # most files are the same in many commits
def _skeletons(source: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the structure and the names of each definition of a module."""
    found = []
    for tree in definitions(source):
        names: list[str] = []
        found.append((_skeleton(tree, names), tuple(names)))
    return tuple(found)


def _skeleton(node: object, names: list[str]) -> str:
    if isinstance(node, list):
        return f"[{','.join(_skeleton(part, names) for part in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign([node.target], node.value)
    parts = []
    for field, value in ast.iter_fields(node):
        if field in _NAMED and isinstance(value, str):
            names.append(value)
        elif field not in _IGNORED:
            parts.append(_skeleton(value, names))
    return f"{type(node).__name__}({','.join(parts)})"


def _names(package: Sequence[Definition]) -> frozenset[str]:
    return frozenset(name for one in package for name in one.names)


def _structure(definition: Definition, shared: frozenset[str]) -> tuple[str, tuple[str | int, ...]]:
    """Return what is equal for definitions that differ only in names outside of `shared`."""
    numbered: dict[str, int] = {}
    names = [name if name in shared else numbered.setdefault(name, len(numbered)) for name in definition.names]
    return definition.skeleton, tuple(names)
