"""Measure on a GPU what has changed since it was last measured there, in order of worth and within a time limit.

    python -m benchmarks.gpu_todo OUT --minutes 30 [--only NAME,NAME] [--commit]
    python -m benchmarks.gpu_todo --table

Each task is a part of `benchmarks/suite.sh`. A task that has ended at this commit is not repeated, so a call that was
cut off, or had too little time, is continued by the same command. Results of a working tree with changes could not be
repeated by anyone else: it is refused. `--commit` copies the results and the log of the tests to `benchmarks/results`
and commits them. `--table` prints the tasks as the table of docs/gpu-todo.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.hardware.machine import local_machine
from redline.recipe.lock import git_state

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
DONE = "todo.json"  # in OUT: what has ended, with exit codes


@dataclass(frozen=True)
class Task:
    """A part of the suite, the seconds it may take, what it should show, and why it is due."""

    name: str
    seconds: int
    expected: str
    why: str
    needs: tuple[str, ...] = ()  # environment variables that name its data


TASKS = (
    Task("tests", 430, "no failure", "every kernel, and the paths that changed, beside their references"),
    Task(
        "throughput",
        330,
        "fp8 297k, bf16 220k, compiled 203k, transformers 166k tokens/s",
        "the 350M step at batch 128 since the package was restructured",
    ),
    Task(
        "startup",
        220,
        "34.5 s and 10.6 s; fp8 51 s and 9.7 s",
        "the trials of fused blocks and fp8 matmuls at the first start",
    ),
    Task("packed", 120, "205k tokens/s", "the ranking of attention back-ends for rows of several documents"),
    Task("diffusion", 360, "fused 315k, compiled 290k tokens of data/s", "block masks; MFU by what is executed"),
    Task("latent", 240, "365 texts/s, textbook 59", "frozen models since jobs were moved"),
    Task("finetune", 420, "bf16 15,990, fp8 22,310, best usual stack 13,200 tokens/s", "QLoRA's 8-bit optimizer"),
    Task("muon", 60, "12.6 ms by Triton, 23.0 by torch", "Muon's kernels"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help="folder of the results")
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit of this call (30)")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="these tasks")
    parser.add_argument("--commit", action="store_true", help="copy the results to benchmarks/results and commit them")
    parser.add_argument("--table", action="store_true", help="print the tasks as a Markdown table")
    options = parser.parse_args()
    if options.table:
        print(table())
        return
    if options.out is None:
        parser.error("name a folder for the results: python -m benchmarks.gpu_todo OUT")
    unknown = [name for name in options.only.split(",") if name and name not in {task.name for task in TASKS}]
    if unknown:
        parser.error(f"no task is called {unknown[0]}. Choose from {', '.join(task.name for task in TASKS)}.")
    sys.exit(run(options.out, options.minutes, options.only, commits=options.commit))


def run(out: Path, minutes: float, only: str = "", *, commits: bool = False) -> int:
    """Run the tasks that are due and fit into the time. Return 1 if one failed, 2 if the working tree has changes."""
    state = git_state()
    if state["commit"] is None or state["dirty"]:
        what = "This is not a git checkout" if state["commit"] is None else "The working tree has changes"
        fix = "Run from a clone in which everything is committed (`git status` lists what is not)."
        print(f"{what}, so nobody could repeat the results. {fix}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    done = _read_done(out, str(state["commit"]))
    for task in TASKS:
        if (only and task.name not in only.split(",")) or task.name in done["tasks"]:
            continue
        if missing := [name for name in task.needs if not os.environ.get(name)]:
            print(f"skipped {task.name}: set {', '.join(missing)} to a folder of tokens (see benchmarks/README.md)")
            continue
        if task.seconds > end - time.monotonic():
            print(f"skipped {task.name}: {task.seconds} s do not fit into the time that is left")
            continue
        print(f"running {task.name}: {task.why}. Expected: {task.expected}", flush=True)
        begin = time.monotonic()
        command = ["bash", str(ROOT / "benchmarks/suite.sh"), str(out), task.name]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode or _worst_exit(out, task.name)
        done["tasks"][task.name] = {"exit": code, "seconds": round(time.monotonic() - begin, 1)}
        (out / DONE).write_text(json.dumps(done, indent=1) + "\n")
    if commits:
        commit(out, done)
    return 1 if any(task["exit"] for task in done["tasks"].values()) else 0


def _read_done(out: Path, commit_id: str) -> dict[str, Any]:
    """Return what has ended at this commit; what another commit measured does not count."""
    try:
        done: dict[str, Any] = json.loads((out / DONE).read_text())
    except (OSError, ValueError):
        done = {}
    return done if done.get("commit") == commit_id else {"commit": commit_id, "tasks": {}}


def _worst_exit(out: Path, name: str) -> int:
    """Return 1 if a step of the task left a file NAME….exit with a code other than 0."""
    codes = [path.read_text().strip() for path in out.glob(f"{name}*.exit")]
    return int(any(code != "0" for code in codes))


def commit(out: Path, done: dict[str, Any]) -> None:
    """Copy the JSON results and the log of the tests to benchmarks/results and commit them."""
    machine = local_machine()
    card = machine.spec.name if machine and machine.spec else "gpu"
    copied = []
    for path in [*sorted(out.glob("*.json")), out / "tests.log"]:
        if path.exists() and path.name != DONE:
            suffix = path.suffix.replace(".log", ".txt")  # git ignores logs
            target = RESULTS / f"{path.stem}-{card}-{time.strftime('%Y%m%d')}{suffix}"
            shutil.copy(path, target)
            copied.append(str(target.relative_to(ROOT)))
    if not copied:
        print("there is nothing to commit yet")
        return
    message = f"Results of {', '.join(done['tasks'])} on a GPU, measured at {done['commit'][:9]}"
    subprocess.run(["git", "add", *copied], cwd=ROOT, check=True)
    subprocess.run(["git", "commit", "--quiet", "--message", message, *copied], cwd=ROOT, check=True)
    print(f"committed {len(copied)} files")


def table() -> str:
    rows = ["| task | seconds | expected | why it is due |", "|---|---:|---|---|"]
    rows += [f"| `{task.name}` | {task.seconds} | {task.expected} | {task.why} |" for task in TASKS]
    return "\n".join(rows)


if __name__ == "__main__":
    main()
