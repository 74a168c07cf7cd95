"""A trained model, opened to be evaluated or sampled: the objective of a run, or a pretrained model that is no run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
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
from redline.data.tokens import OtherTokenizerError
from redline.errors import RecipeError, UsageError, UserError
from redline.export.adapter import ADAPTER, ADAPTER_CONFIG, from_peft
from redline.export.folder import ORIGIN
from redline.hardware.machine import Machine
from redline.hardware.probe import detect_machine
from redline.jobs.base import BASE_MODEL_JOB, job
from redline.jobs.objective import Log, Objective, ignore_message, job_runtime
from redline.models.adapters import FrozenMatrix
from redline.models.fused_trial import fused_failure
from redline.models.pretrained import Base, naming_base, open_base
from redline.planning.shapes import TARGETS
from redline.recipe.load import parse_overrides, validate
from redline.recipe.resolve import DataFacts, adapt_to_world, resolve_tried
from redline.recipe.schema import Recipe
from redline.training.checkpoint import copy_weights
from redline.training.saved_run import SavedRun

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class OpenedModel:
    name: str  # the run's path, or what was given in place of one
    title: str  # names the weights, for people
    objective: Objective
    step: int | None  # None: not a run
    weights: str  # "ema" or "raw" for a run, otherwise "base" or "adapter"
    micro: int  # rows of a batch that fits
    notes: Sequence[str] = ()  # messages of opening it, for example about rows that are left out
    training: Recipe | None = None  # the run's own recipe, if other data than its own are evaluated

    def as_dict(self) -> dict[str, Any]:
        """Return which weights these are, as JSON."""
        return {"run": self.name, "step": self.step, "weights": self.weights}


def open_run(
    run: Path,
    selector: int | str | None = None,
    *,
    weights: str | None = None,
    base: str | None = None,
    source: str | None = None,
    text_key: str | None = None,
    sequences: int | None = None,
    writes_only: bool = False,
    trainable: bool = False,
    answers: bool = False,
    settings: Sequence[str] = (),
    device: str = "auto",
    log: Log = ignore_message,
) -> OpenedModel:
    """Build the run's model and load the weights of a checkpoint into it.

    `source` names other data to evaluate on. With `writes_only` the model is only sampled: its data are not opened, so
    the run may have come from another machine. With `trainable` the weights stay as the checkpoint has them, for a
    model that may be trained further; otherwise they are converted for generation. With `answers` the model must be
    able to answer questions. `settings` are KEY=VALUE of options that may change after training, such as those of a
    sampler.
    """
    saved = SavedRun.open(run)
    recipe = saved.recipe
    if answers and not job(recipe.objective).can_answer(recipe):
        what = f"is a {recipe.objective} run: it continues texts, and answers no questions."
        fix = "Leave out --answers to get its loss; `redline sample` generates text."
        raise UsageError(what, where=str(run), fix=fix)
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
    chosen, runtime = saved.weights(selector, weights, log), job_runtime(recipe.objective)
    identity = chosen.state["identity"]
    facts = DataFacts(**saved.lock["data"])
    try:
        if writes_only:
            data = runtime.tokenizer_alone(facts, run, recipe)
        else:
            data = runtime.load_data(recipe, for_evaluation=source is not None)
            facts = data.facts
    except OtherTokenizerError:
        raise _other_tokenizer(run) from None
    except UserError as error:
        of_base = base is None and error.where == recipe.model.base is not None and not isinstance(error, RecipeError)
        raise (naming_base(error) if of_base else error) from None
    if not writes_only and source is None and facts.fingerprint != identity["data"]:
        log("the data have changed since the run began: the rows that are held out now may have been trained on")
    if identity["tokenizer"] != facts.tokenizer_fingerprint:
        raise _other_tokenizer(run)
    # One process evaluates, however many trained the run.
    resolved = resolve_tried(adapt_to_world(recipe, 1), machine, facts, fused_failure, falls_back=True)
    objective = runtime.create(resolved, data)
    objective.log = log
    if source and not writes_only and not (answers and objective.reloads_rows_for_questions):
        for message in data.messages:  # the figures do not cover rows that are left out
            log(message)
    _check_identity(identity, objective.identity(), run)
    objective.build(torch.device(machine.device))
    trained = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
    copy_weights(trained, chosen.tensors(), str(chosen.checkpoint))
    objective.model.eval()
    if not trainable and (writes_only or machine.device == "cpu"):
        _store_for_inference(objective, machine)
    title = f"{run} at step {chosen.step} ({chosen.kind} weights)"
    return OpenedModel(str(run), title, objective, chosen.step, chosen.kind, resolved.batch.micro, training=own)


def _store_for_inference(objective: Objective, machine: Machine) -> None:
    """Convert weights once instead of in every pass: generating a token reads each weight for very little arithmetic.

    On a GPU a model that is also evaluated keeps its master weights, which the fused kernels read.
    """
    for decoder in objective.decoders():
        frozen = (module for module in decoder.modules() if isinstance(module, FrozenMatrix))
        dense = sum(matrix.shape[0] * matrix.shape[1] for matrix in frozen) * decoder.dtype.itemsize
        decoder.store_for_inference(unpack=dense < machine.memory_bytes // 2)


def _with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Apply `--set KEY=VALUE` to options that do not belong to the weights."""
    if not settings:
        return recipe
    if wrong := [setting for setting in settings if setting.find("=") < 1]:
        fix = "Write, for example, --set sampler_steps=4."
        raise UsageError(f"{wrong[0]!r} is not KEY=VALUE.", where="--set", fix=fix)
    own = getattr(recipe, recipe.objective)
    allowed = [f"{recipe.objective}.{name}" for name in own.settable_after_training]
    given = {key if "." in key else f"{recipe.objective}.{key}": v for key, v in parse_overrides(settings).items()}
    if refused := [key for key in given if key not in allowed]:
        what = f"{' and '.join(refused)} cannot be changed after training."
        fix = f"Settable: {', '.join(allowed)}." if allowed else f"With objective={recipe.objective} nothing is."
        raise UsageError(what, where="--set", fix=fix)
    changes = {key.partition(".")[2]: value for key, value in given.items()}
    try:
        changed = type(own).model_validate({**own.model_dump(), **changes})
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise UsageError(f"{message.rstrip('.')}.", where=f"--set {' '.join(given)}", fix="See docs/keys.md.") from None
    recipe = recipe.model_copy(update={recipe.objective: changed})
    for problem in job(recipe.objective).problems(recipe):
        raise UsageError(problem.line(), where="--set")
    return recipe


