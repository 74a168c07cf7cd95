"""Measure the source in src/redline: sizes, names, imports, and the files that a pretraining batch passes through.

    python scripts/source_stats.py [CHECKOUT …] [--files] [--static]

With one checkout (this one, if none is named) it prints a column of numbers; with several, a column for each, such as
before and after a change. `--files` lists the files on the path of a batch, `--static` skips that measure, which trains
a tiny model and so needs the environment that redline runs in.

The measures:

- code lines: all lines of the Python files, with blank lines, comments and docstrings.
- comment lines: lines that hold nothing but a comment. Docstrings are not counted.
- import lines: lines of import statements, wherever they are.
- single-importer modules: modules that exactly one other module of the package imports. Package files do not count.
- repeated base names: file names that occur in more than one folder, except `__init__.py`.
- files on the path of a batch, from text to report: files of which a function runs while `prepare`, `train` (6 steps,
  with evaluations and checkpoints) and `report` run on a small CPU model of causal_lm. What runs only while a module is
  imported is not counted, nor is what handles no batch: the command line and the start of a run (`cli`, `launch`), the
  plan (`plan`, `planning`) and the facts of the machine (`hardware`). Templates count as files.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

SHORT = 60  # lines; shorter files are counted apart
PACKAGE = Path("src/redline")
NOT_ON_THE_PATH = {"cli", "launch", "plan", "planning", "hardware"}
TINY = (
    *("model.size=null", "model.layers=2", "model.d_model=32", "model.heads=2", "model.d_ff=64"),
    *("data.tokenizer=bytes", "data.seq_len=32", "data.workers=2"),
    *("train.device=cpu", "train.precision=fp32", "train.compile=false", "train.hours=null", "train.epochs=null"),
    *("train.global_batch=8", "train.micro_batch=4", "train.warmup_steps=2", "train.steps=6"),
    *("eval.every=3", "eval.sequences=4", "eval.samples=0", "checkpoint.every=3", "monitor.log_every=1"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]], metavar="CHECKOUT")
    parser.add_argument("--files", action="store_true", help="list the files on the path of a batch")
    parser.add_argument("--static", action="store_true", help="skip the path of a batch, which trains a tiny model")
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)  # how this script starts its own child
    options = parser.parse_args()
    if options.trace:
        print(json.dumps(trace_batch(options.checkouts[0])))
        return
    columns = []
    for checkout in options.checkouts:
        measures = static_measures(checkout)
        if not options.static:
            files = batch_path(checkout)
            measures["files on the path of a batch"] = len(files)
            if options.files:
                print(f"On the path of a batch in {checkout}:", *files, "", sep="\n  ")
        columns.append(measures)
    print(table([str(checkout) for checkout in options.checkouts], columns))


def table(heads: list[str], columns: list[dict[str, Any]]) -> str:
    """Return a Markdown table: a row for each measure, a column for each checkout."""
    rows = [["measure", *heads], ["---", *("---:" for _ in heads)]]
    rows += [[name, *(f"{column[name]:,}" for column in columns)] for name in columns[0]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def static_measures(checkout: Path) -> dict[str, Any]:
    """Return what the text of the package shows, without running it."""
    package = checkout / PACKAGE
    files = sorted(package.rglob("*.py"))
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in files}
    trees = {path: ast.parse("\n".join(text)) for path, text in lines.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [_length(node) for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = Counter(path.name for path in files if path.name != "__init__.py")
    return {
        "files": len(files),
        "code lines": sum(map(len, lines.values())),
        "functions": len(functions),
        "median function, lines": int(statistics.median(functions)) if functions else 0,
        "single-importer modules": _single_importers(package, trees),
        "comment lines": sum(line.lstrip().startswith("#") for text in lines.values() for line in text),
        "import lines": sum(_length(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)),
        f"files under {SHORT} lines": sum(len(text) < SHORT for text in lines.values()),
        "repeated base names": sum(count > 1 for count in names.values()),
    }


def _length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _single_importers(package: Path, trees: dict[Path, ast.Module]) -> int:
    modules = {_module(package, path): path for path in trees}
    importers: dict[str, set[str]] = defaultdict(set)
    for module, path in modules.items():
        for node in ast.walk(trees[path]):
            for name in _imported(node):
                if name in modules and name != module:
                    importers[name].add(module)
    return sum(
        len(importers[module]) == 1
        for module, path in modules.items()
        if path.name not in ("__init__.py", "__main__.py")
    )


def _module(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(node: ast.AST) -> list[str]:
    """Return the names that an import statement may load as modules: `from a import b` names `a` and `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def batch_path(checkout: Path) -> list[str]:
    """Return the files on the path of a batch, traced in a process that imports redline from `checkout`."""
    environment = {**os.environ, "PYTHONPATH": str((checkout / "src").resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--trace", str(checkout.resolve())]
    with tempfile.TemporaryDirectory() as folder:
        environment["REDLINE_CACHE"] = str(Path(folder) / "cache")
        traced = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [str(name) for name in json.loads(traced.stdout)]


def trace_batch(checkout: Path) -> list[str]:
    """Prepare a text, train on it and write the report in this process; return the files of which a function ran."""
    text = Path("text")
    text.mkdir()
    generator = random.Random(5)
    for number in range(40):
        words = generator.choices(["red", "line", "train", "token", "stone"], k=120)
        (text / f"{number}.txt").write_text(" ".join(words) + ".\n", encoding="utf-8")
    prefix = f"{checkout / PACKAGE}{os.sep}"
    seen: set[str] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file not in seen and file.startswith(prefix) and not _at_import(frame, prefix):
            seen.add(file)

    sys.setprofile(record)
    threading.setprofile(record)
    try:
        _redline("prepare", "text", "--out", "tokens", "--tokenizer", "bytes", "--val-fraction", "0.2")
        _redline("train", "quickstart", *TINY, "data.source=tokens", "--run", "run")
        _redline("report", "run")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed does not know that None is allowed
    names = (file.removeprefix(prefix) for file in seen)
    return sorted(name for name in names if Path(name).parts[0] not in NOT_ON_THE_PATH)


def _at_import(frame: FrameType | None, prefix: str) -> bool:
    """Return whether the frame runs because a module of the package is being imported."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(prefix):
            return True
        frame = frame.f_back
    return False


def _redline(*words: str) -> None:
    import typer

    from redline.cli.main import app

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = typer.main.get_command(app).main(list(words), standalone_mode=False)
    if code:
        raise SystemExit(f"redline {' '.join(words)} ended with exit code {code}: the path would be incomplete.")


if __name__ == "__main__":
    main()
