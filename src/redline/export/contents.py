"""What goes into an exported folder. Here: of a model that was trained whole; tuned.py has those on a base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.errors import UsageError, UserError
from redline.export.card import model_card
from redline.export.tensors import Named, Shapes
from redline.export.tokenizer import end_of_text, run_tokenizer, write_tokenizer
from redline.objectives import objective_module
from redline.objectives.base import PublicForm
from redline.recipe.schema import Recipe
from redline.train.weights import Weights

MODEL = "model"
TRAINED, ORIGINAL = "trained", "original"  # what adapters are merged onto

Say = Callable[[str], None]


@dataclass(frozen=True)
class Trained:
    """A run, at a checkpoint."""

    run: Path
    lock: dict[str, Any]
    recipe: Recipe
    weights: Weights


@dataclass(frozen=True)
class How:
    """What was asked for."""

    dtype: str = "fp32"
    merged: bool = False
    onto: str | None = None
    base: str | None = None  # where the run's base lies now


@dataclass(frozen=True)
class Contents:
    form: str  # model, adapter or merged
    architecture: str
    model_type: str
    stem: str  # of the files of weights
    shapes: Shapes
    tensors: Callable[[], Named]  # in the order of `shapes`
    files: dict[str, Mapping[str, Any]]  # JSON: config.json and others
    write_tokenizer: Callable[[Path], None] | None
    card: Callable[[Mapping[str, Any]], str]  # of what redline.json says
    origin: Callable[[], dict[str, Any]] = field(default=dict)  # more of that, known when the tensors are written


def model_contents(trained: Trained, how: How, say: Say) -> Contents:
    """Of a model that the run made from nothing."""
    if how.merged or how.onto or how.base:
        what = "this run trained a model of its own: it has no base, and nothing to merge."
        raise UsageError(what, where=str(trained.run), fix="Leave out --merged, --onto and --base.")
    recipe, data = trained.recipe, trained.lock["data"]
    module = objective_module(recipe.objective)
    if not hasattr(module, "export"):
        what = f"transformers knows no model of objective={recipe.objective}."
        fix = "Use `redline sample` and `redline eval`; a checkpoint's weights are safetensors."
        raise UserError(what, where=str(trained.run), fix=fix)
    tokenizer = run_tokenizer(trained.run, data["tokenizer"], data["tokenizer_fingerprint"])
    if tokenizer is None:
        say(f"the files of the tokenizer {data['tokenizer']} are not here: the folder will have none")
    try:
        form: PublicForm = module.export(
            recipe,
            trained.weights.tensors(),
            eot=end_of_text(tokenizer, data["tokenizer"]),
            vocab_size=data["vocab_size"],
            dtype=how.dtype,
        )
    except UserError as error:
        raise UserError(error.what, where=str(trained.run), fix=error.fix) from None
    return Contents(
        form="model",
        architecture=form.architecture,
        model_type=str(form.config["model_type"]),
        stem=MODEL,
        shapes={name: tuple(tensor.shape) for name, tensor in form.tensors.items()},
        tensors=form.tensors.items,
        files={"config.json": form.config, "generation_config.json": form.generation},
        write_tokenizer=None
        if tokenizer is None
        else lambda folder: write_tokenizer(tokenizer, folder, seq_len=recipe.data.seq_len),
        card=lambda origin: model_card(trained.run, trained.lock, origin, tokenizer=tokenizer is not None),
    )
