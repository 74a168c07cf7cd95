"""A run, opened for looking: its objective with trained weights. `folder` opens what is no run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from redline.cache import check_regular, read_text
from redline.data.chat_template import load_chat_tokenizer
from redline.data.shards import OtherTokenizerError
from redline.errors import UsageError, UserError
from redline.export.adapter import ADAPTER, ADAPTER_CONFIG, from_peft
from redline.export.folder import ORIGIN
from redline.hardware.probe import detect_machine
from redline.jobs.base import BASE_MODEL_JOB, job
from redline.jobs.objective import Objective, ignore_message, job_runtime
from redline.models.pretrained import Base, open_base
from redline.planning.shapes import TARGETS
from redline.recipe.load import parse_overrides, validate
from redline.recipe.lock import check_model_identity, locked_recipe, read_lock
from redline.recipe.resolve import DataFacts, adapt_to_world, resolve
from redline.recipe.schema import Recipe
from redline.training.checkpoint import copy_weights, find_weights

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Trained:
    name: str  # the run's path, or what was given in place of one
    title: str  # which weights these are, for people
    objective: Objective
    step: int | None  # None: not of a run
    weights: str  # "ema" or "raw" of a run, otherwise "base" or "adapter"
    micro: int
    notes: Sequence[str] = ()  # what was said when it was opened: rows that are not in the figures, say
    training: Recipe | None = None  # the run's own recipe, where other data than its own are evaluated

    def about(self) -> dict[str, Any]:
        """For programs: which weights these are."""
        return {"run": self.name, "step": self.step, "weights": self.weights}


def open_trained(
    run: Path,
    selector: int | str | None = None,
    *,
    weights: str | None = None,
    base: str | None = None,
    source: str | None = None,
    text_key: str | None = None,
    sequences: int | None = None,
    writes_only: bool = False,
    answers: bool = False,
    settings: Sequence[str] = (),
    device: str = "auto",
    say: Callable[[str], None] = lambda _: None,
) -> Trained:
    """The weights of a checkpoint in a model as the run built it; `source` is other data to evaluate on.

    A model that `writes_only` needs the run's tokenizer and no data, so its run may have come from another machine.
    With `answers` it must be one that can answer questions. `settings` are KEY=VALUE of how it writes.
    """
    lock = read_lock(run)
    recipe = locked_recipe(run, lock).recipe
    runtime = job_runtime(recipe.objective)
    if answers and not job(recipe.objective).can_answer(recipe):
        what = f"is a {recipe.objective} run: it continues texts, and answers no questions."
        raise UsageError(what, where=str(run), fix="Leave out --answers for its loss; `redline sample` lets it write.")
    recipe = _with_settings(_with_base(recipe, base, run), settings)
    own = recipe if source is not None and not writes_only else None
    machine = detect_machine(device, "--device ")
    precision = _precision(recipe.train.precision, machine.device)
    recipe = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(
                update={"device": machine.device, "precision": precision, "compile": False}
            ),
            "model": recipe.model.model_copy(update={"attention": "auto"}),
            "data": recipe.data.model_copy(update=_other_data(run, source, text_key) if source else {}),
            "eval": recipe.eval.model_copy(update={"sequences": sequences} if sequences else {}),
        }
    )
    chosen = find_weights(run, selector, weights, say)
    check_model_identity(chosen.state["identity"], recipe, run)
    if writes_only:
        facts = DataFacts(**lock["data"])
        data = runtime.tokenizer_alone(facts, run, recipe)
    else:
        try:
            data = runtime.load_data(recipe, for_evaluation=source is not None)
        except OtherTokenizerError:
            raise _other_tokenizer(run) from None
        facts = data.facts
        if source is None and facts.fingerprint != chosen.state["identity"]["data"]:
            say("the data are not what the run was trained on any more: what is held out now, it may have learnt from")
    if chosen.state["identity"]["tokenizer"] != facts.tokenizer_fingerprint:
        raise _other_tokenizer(run)
    resolved = resolve(adapt_to_world(recipe, 1), machine, facts)  # whoever trained it, one process reads it
    objective: Objective = runtime.create(resolved, data)
    objective.log = say
    if source and not writes_only and not (answers and objective.reloads_rows_for_questions):
        for line in data.messages:  # rows that are left out are not in the figures
            say(line)
    _same_base(chosen.state, objective.identity(), run)
    objective.build(torch.device(machine.device))
    learnt = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
    copy_weights(learnt, chosen.tensors(), str(chosen.checkpoint))
    objective.model.eval()
    title = f"{run} at step {chosen.step} ({chosen.kind} weights)"
    return Trained(str(run), title, objective, chosen.step, chosen.kind, resolved.batch.micro, training=own)


def _with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """What does not belong to the weights may be changed later."""
    if not settings:
        return recipe
    if wrong := [word for word in settings if word.find("=") < 1]:
        fix = "Write for instance --set sampler_steps=4."
        raise UsageError(f"{wrong[0]!r} is not KEY=VALUE.", where="--set", fix=fix)
    own = getattr(recipe, recipe.objective)
    allowed = [f"{recipe.objective}.{name}" for name in own.settable_after_training]
    given = {key if "." in key else f"{recipe.objective}.{key}": v for key, v in parse_overrides(settings).items()}
    if refused := [key for key in given if key not in allowed]:
        what = f"{' and '.join(refused)} cannot be changed for a model that is trained."
        fix = f"There are {', '.join(allowed)}." if allowed else f"With objective={recipe.objective} nothing can."
        raise UsageError(what, where="--set", fix=fix)
    changes = {key.partition(".")[2]: value for key, value in given.items()}
    try:
        changed = type(own).model_validate({**own.model_dump(), **changes})
    except ValidationError as error:
        said = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise UsageError(f"{said.rstrip('.')}.", where=f"--set {' '.join(given)}", fix="See docs/keys.md.") from None
    recipe = recipe.model_copy(update={recipe.objective: changed})
    for problem in job(recipe.objective).problems(recipe):
        raise UsageError(problem.line(), where="--set")
    return recipe


def _precision(trained: str, device: str) -> str:
    """To compute in: fp8 is a way to train bf16 models, and fp16 is for GPUs."""
    return "bf16" if trained == "fp8" else "fp32" if trained == "fp16" and device == "cpu" else trained


def _with_base(recipe: Recipe, base: str | None, run: Path) -> Recipe:
    """Its base may lie elsewhere now; whether it is the same is looked at when it is there."""
    if base is None:
        return recipe
    if recipe.model.base is None:
        raise UsageError("--base is for what learnt on one, and this did not.", where=str(run), fix="Leave it out.")
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"base": base})})


def _other_data(run: Path, source: str, text_key: str | None) -> dict[str, Any]:
    """Other text is cut into tokens by the run's own tokenizer; all of it, and before anything is computed."""
    own = run / TOKENIZER
    tokenizer = {"tokenizer": str(own)} if own.is_file() else {}
    key = {"text_key": text_key} if text_key else {}
    return {"source": source, "dedup": False, "stream": False, **tokenizer, **key}


