"""Steps of fine-tuning on random rows, timed: what every row of `redline bench finetune` does, and redline's own rows.

    python -m redline.bench.finetune_steps < request.json

The request holds a resolved recipe, the facts of its data, how many `steps` to time, and `sample_tokens` where a row is
to hold several samples; the answer is one JSON line. The base is random: nothing is fetched.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.bench.fp8 import not_in_fp8
from redline.data.packing import cu_seqlens
from redline.errors import UserError
from redline.hardware.detect import detect
from redline.monitor.events import Event, EventLog
from redline.monitor.monitor import Monitor
from redline.objectives import objective_module
from redline.recipe.load import validate
from redline.recipe.resolve import DataFacts, resolve
from redline.train.feed import step_batch, to_device
from redline.train.log import peak_memory_gib
from redline.train.rundir import RunDirectory
from redline.train.trainer import Trainer

SETTLE_STEPS = 3  # before the timed ones
PACKAGES = ("torch", "triton", "bitsandbytes")

Figures = dict[str, Any]


def random_rows(vocab: int, rows: int, length: int, sample_tokens: int | None) -> tuple[np.ndarray, ...]:
    """Inputs, targets and documents [rows, length]: the same for everyone who asks for the same."""
    chance = np.random.default_rng(0)
    inputs, targets = chance.integers(0, vocab, (2, rows, length), dtype=np.int64)
    documents = np.zeros((rows, length), dtype=np.int32)
    if sample_tokens is not None:
        for row in documents:
            most = 2 * length // max(1, sample_tokens // 2) + 1
            lengths = chance.integers(max(1, sample_tokens // 2), sample_tokens * 3 // 2 + 1, most)
            row[:] = np.repeat(np.arange(most, dtype=np.int32), lengths)[:length]
    return inputs, targets, documents


def document_tokens(documents: np.ndarray) -> float:
    """The length of the document that a token lies in, on average over tokens."""
    lengths = np.diff(cu_seqlens(documents)).astype(np.float64)
    return float((lengths**2).sum() / lengths.sum())


def time_steps(step: Callable[[int], Tensor], *, steps: int, tokens: int, device: torch.device) -> Figures:
    """The median of so many steps, after some that are not timed; the first loss is the base's own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses = [step(number) for number in range(SETTLE_STEPS)]
    marks = [_mark(device)]
    for number in range(SETTLE_STEPS, SETTLE_STEPS + steps):
        losses.append(step(number))
        marks.append(_mark(device))
    seconds = statistics.median(_seconds(marks))
    first, last = losses[0].item(), losses[-1].item()
    if not math.isfinite(first) or not math.isfinite(last):
        raise UserError(f"its loss is not finite ({first:g}, then {last:g}).")
    return {
        "tokens_per_s": tokens / seconds,
        "step_ms": 1e3 * seconds,
        "memory_gib": peak_memory_gib(device),
        "first_loss": first,
        "last_loss": last,
        "steps": steps,
        "tokens_per_step": tokens,
    }


def _mark(device: torch.device) -> Any:
    """Now, by the device's clock: the host need not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(marks: list[Any]) -> list[float]:
    if isinstance(marks[0], float):
        return [after - before for before, after in pairwise(marks)]
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]


def installed(*packages: str) -> dict[str, str]:
    """The versions of those that are there."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def reply(contend: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """One request in, one line out."""
    request = json.load(sys.stdin)
    try:
        answer = contend(request)
    except UserError as error:
        answer = {"error": error.message()}
    except torch.OutOfMemoryError:
        answer = {"error": "it does not fit into memory."}
    except ModuleNotFoundError as error:
        answer = {"error": f"the package {error.name} is not installed."}
    sys.stdout.write(json.dumps(answer) + "\n")


class Heard:
    """What is to be known of the figures."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def event(self, event: Event) -> None:
        if event["type"] in ("warning", "recovery"):
            self.warnings.append(str(event["message"]))

    def tick(self, step: int, progress: float | None = None, eta_s: float | None = None) -> None:
        return

    def close(self) -> None:
        return


def contend(request: dict[str, Any]) -> Figures:
    recipe, facts = validate(request["recipe"], where="bench"), DataFacts(**request["facts"])
    resolved = resolve(recipe, detect(recipe.train.device), facts)
    module = objective_module(recipe.objective)
    objective = module.create(resolved, module.random_data(facts))
    heard = Heard()
    with (
        tempfile.TemporaryDirectory() as name,
        RunDirectory(Path(name)) as run,
        Monitor(EventLog(Path(name) / "events.jsonl"), heard) as monitor,
    ):
        trainer = Trainer(resolved, objective, run, monitor, horizon_steps=None, identity={})
        trainer.build()
        if recipe.train.precision == "fp8":  # a figure in that name is to be one
            told = [{"key": key, "value": value, "reason": why} for key, value, why in objective.choices()]
            if why_not := not_in_fp8("fp8", told, ()):
                raise UserError(why_not)
        begin = time.perf_counter()
        trainer.warm_up()
        warmup = time.perf_counter() - begin
        micro, total = trainer.batch.micro, trainer.batch.global_batch
        rows = random_rows(facts.vocab_size, total, recipe.data.seq_len, request["sample_tokens"])
        micros = [
            objective.laid_out(*(part[first : first + micro] for part in rows)) for first in range(0, total, micro)
        ]
        batch = step_batch(objective, [to_device(one, trainer.device) for one in micros])
        figures = time_steps(
            lambda number: trainer.step(number, batch, 1.0).loss,
            steps=request["steps"],
            tokens=resolved.tokens_per_step,
            device=trainer.device,
        )
    chosen = {choice.key: choice.value for choice in resolved.choices}
    return {
        **figures,
        "micro_batch": micro,
        "document_tokens": document_tokens(rows[2]),
        "warmup_s": warmup,
        "precision": recipe.train.precision,
        "compiled": recipe.train.compile,
        "recomputed": recipe.train.grad_checkpointing,
        "warnings": [*resolved.warnings, *heard.warnings],
        "choices": chosen | {key: value for key, value, _ in objective.choices()},
        "versions": installed(*PACKAGES),
    }


if __name__ == "__main__":
    reply(contend)