def _precision(trained: str, device: str) -> str:
    """Return the precision to evaluate in: fp8 only speeds up the training of bf16 models, and a CPU has no fp16."""
    if trained == "fp8":
        return "fp32" if device == "mps" else "bf16"
    return "fp32" if trained == "fp16" and device == "cpu" else trained


def _with_base(recipe: Recipe, base: str | None, run: Path) -> Recipe:
    """Replace the path of the base. Whether it is the same base is checked once it is open, by its fingerprint."""
    if base is None:
        return recipe
    if recipe.model.base is None:
        raise UsageError(
            "--base is for a run on a pretrained base; this one has none.", where=str(run), fix="Leave it out."
        )
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"base": base})})


def _other_data(run: Path, source: str, text_key: str | None) -> dict[str, Any]:
    """Return the data keys that read all of `source` with the run's own tokenizer, before anything is computed."""
    own = run / TOKENIZER
    tokenizer = {"tokenizer": str(own)} if own.is_file() else {}
    key = {"text_key": text_key} if text_key else {}
    return {"source": source, "dedup": False, "stream": False, **tokenizer, **key}


def _check_identity(recorded: dict[str, Any], identity: dict[str, str], run: Path) -> None:
    """Compare the fingerprints of what the objective opened, such as a base. Older checkpoints record fewer."""
    changed = [name for name, value in identity.items() if recorded.get(name, value) != value]
    if changed:
        what = f"its {' and '.join(changed)} is not what this run was trained on."
        raise UserError(what, where=str(run), fix="Put the old one back.")


def _other_tokenizer(run: Path) -> UserError:
    fix = "Prepare the text with the run's own tokenizer."
    return UserError("the data were made with another tokenizer than the run's.", where=str(run), fix=fix)


