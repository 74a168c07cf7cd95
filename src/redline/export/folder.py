"""A run's weights as a folder that transformers loads: written beside its name, read back, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from redline import __version__
from redline.cache import sync, temporary_sibling
from redline.errors import UserError
from redline.export.card import CARD, model_card
from redline.export.tokenizer import end_of_text, run_tokenizer, write_tokenizer
from redline.objectives import objective_module
from redline.objectives.base import PublicForm
from redline.recipe.lock import locked_recipe, read_lock
from redline.train.checkpoint import Tensors
from redline.train.weights import find_weights

WEIGHTS, ORIGIN = "model.safetensors", "redline.json"


@dataclass(frozen=True)
class Exported:
    out: Path
    step: int
    weights: str  # ema or raw
    architecture: str
    parameters: int
    tokenizer: bool
    files: dict[str, int]  # name → bytes


def export_run(
    run: Path,
    selector: int | str | None,
    out: Path,
    *,
    weights: str | None = None,
    dtype: str = "fp32",
    say: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Write `out`, whole or not at all."""
    refuse_content(out)
    lock = read_lock(run)
    recipe, data = locked_recipe(run, lock).recipe, lock["data"]
    chosen = find_weights(run, selector, weights, say)
    tokenizer = run_tokenizer(run, data["tokenizer"], data["tokenizer_fingerprint"])
    if tokenizer is None:
        say(f"the files of the tokenizer {data['tokenizer']} are not here: the folder will have none")
    try:
        form: PublicForm = objective_module(recipe.objective).export(
            recipe,
            chosen.tensors(),
            eot=end_of_text(tokenizer, data["tokenizer"]),
            vocab_size=data["vocab_size"],
            dtype=dtype,
        )
    except UserError as error:
        raise UserError(error.what, where=str(run), fix=error.fix) from None
    _refuse_overflow(form.tensors, dtype)
    origin = {
        "schema": 1,
        "redline": __version__,
        "run_id": lock["run_id"],
        "step": chosen.step,
        "weights": chosen.kind,
        "averaged": chosen.averaged,
        "eval_sequences": recipe.eval.sequences,
        "dtype": dtype,
        "objective": recipe.objective,
        "class": form.architecture,
        "model_type": form.config["model_type"],
        "model": recipe.model.model_dump(mode="json"),
        "data_fingerprint": data["fingerprint"],
        "tokenizer": data["tokenizer"],
        "tokenizer_fingerprint": data["tokenizer_fingerprint"],
    }

    def write(folder: Path) -> None:
        save_file(form.tensors, folder / WEIGHTS, metadata={"format": "pt"})
        _write_json(folder / "config.json", form.config)
        _write_json(folder / "generation_config.json", form.generation)
        _write_json(folder / ORIGIN, origin)
        if tokenizer is not None:
            write_tokenizer(tokenizer, folder, seq_len=recipe.data.seq_len)
        card = model_card(run, lock, origin, tokenizer=tokenizer is not None)
        (folder / CARD).write_text(card, encoding="utf-8")
        _check_written(folder, form.tensors)

    _commit(out, write)
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    count = sum(tensor.numel() for tensor in form.tensors.values())
    return Exported(out, chosen.step, chosen.kind, form.architecture, count, tokenizer is not None, files)


def refuse_content(out: Path) -> None:
    if os.path.lexists(out) and not out.is_dir():
        raise UserError("is a file, not a folder.", where=str(out), fix="Name a new folder with --out.")
    if out.is_dir() and any(out.iterdir()):
        raise UserError("there is something already.", where=str(out), fix="Name a new or an empty folder with --out.")


def _refuse_overflow(tensors: Tensors, dtype: str) -> None:
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        fix = "Use --dtype bf16 or fp32." if dtype == "fp16" else "Export an earlier checkpoint (RUN@STEP)."
        raise UserError(f"{bad[0]} is not finite in {dtype}.", where=WEIGHTS, fix=fix)


def _check_written(folder: Path, tensors: Tensors) -> None:
    """Whatever the disk made of it, a folder gets its name only if it reads back as it was meant."""
    written = load_file(folder / WEIGHTS)
    if written.keys() != tensors.keys() or not all(torch.equal(written[name], tensors[name]) for name in tensors):
        raise OSError("what was written does not read back")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _commit(out: Path, write: Callable[[Path], None]) -> None:
    """A temporary sibling, synced and renamed; a folder with content is never replaced (POSIX rename)."""
    final = out.resolve()  # an empty folder may be there by a link
    temporary = temporary_sibling(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        write(temporary)
        for path in [*temporary.iterdir(), temporary]:
            sync(path)
        temporary.rename(final)
        sync(final.parent)
    except (OSError, SafetensorError) as error:
        refuse_content(out)  # another process may have been first
        reason = getattr(error, "strerror", None) or str(error)
        fix = "Name another folder with --out, or free some disk."
        raise UserError(f"cannot be written ({reason}).", where=str(out), fix=fix) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
