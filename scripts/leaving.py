"""Start short runs of several ranks again and again beside a busy core, and count how they end: scripts/leaving.py

Every run must end with exit code 0, without an abort and without a false warning. Each mode is run `--runs` times. The
result is written after each run, and a restarted script only makes up for the missing ones: of the same source, or
with `--again` from the beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nightly

RESULT = nightly.ROOT / ".leaving.json"  # ignored by git
MODES: dict[str, tuple[int, tuple[str, ...]]] = {
    "ddp": (2, ("parallel.mode=ddp",)),
    "fsdp, sharded": (2, ("parallel.mode=fsdp", "parallel.accumulate=sharded")),
    "fsdp, whole": (2, ("parallel.mode=fsdp", "parallel.accumulate=whole")),
    "hsdp": (4, ("parallel.mode=hsdp", "parallel.shard_size=2")),
}
TINY = (
    *(
        "model.layers=2",
        "model.d_model=32",
        "model.heads=2",
        "model.d_ff=64",
        "data.tokenizer=bytes",
        "data.seq_len=32",
    ),
    *("train.device=cpu", "train.precision=fp32", "train.compile=false", "train.steps=2", "train.hours=null"),
    *("train.epochs=null", "eval.every=1000", "checkpoint.every=1000", "monitor.log_every=1"),
    *("train.global_batch=8", "train.micro_batch=1", "eval.sequences=4", "eval.samples=0", "train.warmup_steps=1"),
)
# What a rank that ends out of order leaves behind.
BAD = ("Abort", "terminate called", "Fatal Python error", "events cannot be written", "Traceback", "core dumped")
LIMIT_S = 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=50, help="runs of each mode")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=RESULT, help="JSON file with the result")
    parser.add_argument("--again", action="store_true", help="begin anew")
    options = parser.parse_args()
    return count(options.runs, options.jobs, options.out, again=options.again)


def count(runs: int, jobs: int, out: Path, *, again: bool = False, modes: dict[str, Any] = MODES) -> int:
    """Make up for the missing runs of each mode; return the exit code."""
    source = nightly.source_digest("src")
    result = {} if again else earlier(out, source)
    counts: dict[str, Any] = result.setdefault("modes", {})
    result |= {"what": str(__doc__).partition(":")[0], "source": source, "beside": "a busy core", "git": _git()}
    missing = [mode for mode in modes for _ in range(runs - counts.get(mode, {}).get("runs", 0))]
    with tempfile.TemporaryDirectory() as folder, busy_core(), cancelled_pool(jobs) as pool:
        text = Path(folder) / "text.txt"
        text.write_text("The red stone lies beside the river. " * 2000, encoding="utf-8")
        tasks = ((mode, Path(folder) / str(number)) for number, mode in enumerate(missing))
        for mode, ended in pool.map(lambda task: (task[0], one_run(*modes[task[0]], text, task[1])), tasks):
            entry = counts.setdefault(mode, {"ranks": modes[mode][0], "runs": 0, "seconds": 0.0, "failed": []})
            entry["runs"] += 1
            entry["seconds"] = round(entry["seconds"] + ended["seconds"], 1)
            entry["failed"] += [ended] if ended["code"] or ended["words"] else []
            nightly.replace_file(out, json.dumps(result, indent=1) + "\n")
            print(f"{mode}: {entry['runs']} of {runs}, {len(entry['failed'])} failed", flush=True)
    return int(any(counts[mode]["failed"] for mode in modes))


def earlier(out: Path, source: str) -> dict[str, Any]:
    """Return the result of the runs of this source that have ended."""
    try:
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if found.get("source") == source else {}


def _git() -> dict[str, Any]:
    """Return the commit whose source has that digest, and whether src differs from it."""
    asked = [["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--", "src"]]
    commit, changes = (
        subprocess.run(command, cwd=nightly.ROOT, capture_output=True, text=True).stdout.strip() for command in asked
    )
    return {"commit": commit or None, "dirty": bool(changes)}


def one_run(ranks: int, how: tuple[str, ...], text: Path, folder: Path) -> dict[str, Any]:
    """Train once in a folder of its own; return the exit code and what it printed that it should not."""
    folder.mkdir()
    words = ["train", "quickstart", *TINY, f"data.source={text}", *how, "--gpus", str(ranks), "--run", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REDLINE_CACHE": str(folder / "cache")}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "redline", *words],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=folder,
            env=environment,
        )
        code, printed = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, printed = -1, f"no end after {LIMIT_S} s: {error.stderr}"
    log = folder / "run/ranks.log"
    printed += log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    words = [word for word in BAD if word in printed]
    bad = bool(code or words)
    seconds = round(time.monotonic() - begin, 1)
    return {"code": code, "words": words, "seconds": seconds, **({"printed": printed[-2000:]} if bad else {})}


@contextmanager
def cancelled_pool(jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Return a pool of threads that starts no further task after an error or Ctrl-C."""
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def busy_core() -> Iterator[None]:
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


if __name__ == "__main__":
    sys.exit(main())