def _same_base(state: dict[str, Any], identity: dict[str, str], run: Path) -> None:
    known = state["identity"]  # an older one may not have all that is looked at now
    changed = [name for name, value in identity.items() if known.get(name, value) != value]
    if changed:
        what = f"its {' and '.join(changed)} is not what this run was trained on."
        raise UserError(what, where=str(run), fix="Put the old one back.")


def _other_tokenizer(run: Path) -> UserError:
    fix = "Prepare the text with the run's own tokenizer."
    return UserError("the data were made with another tokenizer than the run.", where=str(run), fix=fix)


# ----------------------------------------------------------------------------------------------------
# An adapter's folder in PEFT's layout, read and checked: what is in it, and which base it is for.


_WEIGHTS = f"{ADAPTER}.safetensors"
_NAME = re.compile(r"base_model\.model\.model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+)\.lora_[AB]\.weight")
# What PEFT can add to plain LoRA, or do to the base itself, and redline does not compute.
_MORE = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "layers_to_transform",
    "fan_in_fan_out",
)
_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")  # the others change the base
_AGAIN = "Export or copy it again."


@dataclass(frozen=True)
class AdapterFolder:
    folder: Path
    bases: tuple[str, ...]  # where its base is said to lie
    fingerprint: str | None  # of the base
    quant: str  # how the base was quantised in training
    quant_double: bool
    lora: dict[str, Any]  # recipe keys
    template: str | None
    tensors: dict[str, Tensor]  # under PEFT's names


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter(folder: Path) -> AdapterFolder:
    config, origin = _json(folder / ADAPTER_CONFIG), _json(folder / ORIGIN) if (folder / ORIGIN).is_file() else {}
    _refuse_more(config, folder / ADAPTER_CONFIG)
    tensors = _tensors(folder)
    recorded, quantised = _section(origin, "base"), _section(origin, "quantisation")
    places = (recorded.get("source"), recorded.get("loads_from"), config.get("base_model_name_or_path"))
    template = folder / "chat_template.jinja"  # the one it was trained with
    return AdapterFolder(
        folder=folder,
        bases=tuple(dict.fromkeys(str(place) for place in places if place)),
        fingerprint=recorded.get("fingerprint"),
        quant=str(quantised.get("type", "none")),
        quant_double=bool(quantised.get("double", True)),
        lora={
            "r": config.get("r", 8),
            "alpha": config.get("lora_alpha", 8),
            "target_modules": _targets(tensors, folder),
            "rslora": config.get("use_rslora", False),
        },
        template=str(template) if template.is_file() else None,
        tensors=tensors,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot be read ({type(error).__name__}).", where=str(path), fix=_AGAIN) from None
    if not isinstance(found, dict):
        raise UserError("holds no keys.", where=str(path), fix=_AGAIN)
    return found


def _section(origin: dict[str, Any], name: str) -> dict[str, Any]:
    found = origin.get(name)
    return found if isinstance(found, dict) else {}


def _refuse_more(config: dict[str, Any], path: Path) -> None:
    fix = "Merge it into its base with `peft`, and give the merged folder."
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise UserError(f"is a {kind} adapter; redline reads LORA.", where=str(path), fix=fix)
    found = [key for key in _MORE if config.get(key)]
    found += ["bias"] if config.get("bias", "none") not in (None, "none") else []
    found += ["init_lora_weights"] if config.get("init_lora_weights", True) not in _BEGINNINGS else []
    if found:
        pairs = ", ".join(f"{key}={config[key]!r}" for key in found)
        raise UserError(f"has {pairs}, which redline does not compute.", where=str(path), fix=fix)


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / _WEIGHTS
    try:
        return load_file(check_regular(path))
    except FileNotFoundError:
        fix = "Save it with safetensors; a .bin file can run any code when it is opened."
        raise UserError(f"has no {_WEIGHTS}.", where=str(folder), fix=fix) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"is damaged ({type(error).__name__}).", where=str(path), fix=_AGAIN) from None


