"""A run, opened for looking: its objective with trained weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from redline.errors import UserError
from redline.hardware.detect import detect
from redline.objectives import objective_module
from redline.objectives.base import Objective
from redline.recipe.lock import locked_recipe, read_lock
from redline.recipe.resolve import resolve
from redline.train.checkpoint import pick, read_state, read_tensors

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Trained:
    run: Path
    objective: Objective
    step: int
    weights: str  # "ema" or "raw"
    micro: int


def open_trained(
    run: Path,
    selector: int | str | None = None,
    *,
    weights: str | None = None,
    source: str | None = None,
    sequences: int | None = None,
    device: str = "auto",
    say: Callable[[str], None] = lambda _: None,
) -> Trained:
    """The weights of a checkpoint in a model as the run built it; `source` is other data to evaluate on."""
    recipe = locked_recipe(run, read_lock(run)).recipe
    machine = detect(device)
    precision = recipe.train.precision if machine.device == "cuda" or recipe.train.precision != "fp16" else "fp32"
    recipe = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(
                update={"device": machine.device, "precision": precision, "compile": False}
            ),
            "model": recipe.model.model_copy(update={"attention": "auto"}),
            "data": recipe.data.model_copy(update=_other_data(run, source) if source else {}),
            "eval": recipe.eval.model_copy(update={"sequences": sequences} if sequences else {}),
        }
    )
    checkpoint = pick(run / "checkpoints", selector, say)
    chosen = _weights(checkpoint, weights)
    module = objective_module(recipe.objective)
    data = module.load_data(recipe, for_evaluation=source is not None)
    _same_tokenizer(checkpoint, data.facts.tokenizer_fingerprint, run)
    resolved = resolve(recipe, machine, data.facts)
    objective: Objective = module.create(resolved, data)
    objective.build(torch.device(machine.device))
    saved = read_tensors(checkpoint, "ema" if chosen == "ema" else "model")
    with torch.no_grad():
        for name, parameter in objective.model.named_parameters():
            parameter.copy_(saved[name])
    objective.model.eval()
    return Trained(run, objective, int(read_state(checkpoint)["step"]), chosen, resolved.batch.micro)


def _other_data(run: Path, source: str) -> dict[str, str]:
    """Other text is cut into tokens by the run's own tokenizer."""
    own = run / TOKENIZER
    return {"source": source, "tokenizer": str(own)} if own.is_file() else {"source": source}


def _weights(checkpoint: Path, asked: str | None) -> str:
    averaged = (checkpoint / "ema.safetensors").is_file()
    if asked == "ema" and not averaged:
        raise UserError("this run kept no moving average.", where=str(checkpoint), fix="Use --weights raw.")
    return asked or ("ema" if averaged else "raw")


def _same_tokenizer(checkpoint: Path, fingerprint: str, run: Path) -> None:
    if read_state(checkpoint)["identity"]["tokenizer"] != fingerprint:
        fix = "Prepare the text with the run's own tokenizer."
        raise UserError("the data were made with another tokenizer than the run.", where=str(run), fix=fix)
