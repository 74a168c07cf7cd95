"""A run's weights as a folder that others load: written beside its name, read back, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from redline import __version__
from redline.cache import atomic_dir, read_text
from redline.data.chat_template import ChatTokenizer, load_chat_tokenizer
from redline.data.tokenizer import Tokenizer
from redline.errors import UsageError, UserError
from redline.export.adapter import (
    ADAPTER,
    ADAPTER_CONFIG,
    Drift,
    adapter_config,
    address,
    base_name,
    hub_id,
    is_unpacked,
    merged_tensors,
    revision,
    to_peft,
    whole_tensors,
)
from redline.export.card import CARD, finetuned_card, model_card
from redline.export.tensors import Named, Shapes, write_json, write_tensors
from redline.export.tokenizer import end_of_text, run_tokenizer, write_tokenizer
from redline.jobs.base import job
from redline.jobs.objective import FinetunedModel, TransformersModel, job_runtime
from redline.kernels.matmul import DTYPES
from redline.models.families import FAMILIES, names, read_config
from redline.models.pretrained import Base, entries, open_base
from redline.recipe.lock import check_model_identity, locked_recipe, read_lock
from redline.recipe.schema import Recipe
from redline.training.checkpoint import Weights, find_weights

# ----------------------------------------------------------------------------------------------------
# What goes into an exported folder. Here: of a model that was trained whole; tuned.py has those on a base.


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
    if not job(recipe.objective).exports:
        what = f"transformers knows no model of objective={recipe.objective}."
        fix = "Use `redline sample` and `redline eval`; a checkpoint's weights are safetensors."
        raise UserError(what, where=str(trained.run), fix=fix)
    tokenizer = run_tokenizer(trained.run, data["tokenizer"], data["tokenizer_fingerprint"])
    if tokenizer is None:
        say(f"the files of the tokenizer {data['tokenizer']} are not here: the folder will have none")
    try:
        form = _exported(trained, how, tokenizer)
    except UserError as error:
        raise UserError(error.what, where=str(trained.run), fix=error.fix) from None
    assert isinstance(form, TransformersModel)
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


def _exported(trained: Trained, how: How, tokenizer: Tokenizer | None) -> TransformersModel | FinetunedModel:
    data = trained.lock["data"]
    return job_runtime(trained.recipe.objective).export(
        trained.recipe,
        trained.weights.tensors(),
        eot=lambda: end_of_text(tokenizer, data["tokenizer"]),
        vocab_size=data["vocab_size"],
        dtype=how.dtype,
    )


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
    check_model_identity(trained.weights.state["identity"], trained.recipe, run)
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
    if trained.recipe.model.base is None or not job(trained.recipe.objective).exports:
        return model_contents(trained, how, say)

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


# ----------------------------------------------------------------------------------------------------
# What goes into the folder of a model that was tuned on a base: its adapter alone, or the whole of it.


GENERATION = "generation_config.json"
# of a base's config.json: what was true of its files, and code of its own that the known classes do not need
_NOT_TAKEN_OVER = ("dtype", "torch_dtype", "quantization_config", "_name_or_path", "auto_map", "transformers_version")


@dataclass(frozen=True)
class _Tuned:
    trained: Trained
    learnt: FinetunedModel
    base: Base
    tokenizer: ChatTokenizer


def tuned_contents(trained: Trained, how: How, say: Say) -> Contents:
    learnt = _exported(trained, how, None)
    assert isinstance(learnt, FinetunedModel)
    _refuse_nonsense(learnt, how, trained.run)
    base = _base(learnt, how, trained, say)
    one = _Tuned(trained, learnt, base, _tokenizer(learnt, base, trained))
    if learnt.adapter is None:
        return _whole(one, how, "model", lambda: whole_tensors(learnt, base), dict)
    return _merged(one, how, say) if how.merged else _adapter(one)


def _refuse_nonsense(learnt: FinetunedModel, how: How, run: Path) -> None:
    if how.onto and learnt.adapter is None:
        what = "all weights of this run learnt: there are no adapters to put onto anything."
        raise UsageError(what, where=str(run), fix="Leave out --onto.")
    if how.onto and not how.merged:
        raise UsageError("is for --merged: an adapter alone is put onto nothing.", where="--onto", fix="Add --merged.")


def _base(learnt: FinetunedModel, how: How, trained: Trained, say: Say) -> Base:
    """The one the run was trained on, and no other."""
    spec = how.base or learnt.base
    try:
        base = open_base(spec, say)
    except UserError as error:
        fix = error.fix if how.base else f"{error.fix or ''} If the run's base lies elsewhere now: --base PATH.".strip()
        raise type(error)(error.what, where=error.where, fix=fix) from None
    recorded = str(trained.weights.state["identity"].get("base"))
    if base.fingerprint != recorded:
        what = f"is not the base of this run (its fingerprint is {base.fingerprint[:12]}, the run's {recorded[:12]})."
        fix = f"Name the one it was trained on with --base; it was {learnt.base} then."
        raise UserError(what, where=spec, fix=fix)
    return base


def _tokenizer(learnt: FinetunedModel, base: Base, trained: Trained) -> ChatTokenizer:
    found = load_chat_tokenizer(base.folder, learnt.template)
    known = trained.weights.state["identity"]
    if found.fingerprint != known["tokenizer"]:
        what, fix = "this is not the tokenizer of the run.", "Put the base's own files back."
        raise UserError(what, where=str(base.folder), fix=fix)
    if found.identity != known.get("template", found.identity):
        what, fix = "its chat template is not the one of the run any more.", "Put the old one back."
        raise UserError(what, where=learnt.template or str(base.folder), fix=fix)
    return found


# --- the adapter alone


def _adapter(one: _Tuned) -> Contents:
    learnt, base = one.learnt, one.base
    assert learnt.adapter is not None
    tensors = to_peft(learnt.tensors, base.shape, learnt.adapter, learnt.lora)
    return Contents(
        form="adapter",
        architecture=_architecture(base),
        model_type=base.family,
        stem=ADAPTER,
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        tensors=tensors.items,
        files={ADAPTER_CONFIG: adapter_config(learnt, base), GENERATION: _generation(base, one.tokenizer)},
        write_tokenizer=one.tokenizer.save,
        card=_card(one),
        origin=lambda: _base_origin(one),
    )


# --- the whole model


def _merged(one: _Tuned, how: How, say: Say) -> Contents:
    adapter, onto = one.learnt.adapter, how.onto or TRAINED
    assert adapter is not None
    device = _device(one.trained.recipe.train.device, say) if adapter.quantised else torch.device("cpu")
    drift = Drift() if adapter.quantised and onto == ORIGINAL else None

    def said() -> dict[str, Any]:
        found = {"onto": onto, **({"quantised_on": device.type} if adapter.quantised else {})}
        return found if drift is None else {**found, "quantisation_difference": drift.relative}

    return _whole(one, how, "merged", lambda: merged_tensors(one.learnt, one.base, device, drift), said)


def _device(trained_on: str, say: Say) -> torch.device:
    """The kind that quantised the base in training: the two round a few scales differently."""
    if trained_on == "cuda" and not torch.cuda.is_available():
        say("the base was quantised on a GPU and there is none here: a few of its scales may round differently")
        return torch.device("cpu")
    return torch.device(trained_on)


def _whole(
    one: _Tuned, how: How, form: str, tensors: Callable[[], Named], said: Callable[[], dict[str, Any]]
) -> Contents:
    base = one.base
    found = entries(base.folder)
    return Contents(
        form=form,
        architecture=_architecture(base),
        model_type=base.family,
        stem=MODEL,
        shapes={name: found[name].shape for _, theirs, _ in names(base.shape) for name in theirs},
        tensors=tensors,
        files={"config.json": _config(base, how.dtype), GENERATION: _generation(base, one.tokenizer)},
        write_tokenizer=one.tokenizer.save,
        card=_card(one),
        origin=lambda: {**_base_origin(one), **said()},
    )


def _config(base: Base, dtype: str) -> dict[str, Any]:
    """The base's own, and what its weights know better."""
    kept = {key: value for key, value in read_config(base.folder).items() if key not in _NOT_TAKEN_OVER}
    return {
        **kept,
        "architectures": [_architecture(base)],
        "model_type": base.family,
        "vocab_size": base.model["vocab"],
        "tie_word_embeddings": base.model["tied"],
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
    }


