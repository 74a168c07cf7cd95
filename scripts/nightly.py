"""Run every test in parts, and go on after an interruption: make nightly [ARGS=--again]

The parts are the linters, each folder of tests/ without its long tests, each folder's long tests, and 50 runs of
several ranks in each parallel mode (scripts/leaving.py). A state file holds the parts that have passed, so that a
restarted run only makes up for the others. A change of the source, or `--again`, begins anew. A failed part does not
stop the others; the exit code is 1 if any has failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / ".nightly.json"  # ignored by git
LONG = ", long"  # how the names of parts with long tests end
NO_TESTS_COLLECTED = 5  # pytest's exit code: a folder without long tests has passed them
Run = Callable[[list[str], dict[str, str]], int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--again", action="store_true", help="repeat the parts that have passed")
    again = parser.parse_args().again
    return run_parts(parts(ROOT / "tests"), source_digest(), STATE, run_command, again=again)


def parts(tests: Path) -> dict[str, list[str]]:
    """Return the command of each part by its name, short parts first."""
    folders = sorted(path for path in tests.iterdir() if any(path.rglob("test_*.py")))
    places = {path.name: [str(path.relative_to(tests.parent))] for path in folders if path.is_dir()}
    places["pages"] = sorted(str(path.relative_to(tests.parent)) for path in tests.glob("test_*.py"))
    pytest = [sys.executable, "-m", "pytest"]
    return {
        "lint": ["make", "--no-print-directory", "lint"],
        **{name: [*pytest, "-n", "2", "-m", "not soak", *paths] for name, paths in places.items()},
        **{f"{name}{LONG}": [*pytest, "-m", "soak", *paths] for name, paths in places.items()},
        "ranks leave in order": [sys.executable, "scripts/leaving.py"],
    }


def run_parts(commands: dict[str, list[str]], source: str, state: Path, run: Run, *, again: bool = False) -> int:
    """Run the parts that have not passed for this source; return the exit code of the whole."""
    passed = {} if again else passed_parts(state, source)
    failed = []
    for name, command in commands.items():
        if name in passed:
            print(f"{name}: passed before, in {passed[name]:.0f} s", flush=True)
            continue
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        start = time.monotonic()
        # As in `make soak`: Hypothesis tries four times as many examples as in `make test`.
        profile = {"HYPOTHESIS_PROFILE": "default"} if name.endswith(LONG) else {}
        code = run(command, {"OMP_NUM_THREADS": "1", **profile})
        if code not in (0, NO_TESTS_COLLECTED):
            failed.append(name)
            continue
        passed[name] = round(time.monotonic() - start, 1)
        replace_file(state, json.dumps({"source": source, "passed": passed}, indent=1) + "\n")
    print(f"{len(passed)} of {len(commands)} parts passed" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def replace_file(path: Path, text: str) -> None:
    """Write a file whole: an interruption may come at any time."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def passed_parts(state: Path, source: str) -> dict[str, float]:
    """Return the seconds of each part that has passed for this source."""
    try:
        content = json.loads(state.read_text(encoding="utf-8"))
        return dict(content["passed"]) if content["source"] == source else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def source_digest(*folders: str) -> str:
    """Return a digest of every file that git tracks or would track, of these folders or of all."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    names = subprocess.run(listed, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.split(b"\0")
    digest = hashlib.sha256()
    for name in sorted(filter(None, names)):
        path = ROOT / os.fsdecode(name)
        digest.update(name + b"\0")
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def run_command(command: list[str], environment: dict[str, str]) -> int:
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