# ----------------------------------------------------------------------------------------------------
# Reading an adapter's folder in PEFT's layout.


_WEIGHTS = f"{ADAPTER}.safetensors"
_NAME = re.compile(r"base_model\.model\.model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+)\.lora_[AB]\.weight")
# Features of PEFT, beyond plain LoRA, that redline does not implement.
_UNSUPPORTED = (
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
# Initialisations that leave the base as it is; others, such as "pissa", change its weights.
_SUPPORTED_INITS = (True, False, None, "gaussian", "orthogonal", "eva")
_EXPORT_AGAIN = "Export or copy it again."


@dataclass(frozen=True)
class AdapterFolder:
    folder: Path
    bases: tuple[str, ...]  # places of its base: ids and paths that the folder states
    fingerprint: str | None  # of the base; only an adapter that redline exported has one
    quant: str  # how the base was quantised in training
    quant_double: bool
    lora: dict[str, Any]  # recipe keys
    template: str | None
    tensors: dict[str, Tensor]  # by PEFT's names


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter(folder: Path) -> AdapterFolder:
    config, origin = _json(folder / ADAPTER_CONFIG), _json(folder / ORIGIN) if (folder / ORIGIN).is_file() else {}
    _check_supported(config, folder / ADAPTER_CONFIG)
    tensors = _tensors(folder)
    recorded, quantised = _section(origin, "base"), _section(origin, "quantisation")
    places = (recorded.get("source"), recorded.get("loads_from"), config.get("base_model_name_or_path"))
    template = folder / "chat_template.jinja"  # that it was trained with
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
        raise UserError(f"cannot be read ({type(error).__name__}).", where=str(path), fix=_EXPORT_AGAIN) from None
    if not isinstance(found, dict):
        raise UserError("is not a JSON object.", where=str(path), fix=_EXPORT_AGAIN)
    return found


def _section(origin: dict[str, Any], name: str) -> dict[str, Any]:
    found = origin.get(name)
    return found if isinstance(found, dict) else {}


def _check_supported(config: dict[str, Any], path: Path) -> None:
    fix = "Merge it into its base with `peft`, and give the merged folder."
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise UserError(f"is a {kind} adapter; redline reads LORA.", where=str(path), fix=fix)
    found = [key for key in _UNSUPPORTED if config.get(key)]
    found += ["bias"] if config.get("bias", "none") not in (None, "none") else []
    found += ["init_lora_weights"] if config.get("init_lora_weights", True) not in _SUPPORTED_INITS else []
    if found:
        pairs = ", ".join(f"{key}={config[key]!r}" for key in found)
        raise UserError(f"has {pairs}, which redline does not support.", where=str(path), fix=fix)


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / _WEIGHTS
    try:
        return load_file(check_regular(path))
    except FileNotFoundError:
        fix = "Save it with safetensors; opening a .bin file can run any code."
        raise UserError(f"has no {_WEIGHTS}.", where=str(folder), fix=fix) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"is damaged ({type(error).__name__}).", where=str(path), fix=_EXPORT_AGAIN) from None


def _targets(tensors: dict[str, Tensor], folder: Path) -> list[str]:
    """Return the adapted matrices, by the names of the tensors: adapter_config.json may state them as a regular
    expression."""
    matches = {name: _NAME.fullmatch(name) for name in tensors}
    unknown = [name for name, match in matches.items() if match is None or match[1] not in TARGETS]
    if unknown or not tensors:
        what = f"holds {unknown[0]}, which is not an adapter of a block's matrix." if unknown else "holds no adapter."
        fix = f"redline reads LoRA on {', '.join(TARGETS)}."
        raise UserError(what, where=str(folder / _WEIGHTS), fix=fix)
    found = {match[1] for match in matches.values() if match is not None}
    return [name for name in TARGETS if name in found]


# ----------------------------------------------------------------------------------------------------
# Opening a model that is no run: a pretrained base, or an adapter in PEFT's layout on its base.
#
# A folder that `redline export --merged` wrote is a base like any other. An adapter that redline exported states in
# redline.json its base and how that was quantised in training. Other adapters state only the base, which is then used
# as it is stored.


