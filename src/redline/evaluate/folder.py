"""A model that is no run, opened for looking: a pretrained base, or an adapter in PEFT's layout on its base.

What `redline export` merged is a base like any other. An adapter that it wrote says in redline.json which base it is
for and how that was quantised; PEFT's own say the first only, and are put on the base as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from redline.data.template import load_chat_tokenizer
from redline.errors import UsageError, UserError
from redline.evaluate.peft import AdapterFolder, is_adapter, read_adapter
from redline.evaluate.trained import Trained
from redline.export.adapter import from_peft
from redline.hardware.detect import detect
from redline.models.pretrained import Base, open_base
from redline.objectives import finetune
from redline.recipe.load import validate
from redline.recipe.resolve import DataFacts, resolve
from redline.recipe.schema import Recipe
from redline.train.weights import copy_weights

# Rows are scored in sequences of so many tokens, or of as many as the base was made for.
_SEQ_LEN, _AT_ONCE = 2048, 8
_ELSEWHERE = "Say where its base lies: --base PATH."
_KINDS = ("config.json", "adapter_config.json", "*.gguf")

Say = Callable[[str], None]


def open_folder(
    spec: str,
    *,
    base: str | None = None,
    source: str | None = None,
    sequences: int | None = None,
    writes_only: bool = False,
    device: str = "auto",
    say: Say = lambda _: None,
) -> Trained:
    """A folder, a .gguf file or a hub id; `base` is where an adapter's base lies, if not where the adapter says."""
    folder = Path(spec).expanduser()
    if folder.is_dir() and not any(any(folder.glob(kind)) for kind in _KINDS):
        what = f"is neither a run nor a model: it has no lock.json, and nothing like {', '.join(_KINDS)}."
        raise UsageError(
            what, where=spec, fix="`redline runs` lists the runs; a model is a folder, a .gguf or a hub id."
        )
    adapter = read_adapter(folder) if is_adapter(folder) else None
    if base is not None and adapter is None:
        raise UsageError("--base is for an adapter, and this is none.", where=spec, fix="Leave it out.")
    if source is None and not writes_only:
        what = "has no rows of its own to be evaluated on."
        raise UsageError(what, where=spec, fix="Name some: --data FILE.")
    found = open_base(spec, say) if adapter is None else _base_of(adapter, base, say)
    machine = detect(device, "--device ")
    recipe = finetune.complete(_recipe(found, adapter, source, sequences, machine.device), lambda _: None)
    if writes_only:
        data = finetune.FinetuneData(_facts(found, adapter), found)
    else:
        data = finetune.load_data(recipe, for_evaluation=True)
        for line in data.told:  # what is left out is not in the figures
            say(line)
    resolved = resolve(recipe, machine, data.facts)
    objective = finetune.create(resolved, data)
    if adapter is None:
        assert objective.adapter is not None
        objective.adapter = replace(objective.adapter, targets=())  # nothing is learnt on it
    objective.build(torch.device(machine.device))
    if adapter is not None:
        _take(objective, adapter)
    objective.model.eval()
    kind, title = ("base", spec) if adapter is None else ("adapter", f"{spec} on {found.source}")
    return Trained(spec, title, objective, None, kind, resolved.batch.micro)


def _base_of(adapter: AdapterFolder, given: str | None, say: Say) -> Base:
    places = (given,) if given else adapter.bases
    if not places:
        raise UserError("does not say which base it is for.", where=str(adapter.folder), fix=_ELSEWHERE)
    base = _first(places, adapter.folder, say)
    if adapter.fingerprint is not None and base.fingerprint != adapter.fingerprint:
        what = f"was trained on another base than {base.source} is now."
        raise UserError(what, where=str(adapter.folder), fix=_ELSEWHERE)
    return base


def _first(places: Sequence[str], folder: Path, say: Say) -> Base:
    """The first that is there; if none is, what is wrong with the first."""
    errors = []
    for place in places:
        try:
            return open_base(place, say)
        except UserError as error:
            errors.append(error)
    raise UserError(errors[0].what, where=f"{folder}: its base {places[0]}", fix=_ELSEWHERE)


def _recipe(
    base: Base, adapter: AdapterFolder | None, source: str | None, sequences: int | None, device: str
) -> Recipe:
    """As if it had been fine-tuned here: what looks at a run then looks at this too."""
    quant = "none" if adapter is None else adapter.quant
    model: dict[str, Any] = {"base": base.source, "quant": quant}
    if adapter is not None:
        model |= {"quant_double": adapter.quant_double, "lora": adapter.lora}
    tree = {
        "objective": "finetune",
        "model": model,
        "data": {
            "source": source or "embedded",
            "tokenizer": "base",
            "seq_len": min(base.context, _SEQ_LEN),
            "pack": True,
        },
        "finetune": {
            "method": "qlora" if quant == "nf4" else "lora",
            "template": adapter.template if adapter else None,
        },
        "train": {"steps": 1, "global_batch": _AT_ONCE, "device": device, "compile": False},
        "eval": {"sequences": sequences or 1 << 40},
    }
    return validate(tree, where=base.source if adapter is None else str(adapter.folder))


def _facts(base: Base, adapter: AdapterFolder | None) -> DataFacts:
    tokenizer = load_chat_tokenizer(base.folder, adapter.template if adapter else None)
    return DataFacts(tokenizer.vocab_size, 0, 0, "", tokenizer.name, tokenizer.fingerprint)


def _take(objective: finetune.Finetune, adapter: AdapterFolder) -> None:
    """The adapter's matrices into the model's."""
    assert objective.adapter is not None
    shape = objective.resolved.shape
    beyond = [name for name in adapter.tensors if int(re.search(r"\d+", name)[0]) >= shape.layers]  # type: ignore[index]
    if beyond:
        what = f"holds {beyond[0]}, and its base has {shape.layers} layers."
        raise UserError(what, where=str(adapter.folder), fix=_ELSEWHERE)
    try:
        tensors = from_peft(adapter.tensors, shape, objective.adapter, objective.recipe.model.lora)
    except UserError as error:
        fix = "Copy the adapter again, or say where its base lies: --base PATH."
        raise UserError(error.what, where=str(adapter.folder), fix=fix) from None
    learnt = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
    copy_weights(learnt, tensors, str(adapter.folder))
