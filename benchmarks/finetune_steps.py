"""Timed steps of fine-tuning on random rows: redline's rows of `python -m benchmarks finetune`, and the shared timing.

    python -m benchmarks.finetune_steps < request.json

The request holds a resolved recipe, the facts of its data, the number of `steps` to time, and `sample_tokens` if a row
holds several samples. The answer is one line of JSON. The base has random weights: nothing is downloaded.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.reply import reply
from redline.bench.throughput import why_not_fp8
from redline.data.loader import cu_seqlens
from redline.errors import UserError
from redline.recipe.resolve import DataFacts
from redline.training.step import peak_memory_gib, step_batch, to_device
from redline.training.trial import WarmTrainer, warm_trainer

SETTLE_STEPS = 3  # before the timed steps
PACKAGES = ("torch", "triton", "bitsandbytes")

Figures = dict[str, Any]


def random_rows(vocab: int, rows: int, length: int, sample_tokens: int | None) -> tuple[np.ndarray, ...]:
    """Return inputs, targets and documents, each [rows, length]. The same arguments give the same rows."""
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
    """Return the length of the document that a token is in, averaged over tokens."""
    lengths = np.diff(cu_seqlens(documents)).astype(np.float64)
    return float((lengths**2).sum() / lengths.sum())


def time_steps(step: Callable[[int], Tensor], *, steps: int, tokens: int, device: torch.device) -> Figures:
    """Return the figures of the median step, after some untimed ones; the first loss is that of the base."""
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
    """Return the time now by the device's clock, so that the host need not wait for the device."""
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
    """Return the versions of those packages that are installed."""
    versions = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def measure(request: dict[str, Any]) -> Figures:
    with warm_trainer(request["recipe"], DataFacts(**request["facts"]), where="bench") as own:
        if own.resolved.recipe.train.precision == "fp8":  # a row called fp8 must compute in fp8
            choices = [{"key": key, "value": value, "reason": why} for key, value, why in own.objective.choices()]
            if why_not := why_not_fp8("fp8", choices):
                raise UserError(why_not)
        batch, documents = step_of(own, request["sample_tokens"])
        figures = time_steps(
            lambda number: own.trainer.train_step(number, batch, 1.0).loss,
            steps=request["steps"],
            tokens=own.resolved.tokens_per_step,
            device=own.trainer.device,
        )
    return {
        **figures,
        **own.settings(),
        "document_tokens": document_tokens(documents),
        "recomputed": own.resolved.recipe.train.grad_checkpointing,
        "versions": installed(*PACKAGES),
    }


def step_of(own: WarmTrainer, sample_tokens: int | None) -> tuple[Any, np.ndarray]:
    """Return one step's batch of random rows on the device, and the document of each token."""
    micro, total = own.trainer.batch.micro, own.trainer.batch.global_batch
    rows = random_rows(own.facts.vocab_size, total, own.resolved.recipe.data.seq_len, sample_tokens)
    parts = [tuple(part[first : first + micro] for part in rows) for first in range(0, total, micro)]
    micros = [to_device(own.objective.laid_out(*part), own.trainer.device) for part in parts]
    return step_batch(own.objective, micros), rows[2]


if __name__ == "__main__":
    reply(measure)