_SEQ_LEN = 2048  # tokens of the sequences that are scored, unless the base can only read fewer
_BATCH_ROWS = 8
_NAME_BASE = "Name the place of its base: --base PATH."
_MODEL_FILES = ("config.json", "adapter_config.json", "*.gguf")


def open_pretrained(
    spec: str,
    *,
    base: str | None = None,
    source: str | None = None,
    sequences: int | None = None,
    writes_only: bool = False,
    trainable: bool = False,
    device: str = "auto",
    log: Log = ignore_message,
) -> OpenedModel:
    """Open a folder, a .gguf file or a hub id.

    `base` is the place of an adapter's base, if it is not where the adapter's files say.
    """
    folder = Path(spec).expanduser()
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _MODEL_FILES):
        what = f"is neither a run nor a model: it has no lock.json, and none of {', '.join(_MODEL_FILES)}."
        fix = "`redline runs` lists the runs; a model is a folder, a .gguf file or a hub id."
        raise UsageError(what, where=spec, fix=fix)
    adapter = read_adapter(folder) if is_adapter(folder) else None
    if base is not None and adapter is None:
        raise UsageError("--base is for an adapter; this is a whole model.", where=spec, fix="Leave it out.")
    if source is None and not writes_only:
        what = "has no data of its own to be evaluated on."
        raise UsageError(what, where=spec, fix="Name some: --data FILE.")
    found = open_base(spec, log) if adapter is None else _base_of(adapter, base, log)
    machine = detect_machine(device, "--device ")
    runtime = job_runtime(BASE_MODEL_JOB)
    recipe = runtime.complete(_recipe(found, adapter, source, sequences, machine.device), ignore_message)
    if writes_only:
        data = runtime.tokenizer_alone(_facts(found, adapter), found.folder, recipe)
    else:
        data = runtime.load_data(recipe, for_evaluation=True)
        for message in data.messages:  # the figures do not cover rows that are left out
            log(message)
    resolved = resolve_tried(recipe, machine, data.facts, fused_failure)
    objective = runtime.create(resolved, data)
    if adapter is None:
        objective.remove_adapters()
    objective.build(torch.device(machine.device))
    if adapter is not None:
        _load_adapter(objective, adapter)
    objective.model.eval()
    if not trainable and (writes_only or machine.device == "cpu"):
        _store_for_inference(objective, machine)
    kind, title = ("base", spec) if adapter is None else ("adapter", f"{spec} on {found.source}")
    return OpenedModel(spec, title, objective, None, kind, resolved.batch.micro)


def _base_of(adapter: AdapterFolder, given: str | None, log: Log) -> Base:
    places = (given,) if given else adapter.bases
    if not places:
        raise UserError("does not state its base.", where=str(adapter.folder), fix=_NAME_BASE)
    base = _first_base(places, adapter.folder, log)
    if adapter.fingerprint is not None and base.fingerprint != adapter.fingerprint:
        what = f"was not trained on the base that {base.source} holds now."
        raise UserError(what, where=str(adapter.folder), fix=_NAME_BASE)
    return base


def _first_base(places: Sequence[str], folder: Path, log: Log) -> Base:
    """Open the first place that holds a base; if none does, report what is wrong with the first."""
    errors = []
    for place in places:
        try:
            return open_base(place, log)
        except UserError as error:
            errors.append(error)
    raise UserError(errors[0].what, where=f"{folder}: its base {places[0]}", fix=_NAME_BASE)


def _recipe(
    base: Base, adapter: AdapterFolder | None, source: str | None, sequences: int | None, device: str
) -> Recipe:
    """Return the recipe of a run that would have fine-tuned this model, so that it is opened like one."""
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
        "train": {"steps": 1, "global_batch": _BATCH_ROWS, "device": device, "compile": False},
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
        raise UserError(what, where=str(folder.folder), fix=_NAME_BASE)
    try:
        tensors = from_peft(folder.tensors, shape, adapter, recipe.model.lora)
    except UserError as error:
        fix = "Copy the adapter again, or say where its base lies: --base PATH."
        raise UserError(error.what, where=str(folder.folder), fix=fix) from None
    trainable = {name: p for name, p in objective.model.named_parameters() if p.requires_grad}
    copy_weights(trainable, tensors, str(folder.folder))