def _generation(base: Base, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the base's generation_config.json with the end mark of the chat template added to its stop tokens."""
    try:
        own = json.loads(read_text(base.folder / GENERATION))
        own = own if isinstance(own, dict) else {}
    except (OSError, ValueError):
        own = {}
    ends = own.get("eos_token_id", read_config(base.folder).get("eos_token_id"))
    stops = [*tokenizer.eos_ids, *(ends if isinstance(ends, list) else [ends])]
    unique = list(dict.fromkeys(stop for stop in stops if isinstance(stop, int)))
    own.pop("transformers_version", None)
    return {"pad_token_id": tokenizer.pad, **own, "eos_token_id": unique}


# --- what is said of it


def _architecture(base: Base) -> str:
    return next(name for name, family in FAMILIES.items() if family == base.family)


def _base_origin(one: _Tuned) -> dict[str, Any]:
    adapter, base = one.learnt.adapter, one.base
    quantised = adapter is not None and adapter.quantised
    return {
        "method": one.learnt.method,
        "quantisation": {"type": "nf4", "double": adapter.double} if adapter is not None and quantised else None,
        "base": {
            "source": base.source,
            "name": base_name(base),
            "hub_id": hub_id(base),
            **({"unpacked_from_gguf": True} if is_unpacked(base) else {}),
            "loads_from": address(base),
            "revision": revision(base),
            "fingerprint": base.fingerprint,
        },
    }


def _card(one: _Tuned) -> Callable[[Mapping[str, Any]], str]:
    trained, template = one.trained, one.tokenizer.template is not None
    learn = one.learnt.learn
    return lambda origin: finetuned_card(trained.run, trained.lock, origin, learn=learn, template=template)