def _targets(tensors: dict[str, Tensor], folder: Path) -> list[str]:
    """By what is there: adapter_config.json may say it as a regular expression."""
    matches = {name: _NAME.fullmatch(name) for name in tensors}
    strange = [name for name, match in matches.items() if match is None or match[1] not in TARGETS]
    if strange or not tensors:
        what = f"holds {strange[0]}, which is no adapter of a block's matrix." if strange else "holds no adapter."
        fix = f"redline reads LoRA on {', '.join(TARGETS)}."
        raise UserError(what, where=str(folder / _WEIGHTS), fix=fix)
    found = {match[1] for match in matches.values() if match is not None}
    return [name for name in TARGETS if name in found]


# ----------------------------------------------------------------------------------------------------
# A model that is no run, opened for looking: a pretrained base, or an adapter in PEFT's layout on its base.
#
# What `redline export` merged is a base like any other. An adapter that it wrote says in redline.json which base it is
# for and how that was quantised; PEFT's own say the first only, and are put on the base as it is.


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
    machine = detect_machine(device, "--device ")
    runtime = job_runtime(BASE_MODEL_JOB)
    recipe = runtime.complete(_recipe(found, adapter, source, sequences, machine.device), ignore_message)
    if writes_only:
        data = runtime.tokenizer_alone(_facts(found, adapter), found.folder, recipe)
    else:
        data = runtime.load_data(recipe, for_evaluation=True)
        for line in data.messages:  # rows that are left out are not in the figures
            say(line)
    resolved = resolve(recipe, machine, data.facts)
    objective = runtime.create(resolved, data)
    if adapter is None:
        objective.remove_adapters()
    objective.build(torch.device(machine.device))
    if adapter is not None:
        _load_adapter(objective, adapter)
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
        "objective": BASE_MODEL_JOB,
        "model": model,
        "data": {
            "source": source or "embedded",
            "tokenizer": "base",
            "seq_len": min(base.context, _SEQ_LEN),
            "pack": True,
        },
        BASE_MODEL_JOB: {
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


def _load_adapter(objective: Objective, folder: AdapterFolder) -> None:
    """Copy the adapter's matrices into the model's."""
    recipe, shape = objective.recipe, objective.resolved.shape
    adapter = job(recipe.objective).adapter(recipe)
    assert adapter is not None
    beyond = [name for name in folder.tensors if int(re.search(r"\d+", name)[0]) >= shape.layers]  # type: ignore[index]
    if beyond:
        what = f"holds {beyond[0]}, and its base has {shape.layers} layers."
        raise UserError(what, where=str(folder.folder), fix=_ELSEWHERE)
    try:
        tensors = from_peft(folder.tensors, shape, adapter, recipe.model.lora)
    except UserError as error:
        fix = "Copy the adapter again, or say where its base lies: --base PATH."
        raise UserError(error.what, where=str(folder.folder), fix=fix) from None
    learnt = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
    copy_weights(learnt, tensors, str(folder.folder))
