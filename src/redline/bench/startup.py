"""Seconds from the command to the first step: once with empty caches, once with the caches of the first start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from redline.bench.child import ChildError, TrainedRun, train
from redline.bench.record import Row
from redline.bench.setting import TINY, Setting

DEFAULTS = dict.fromkeys(("cuda", "cpu"), ("train.steps=1", "monitor.log_every=1"))
COMPILED_TINY = (*TINY, "train.compile=true")  # most of a cold start is compilation


def run_startup(setting: Setting) -> Iterator[Row]:
    """Yield a row for the cold and one for the warm start; both processes use the same cache folders."""
    with tempfile.TemporaryDirectory(prefix="redline-bench-") as name:
        folder = Path(name)
        setting = setting.with_tokens(folder / "tokens", 1_000_000)
        caches = {
            "REDLINE_CACHE": str(folder / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "compile"),
            "TRITON_CACHE_DIR": str(folder / "cache" / "triton"),
        }
        for start in ("cold", "warm"):
            try:
                yield {"name": start, **_seconds(train(setting.words, folder / start, caches))}
            except ChildError as error:
                yield {"name": start, "error": str(error)}


def _seconds(run: TrainedRun) -> dict[str, float]:
    """Return the total and its three parts."""
    built = run.of_type("start")[0]["time"]
    first = run.of_type("step")[0]["time"]
    warmup = sum(event.get("seconds", 0.0) for event in run.of_type("warmup"))
    return {
        "to_first_step_s": first - run.begun,
        "imports_data_model_s": built - run.begun,
        "warmup_s": warmup,
        "evaluation_and_step_s": first - built - warmup,
    }
