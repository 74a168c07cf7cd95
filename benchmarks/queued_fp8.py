"""Which matmuls are faster in fp8: as the choice times them, launch by launch, and with all launches queued beforehand.

    python benchmarks/queued_fp8.py OUT.json

The shapes are those of the race's small steps: `race-350m` at 16 × 1024 tokens, `speedrun-350m` at 32 × 1024. Where the
two ways differ, the first has timed the host.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from redline.kernels import float8_choice
from redline.kernels.float8_choice import CAST, Shapes

WAIT = 40_000_000  # cycles, some 20 ms: longer than the host takes for what is queued meanwhile
REPEATS = 10


def shapes(tokens: int, width: int, inner: int) -> Shapes:
    """A gated block's, and the head's."""
    return {
        "qkv": (tokens, width, 3 * width),
        "out": (tokens, width, width),
        "up": (tokens, width, 2 * inner),
        "down": (tokens, inner, width),
        "head": (tokens, width, 50304),
    }


MODELS = {"race-350m": shapes(16 * 1024, 1024, 2688), "speedrun-350m": shapes(32 * 1024, 512, 1408)}


def queued_ms(work: Callable[[], Any]) -> float:
    """Of the kernels alone: the GPU waits until all of them are there."""
    for _ in range(2):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(WAIT)
    begin.record()
    for _ in range(REPEATS):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS


def timed(model: Shapes) -> dict[str, list[float]]:
    return {name: list(float8_choice.measure("native", *shape, cast=name in CAST)) for name, shape in model.items()}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/queued_fp8.py OUT.json")
    if not torch.cuda.is_available():
        sys.exit("It needs a GPU that has fp8.")
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "ms, bf16 and fp8": {}}
    for name, model in MODELS.items():
        one_by_one = timed(model)
        with mock.patch.object(float8_choice, "_ms", queued_ms):
            queued = timed(model)
        found["ms, bf16 and fp8"][name] = {"one by one": one_by_one, "queued": queued}
        for linear in model:
            told = [" → ".join(f"{ms:.3f}" for ms in way[linear]) for way in (one_by_one, queued)]
            print(f"{name:14} {linear:5} {told[0]:16} queued {told[1]}", flush=True)
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
