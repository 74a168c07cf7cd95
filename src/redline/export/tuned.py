"""What goes into the folder of a model that was tuned on a base: its adapter alone, or the whole of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline.cache import read_text
from redline.data.template import ChatTokenizer, load_chat_tokenizer
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
from redline.export.contents import MODEL, ORIGINAL, TRAINED, Contents, How, Say, Trained
from redline.export.tensors import Named
from redline.export.tuned_card import tuned_card
from redline.kernels.precision import DTYPES
from redline.models.families import FAMILIES, read_config
from redline.models.llama import names
from redline.models.pretrained import Base, open_base
from redline.models.stored import entries
from redline.objectives import objective_module
from redline.objectives.base import OnBase

GENERATION = "generation_config.json"
# of a base's config.json: what was true of its files, and code of its own that the known classes do not need
_NOT_TAKEN_OVER = ("dtype", "torch_dtype", "quantization_config", "_name_or_path", "auto_map", "transformers_version")


@dataclass(frozen=True)
class _Tuned:
    trained: Trained
    learnt: OnBase
    base: Base
    tokenizer: ChatTokenizer


def tuned_contents(trained: Trained, how: How, say: Say) -> Contents:
    learnt: OnBase = objective_module(trained.recipe.objective).export(trained.recipe, trained.weights.tensors())
    _refuse_nonsense(learnt, how, trained.run)
    base = _base(learnt, how, trained, say)
    one = _Tuned(trained, learnt, base, _tokenizer(learnt, base, trained))
    if learnt.adapter is None:
        return _whole(one, how, "model", lambda: whole_tensors(learnt, base), dict)
    return _merged(one, how, say) if how.merged else _adapter(one)


def _refuse_nonsense(learnt: OnBase, how: How, run: Path) -> None:
    if how.onto and learnt.adapter is None:
        what = "all weights of this run learnt: there are no adapters to put onto anything."
        raise UsageError(what, where=str(run), fix="Leave out --onto.")
    if how.onto and not how.merged:
        raise UsageError("is for --merged: an adapter alone is put onto nothing.", where="--onto", fix="Add --merged.")


def _base(learnt: OnBase, how: How, trained: Trained, say: Say) -> Base:
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


def _tokenizer(learnt: OnBase, base: Base, trained: Trained) -> ChatTokenizer:
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
        origin=lambda: _origin(one),
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
        origin=lambda: {**_origin(one), **said()},
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


def _origin(one: _Tuned) -> dict[str, Any]:
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
    return lambda origin: tuned_card(trained.run, trained.lock, origin, template=template)
