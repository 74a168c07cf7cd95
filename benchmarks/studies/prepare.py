"""Time `redline prepare` on text made from the embedded corpus: MB/s, MB/s per core, and peak memory of a process.

usage: python -m benchmarks.studies.prepare [--mb 100] [--workers N] [--form text|jsonl] [--source FILE]
       [--out FILE.json] [TOKENIZER …]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import resource
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from redline.data.prepare import default_workers, prepare_source, tokenizer_for
from redline.data.sources import Reading, embedded_documents
from redline.recipe.lock import git_state, versions

TOKENIZERS = ("bytes", "train:16384", "gpt2")


def make_text(path: Path, size: int) -> Path:
    """Write copies of the corpus, each with a different heading, until the file has `size` bytes."""
    with open(path, "w", encoding="utf-8") as file:
        for number in itertools.count():
            for document in embedded_documents():
                text = f"{document.name}, copy {number}\n{document.text}\n"
                file.write(text if path.suffix == ".txt" else json.dumps({"text": text}) + "\n")
                if file.tell() >= size:
                    return path
    return path


class WorkerMemory(threading.Thread):
    """Poll the peak memory of every child process.

    rusage would also count the pages of the parent that a forked child starts with.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_kib, self.stopped = 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.stopped.wait(0.1):
            for process in multiprocessing.active_children():
                with contextlib.suppress(OSError, StopIteration):
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
                    self.peak_kib = max(self.peak_kib, int(line.split()[1]))

    def result(self) -> int:
        self.stopped.set()
        self.join()
        return round(self.peak_kib / 1024)


def measure(source: Path, tokenizer: str, workers: int, folder: Path) -> dict[str, Any]:
    """Prepare the source and return the figures. Run in a new process, so that the peak of memory is of this call."""
    reading = Reading()
    begin = time.perf_counter()
    trained_tokenizer = tokenizer_for([str(source)], tokenizer, reading)
    tokenizer_seconds = time.perf_counter() - begin
    worker_memory = WorkerMemory()
    begin = time.perf_counter()
    data = prepare_source(str(source), trained_tokenizer, folder, reading, workers=workers)
    seconds = time.perf_counter() - begin
    size = source.stat().st_size
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "tokenizer": tokenizer,
        "mb": round(size / 1e6, 1),
        "workers": workers,
        "seconds": round(seconds, 2),
        "tokenizer_seconds": round(tokenizer_seconds, 2),
        "mb_per_s": round(size / 1e6 / seconds, 2),
        "mb_per_s_per_core": round(size / 1e6 / seconds / workers, 2),
        "cpu_seconds": [round(who.ru_utime + who.ru_stime, 2) for who in (own, children)],
        "peak_rss_mib": round(own.ru_maxrss / 1024),
        "peak_rss_worker_mib": worker_memory.result(),
        "tokens": len(data.train) + (len(data.val) if data.val else 0),
        "fingerprint": data.fingerprint,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizers", nargs="*", metavar="TOKENIZER", default=TOKENIZERS)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--form", choices=("text", "jsonl"), default="text")
    parser.add_argument("--source", type=Path, help="prepare this file instead of the generated text")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generated = folder / ("text.txt" if options.form == "text" else "text.jsonl")
        source = options.source or make_text(generated, options.mb * 1_000_000)
        context = multiprocessing.get_context("spawn")
        for number, tokenizer in enumerate(options.tokenizers):
            with ProcessPoolExecutor(1, context) as pool:
                result = pool.submit(measure, source, tokenizer, options.workers, folder / str(number)).result()
            results.append(result)
            print(
                f"{tokenizer:12s} {result['mb']:8.1f} MB  {result['mb_per_s']:7.2f} MB/s by {options.workers}  "
                f"{result['mb_per_s_per_core']:6.2f} per core  peak {result['peak_rss_mib']} MiB, "
                f"worker {result['peak_rss_worker_mib']} MiB",
                flush=True,
            )
    if options.out:
        record = {"versions": versions(), "git": git_state(), "results": results}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
