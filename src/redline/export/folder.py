"""A run's weights as a folder that others load: written beside its name, read back, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from redline import __version__
from redline.cache import atomic_dir
from redline.errors import UserError
from redline.export.card import CARD
from redline.export.contents import MODEL, Contents, How, Say, Trained, model_contents
from redline.export.tensors import write_json, write_tensors
from redline.objectives import objective_module
from redline.recipe.identity import check_model
from redline.recipe.lock import locked_recipe, read_lock
from redline.train.weights import find_weights

WEIGHTS, ORIGIN = f"{MODEL}.safetensors", "redline.json"


@dataclass(frozen=True)
class Exported:
    out: Path
    step: int
    weights: str  # ema or raw
    form: str  # model, adapter or merged
    architecture: str
    parameters: int
    tokenizer: bool
    files: dict[str, int]  # name → bytes
    quantisation_difference: float | None  # of a base that was not merged onto as it was trained


def export_run(
    run: Path,
    selector: int | str | None,
    out: Path,
    *,
    weights: str | None = None,
    dtype: str = "fp32",
    merged: bool = False,
    onto: str | None = None,
    base: str | None = None,
    say: Say = lambda _: None,
) -> Exported:
    """Write `out`, whole or not at all."""
    out = out.resolve() if ".." in out.parts else out  # what lies before the dots need not be there
    refuse_content(out)
    lock = read_lock(run)
    trained = Trained(run, lock, locked_recipe(run, lock).recipe, find_weights(run, selector, weights, say))
    check_model(trained.weights.state["identity"], trained.recipe, run)
    contents = _contents(trained, How(dtype, merged, onto, base), say)
    about: dict[str, Any] = {}

    def write(folder: Path) -> None:
        write_tensors(folder, contents.stem, contents.shapes, contents.tensors(), dtype)
        about.update(_origin(trained, contents, dtype))
        for name, content in {**contents.files, ORIGIN: about}.items():
            write_json(folder / name, content)
        _write_tokenizer(contents, folder)
        (folder / CARD).write_text(contents.card(about), encoding="utf-8")

    _commit(out, write)
    return Exported(
        out=out,
        step=trained.weights.step,
        weights=trained.weights.kind,
        form=contents.form,
        architecture=contents.architecture,
        parameters=sum(prod(shape) for shape in contents.shapes.values()),
        tokenizer=contents.write_tokenizer is not None,
        files={path.name: path.stat().st_size for path in sorted(out.iterdir())},
        quantisation_difference=about.get("quantisation_difference"),
    )


def _write_tokenizer(contents: Contents, folder: Path) -> None:
    if contents.write_tokenizer is not None:
        try:
            contents.write_tokenizer(folder)
        except Exception as error:  # the tokenizers' library has no kind of its own for a full disk
            raise error if isinstance(error, OSError) else OSError(str(error)) from None


def _contents(trained: Trained, how: How, say: Say) -> Contents:
    if trained.recipe.model.base is None or not hasattr(objective_module(trained.recipe.objective), "export"):
        return model_contents(trained, how, say)
    from redline.export.tuned import tuned_contents

    return tuned_contents(trained, how, say)


def _origin(trained: Trained, contents: Contents, dtype: str) -> dict[str, Any]:
    recipe, data, weights = trained.recipe, trained.lock["data"], trained.weights
    return {
        "schema": 1,
        "redline": __version__,
        "run_id": trained.lock["run_id"],
        "step": weights.step,
        "weights": weights.kind,
        "averaged": weights.averaged,
        "eval_sequences": recipe.eval.sequences,
        "dtype": dtype,
        "objective": recipe.objective,
        "form": contents.form,
        "class": contents.architecture,
        "model_type": contents.model_type,
        "model": recipe.model.model_dump(mode="json"),
        "data_fingerprint": data["fingerprint"],
        "tokenizer": data["tokenizer"],
        "tokenizer_fingerprint": data["tokenizer_fingerprint"],
        **contents.origin(),
    }


def refuse_content(out: Path) -> None:
    if os.path.lexists(out) and not out.is_dir():
        raise UserError("is a file, not a folder.", where=str(out), fix="Name a new folder with --out.")
    if out.is_dir() and any(out.iterdir()):
        raise UserError("there is something already.", where=str(out), fix="Name a new or an empty folder with --out.")


def _commit(out: Path, write: Callable[[Path], None]) -> None:
    """Write the folder with `atomic_dir`; say in a sentence why it cannot be written."""
    try:
        with atomic_dir(out.resolve()) as temporary:  # resolved: an empty folder may be there by a link
            write(temporary)
    except (OSError, SafetensorError) as error:
        refuse_content(out)  # another process may have been first
        reason = getattr(error, "strerror", None) or str(error)
        fix = "Name another folder with --out, or free some disk."
        raise UserError(f"cannot be written ({reason}).", where=str(out), fix=fix) from None
