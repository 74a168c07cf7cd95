"""The weights of a checkpoint, for everything but training on: looking, exporting, beginning another run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.errors import UserError
from redline.train.checkpoint import Tensors, files_of, pick, read_manifest, read_state, read_tensors


@dataclass(frozen=True)
class Weights:
    checkpoint: Path
    kind: str  # "ema" or "raw"
    averaged: bool  # whether there is an average to choose
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file that holds them, or of those that do."""
        entries = read_manifest(self.checkpoint)["files"]
        digests = [entries[name]["sha256"] for name in files_of(self.checkpoint, self._stem)]
        return str(digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest())

    def tensors(self) -> Tensors:
        return read_tensors(self.checkpoint, self._stem)

    @property
    def _stem(self) -> str:
        return "ema" if self.kind == "ema" else "model"


@torch.no_grad()
def copy_weights(parameters: Mapping[str, Tensor], tensors: Tensors, where: str) -> None:
    """Into the model, on whatever device it is; a UserError names what does not fit."""
    for name, parameter in parameters.items():
        found = tensors.get(name)
        if found is None or found.shape != parameter.shape:
            shape = "missing" if found is None else f"of shape {list(found.shape)}"
            fix = "Take weights of a model of this shape."
            raise UserError(f"{name} is {shape}, not {list(parameter.shape)}.", where=where, fix=fix)
        parameter.copy_(found)


def find_weights(
    run: Path,
    selector: int | str | None = None,
    kind: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Weights:
    """Those of `RUN[@selector]`, verified: the moving average if there is one, unless `kind` says otherwise."""
    checkpoint = pick(run / "checkpoints", selector, say)
    averaged = bool(files_of(checkpoint, "ema"))
    if kind == "ema" and not averaged:
        raise UserError("this run kept no moving average.", where=str(checkpoint), fix="Use --weights raw.")
    return Weights(checkpoint, kind or ("ema" if averaged else "raw"), averaged, read_state(checkpoint))
