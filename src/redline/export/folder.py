"""`redline export`: a run's weights as a folder that transformers and peft load.

The folder is written under a temporary name, read back, and renamed, so that it appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from redline import __version__
from redline.cache import atomic_dir, read_text
from redline.data.chat_template import ChatTokenizer, load_chat_tokenizer
from redline.data.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer, load_tokenizer, named_vocabulary
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
from redline.export.card import CARD, code_card, finetuned_card, model_card
from redline.export.gguf_folder import CHECKED_TOKENS, GgufModel, gguf_name, write_gguf_folder
from redline.export.tensors import Named, Shapes, write_json, write_tensors
from redline.jobs.base import job
from redline.jobs.objective import CodeModel, FinetunedModel, Log, TransformersModel, ignore_message, job_runtime
from redline.jobs.pretrained import base_tokenizer
from redline.kernels.matmul import DTYPES
from redline.models.families import FAMILIES, read_config, tensor_names
from redline.models.pretrained import Base, naming_base, open_base, stored_tensors
from redline.training.checkpoint import Weights
from redline.training.saved_run import SavedRun

# ----------------------------------------------------------------------------------------------------
# The content of an exported folder, for a model that was trained from random weights.


MODEL = "model"
# What adapters are merged onto: the base as they were trained beside it (dequantised), or as it is stored.
TRAINED, ORIGINAL = "trained", "original"


@dataclass(frozen=True)
class Source:
    """The weights that are exported: a run at a checkpoint."""

    run: SavedRun
    weights: Weights

    @property
    def where(self) -> str:
        """The run's path, for errors."""
        return str(self.run.path)


@dataclass(frozen=True)
class ExportOptions:
    dtype: str = "fp32"
    merged: bool = False
    onto: str | None = None
    base: str | None = None  # the place of the run's base, if it has moved
    quant: str | None = None  # of a GGUF file; None: a folder for transformers
    verify: bool | None = None  # in llama.cpp; None: if it is installed
    checked_tokens: int = CHECKED_TOKENS  # of each continuation


@dataclass(frozen=True)
class Contents:
    """What goes into the folder."""

    form: str  # model, adapter or merged
    architecture: str
    model_type: str
    stem: str  # of the names of the weight files
    shapes: Shapes
    tensors: Callable[[], Named]  # in the order of `shapes`
    files: dict[str, Mapping[str, Any]]  # JSON files: config.json and others
    write_tokenizer: Callable[[Path], None] | None
    card: Callable[[Mapping[str, Any]], str]  # from the content of redline.json
    origin: Callable[[], dict[str, Any]] = field(default=dict)  # for redline.json; called after the tensors are written
    code: str | None = None  # the module in redline.export.modeling that is copied beside the weights
    tokenizer: Tokenizer | None = None  # of a model that was trained from random weights
    chat: ChatTokenizer | None = None  # of a model on a base


def model_contents(source: Source, options: ExportOptions, log: Log) -> Contents:
    run = source.run
    if options.merged or options.onto or options.base:
        what = f"a run of objective={run.recipe.objective} has no adapters that can be merged into a base."
        raise UsageError(what, where=source.where, fix="Leave out --merged, --onto and --base.")
    recipe, data = run.recipe, run.lock["data"]
    if not job(recipe.objective).exports:
        what = f"transformers has no model for objective={recipe.objective}."
        fix = "Use `redline sample` and `redline eval`; a checkpoint's weights are safetensors."
        raise UserError(what, where=source.where, fix=fix)
    tokenizer = run_tokenizer(run.path, data["tokenizer"], data["tokenizer_fingerprint"])
    if tokenizer is None and options.quant is None:  # a GGUF file is refused without it
        log(f"the files of the tokenizer {data['tokenizer']} are missing here: the folder will have no tokenizer")
    try:
        model = _convert(source, options, tokenizer)
    except UserError as error:
        raise UserError(error.what, where=source.where, fix=error.fix) from None
    assert isinstance(model, TransformersModel)
    return Contents(
        form="model",
        architecture=model.architecture,
        model_type=str(model.config["model_type"]),
        stem=MODEL,
        shapes={name: tuple(tensor.shape) for name, tensor in model.tensors.items()},
        tensors=model.tensors.items,
        files={"config.json": model.config, "generation_config.json": model.generation},
        write_tokenizer=None
        if tokenizer is None
        else lambda folder: write_tokenizer(tokenizer, folder, seq_len=recipe.data.seq_len),
        card=lambda origin: model_card(run.path, run.lock, origin, tokenizer=tokenizer is not None),
        tokenizer=tokenizer,
    )


def code_contents(source: Source, options: ExportOptions, log: Log) -> Contents:
    """Return the content for a job that transformers has no class for: the weights, and a file that computes them."""
    run, name = source.run, source.run.recipe.objective
    if options.quant is not None:
        what = f"llama.cpp has no model for objective={name}."
        raise UserError(what, where=source.where, fix="Leave out --format: the folder then has its own code.")
    if options.merged or options.onto or options.base:
        what = f"a run of objective={name} has no adapters that can be merged into a base."
        raise UsageError(what, where=source.where, fix="Leave out --merged, --onto and --base.")
    data = run.lock["data"]
    tokenizer = run_tokenizer(run.path, data["tokenizer"], data["tokenizer_fingerprint"])
    try:
        model = _convert(source, options, tokenizer)
    except UserError as error:
        raise UserError(error.what, where=error.where or source.where, fix=error.fix) from None
    assert isinstance(model, CodeModel)
    recorded = source.weights.state["identity"]
    if changed := [key for key, value in model.identity.items() if recorded.get(key, value) != value]:
        what = f"its {' and '.join(changed)} is not what this run was trained on."
        raise UserError(what, where=source.where, fix="Put the old one back.")
    classes = {"AutoConfig": f"{model.architecture}Config", "AutoModel": model.architecture}
    config = {
        **model.config,
        "auto_map": {auto: f"{model.code}.{own}" for auto, own in classes.items()},
        "torch_dtype": str(DTYPES[options.dtype]).removeprefix("torch."),
    }
    special, length = model.special_tokens, run.recipe.data.seq_len
    save = None
    if tokenizer is not None and special:
        save = partial(write_tokenizer, tokenizer, seq_len=length, special=special)
    if tokenizer is None:
        log(f"the files of the tokenizer {data['tokenizer']} are missing here: the folder will have no tokenizer")
    return Contents(
        form="model",
        architecture=model.architecture,
        model_type=str(config["model_type"]),
        stem=MODEL,
        shapes={key: tuple(tensor.shape) for key, tensor in model.tensors.items()},
        tensors=model.tensors.items,
        files={"config.json": config},
        write_tokenizer=save,
        card=lambda origin: code_card(run.path, run.lock, origin, model.usage, f"{model.code}.py"),
        code=model.code,
    )


def _code_file(name: str) -> Path:
    return Path(__file__).parent / "modeling" / f"{name}.py"


def _convert(
    source: Source, options: ExportOptions, tokenizer: Tokenizer | None
) -> TransformersModel | FinetunedModel | CodeModel:
    run, data = source.run, source.run.lock["data"]
    return job_runtime(run.recipe.objective).export(
        run.recipe,
        source.weights.tensors(),
        eot=lambda: end_of_text(tokenizer, data["tokenizer"]),
        vocab_size=data["vocab_size"],
        dtype=options.dtype,
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
    quantisation_difference: float | None  # of the base in training and the one that adapters were merged onto
    quant: str | None = None  # of a GGUF file
    verified: dict[str, Any] | None = None  # what llama.cpp computes from that file, compared with the run


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
    quant: str | None = None,
    verify: bool | None = None,
    checked_tokens: int = CHECKED_TOKENS,
    reuse: bool = False,
    log: Log = ignore_message,
) -> Exported:
    """Write the folder `out`, whole or not at all. With `quant`, it holds a GGUF file of that quantisation.

    With `reuse`, the folder may exist with this very export in it, from a command whose push broke off.
    """
    out = out.resolve() if ".." in out.parts else out  # in a/../b, the folder a need not exist
    if not (reuse and (out / ORIGIN).is_file()):
        check_empty(out)
    saved = SavedRun.open(run)
    source = Source(saved, saved.weights(selector, weights, log))
    if reuse and (out / ORIGIN).is_file():
        return _written_before(out, source, quant or dtype, merged=merged or quant is not None)
    # A GGUF file is made from the whole model in float32.
    options = ExportOptions(
        "fp32" if quant else dtype, merged or _merges(saved, quant), onto, base, quant, verify, checked_tokens
    )
    if job(saved.recipe.objective).exports_code:
        contents = code_contents(source, options, log)
    elif saved.recipe.model.base is None or not job(saved.recipe.objective).exports:
        contents = model_contents(source, options, log)
    else:
        contents = finetuned_contents(source, options, log)
    origin: dict[str, Any] = {}

    def write(folder: Path) -> None:
        if quant is None:
            write_tensors(folder, contents.stem, contents.shapes, contents.tensors(), dtype)
            _write_tokenizer(contents, folder)
            if contents.code is not None:
                (folder / f"{contents.code}.py").write_bytes(_code_file(contents.code).read_bytes())
            gguf, files = {}, contents.files
        else:
            model = _gguf_model(source, contents)
            found = write_gguf_folder(folder, model, quant, verify=verify, tokens=checked_tokens, log=log)
            gguf = {"quant": quant, "file": gguf_name(quant), "verified": found.as_dict() if found else None}
            files = {}
        origin.update({**_origin(source, contents, quant or dtype), **({"gguf": gguf} if gguf else {})})
        for name, content in {**files, ORIGIN: origin}.items():
            write_json(folder / name, content)
        (folder / CARD).write_text(contents.card(origin), encoding="utf-8")

    _commit(out, write)
    return Exported(
        out=out,
        step=source.weights.step,
        weights=source.weights.kind,
        form=contents.form,
        architecture=contents.architecture,
        parameters=sum(prod(shape) for shape in contents.shapes.values()),
        tokenizer=contents.write_tokenizer is not None,
        files={path.name: path.stat().st_size for path in sorted(out.iterdir())},
        quantisation_difference=origin.get("quantisation_difference"),
        quant=quant,
        verified=origin.get("gguf", {}).get("verified"),
    )


def _written_before(out: Path, source: Source, dtype: str, *, merged: bool) -> Exported:
    """Return the export that the folder holds already; a UserError if it is another one."""
    try:
        origin = json.loads(read_text(out / ORIGIN))
        lock, form = source.run.lock, str(origin["form"])
        wanted = (lock["run_id"], source.weights.step, source.weights.kind, dtype)
        same = (origin["run_id"], origin["step"], origin["weights"], origin["dtype"]) == wanted
        if not same or (form != "model" and (form == "merged") is not merged):
            raise UserError("the folder holds another export.", where=str(out), fix="Choose another folder with --out.")
        gguf = origin.get("gguf") or {}
        return Exported(
            out=out,
            step=int(origin["step"]),
            weights=str(origin["weights"]),
            form=form,
            architecture=str(origin["class"]),
            parameters=int(origin["parameters"]),
            tokenizer=bool(gguf) or (out / DEFINITION).is_file(),
            files={path.name: path.stat().st_size for path in sorted(out.iterdir())},
            quantisation_difference=origin.get("quantisation_difference"),
            quant=gguf.get("quant"),
            verified=gguf.get("verified"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError("the folder is not empty.", where=str(out), fix="Choose another folder with --out.") from None


def _merges(run: SavedRun, quant: str | None) -> bool:
    """Whether adapters are merged because the format has no other form: llama.cpp loads whole models."""
    return quant is not None and run.recipe.model.base is not None and job(run.recipe.objective).exports


def _gguf_model(source: Source, contents: Contents) -> GgufModel:
    recipe = source.run.recipe
    return GgufModel(
        name=f"{source.run.path.name} step {source.weights.step}",
        config=contents.files["config.json"],
        shapes=contents.shapes,
        tensors=contents.tensors,
        write_tokenizer=contents.write_tokenizer,
        tokenizer=contents.tokenizer,
        chat=contents.chat,
        answers=job(recipe.objective).can_answer(recipe),
        where=source.where,
    )


def _write_tokenizer(contents: Contents, folder: Path) -> None:
    if contents.write_tokenizer is not None:
        try:
            contents.write_tokenizer(folder)
        except Exception as error:  # the tokenizers library raises plain Exception when the disk is full
            raise error if isinstance(error, OSError) else OSError(str(error)) from None


def _origin(source: Source, contents: Contents, dtype: str) -> dict[str, Any]:
    """Return the content of redline.json: where the weights come from, and what they fit."""
    recipe, lock, weights = source.run.recipe, source.run.lock, source.weights
    data = lock["data"]
    return {
        "schema": 1,
        "redline": __version__,
        "run_id": lock["run_id"],
        "step": weights.step,
        "weights": weights.kind,
        "averaged": weights.averaged,
        "eval_sequences": recipe.eval.sequences,
        "dtype": dtype,
        "objective": recipe.objective,
        "form": contents.form,
        "class": contents.architecture,
        "model_type": contents.model_type,
        "parameters": sum(prod(shape) for shape in contents.shapes.values()),
        "model": recipe.model.model_dump(mode="json"),
        "data_fingerprint": data["fingerprint"],
        "tokenizer": data["tokenizer"],
        "tokenizer_fingerprint": data["tokenizer_fingerprint"],
        **contents.origin(),
    }


def check_empty(out: Path) -> None:
    """Raise a UserError unless `out` is free or an empty folder."""
    if os.path.lexists(out) and not out.is_dir():
        raise UserError("is a file, not a folder.", where=str(out), fix="Name a new folder with --out.")
    if out.is_dir() and any(out.iterdir()):
        raise UserError("the folder is not empty.", where=str(out), fix="Choose another folder with --out.")


def _commit(out: Path, write: Callable[[Path], None]) -> None:
    """Write the folder with `atomic_dir`, and turn its errors into a UserError."""
    try:
        with atomic_dir(out.resolve()) as temporary:  # resolved: `out` may be a link to an empty folder
            write(temporary)
    except (OSError, SafetensorError) as error:
        check_empty(out)  # another process may have written it meanwhile
        reason = getattr(error, "strerror", None) or str(error)
        fix = "Name another folder with --out, or free some disk."
        raise UserError(f"cannot be written ({reason}).", where=str(out), fix=fix) from None


# ----------------------------------------------------------------------------------------------------
# The content of the folder for a model that was fine-tuned on a base: its adapter alone, or the whole model.


GENERATION = "generation_config.json"
# Keys of a base's config.json that describe its own files, or name code that the classes of transformers do not need.
_DROPPED_KEYS = ("dtype", "torch_dtype", "quantization_config", "_name_or_path", "auto_map", "transformers_version")


@dataclass(frozen=True)
class _Finetuned:
    source: Source
    model: FinetunedModel
    base: Base
    tokenizer: ChatTokenizer


def finetuned_contents(source: Source, options: ExportOptions, log: Log) -> Contents:
    model = _convert(source, options, None)
    assert isinstance(model, FinetunedModel)
    _check_options(model, options, source.where)
    base = _open_base(model, options, source, log)
    finetuned = _Finetuned(source, model, base, _tokenizer(model, base, source))
    if model.adapter is None:
        return _whole_model(finetuned, options, "model", lambda: whole_tensors(model, base), dict)
    return _merged_model(finetuned, options, log) if options.merged else _adapter(finetuned)


def _check_options(model: FinetunedModel, options: ExportOptions, where: str) -> None:
    if options.onto and model.adapter is None:
        what = "this run trained all weights: there are no adapters to merge onto anything."
        raise UsageError(what, where=where, fix="Leave out --onto.")
    if options.onto and not options.merged:
        raise UsageError("goes with --merged: only a merge needs a base.", where="--onto", fix="Add --merged.")


def _open_base(model: FinetunedModel, options: ExportOptions, source: Source, log: Log) -> Base:
    """Open the base that the run was trained on; a UserError if another one is found in its place."""
    place = options.base or model.base
    try:
        base = open_base(place, log)
    except UserError as error:
        raise (error if options.base else naming_base(error)) from None
    recorded = str(source.weights.state["identity"].get("base"))
    if base.fingerprint != recorded:
        what = f"is not the base of this run (its fingerprint is {base.fingerprint[:12]}, the run's {recorded[:12]})."
        fix = f"Name the base that it was trained on, then {model.base}, with --base."
        raise UserError(what, where=place, fix=fix)
    return base


def _tokenizer(model: FinetunedModel, base: Base, source: Source) -> ChatTokenizer:
    found = load_chat_tokenizer(base.folder, model.template)
    recorded = source.weights.state["identity"]
    # Text is read by the plain tokenizer.json, which may have another fingerprint than the one that transformers loads.
    own = recorded.get("base_tokenizer")
    intact = found.fingerprint == recorded["tokenizer"] if own is None else base_tokenizer(base).fingerprint == own
    if not intact:
        what, fix = "this is not the tokenizer of the run.", "Put the base's own files back."
        raise UserError(what, where=str(base.folder), fix=fix)
    if found.identity != recorded.get("template", found.identity):
        what, fix = "its chat template has changed since the run.", "Put the old one back."
        raise UserError(what, where=model.template or str(base.folder), fix=fix)
    return found


def _adapter(finetuned: _Finetuned) -> Contents:
    model, base = finetuned.model, finetuned.base
    assert model.adapter is not None
    tensors = to_peft(model.tensors, base.shape, model.adapter, model.lora)
    return Contents(
        form="adapter",
        architecture=_architecture(base),
        model_type=base.family,
        stem=ADAPTER,
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        tensors=tensors.items,
        files={ADAPTER_CONFIG: adapter_config(model, base), GENERATION: _generation(base, finetuned.tokenizer)},
        write_tokenizer=finetuned.tokenizer.save,
        card=_card(finetuned),
        origin=lambda: _base_origin(finetuned),
    )


def _merged_model(finetuned: _Finetuned, options: ExportOptions, log: Log) -> Contents:
    model, onto = finetuned.model, options.onto or TRAINED
    assert model.adapter is not None
    quantised = model.adapter.quantised
    device = _device(finetuned.source.run.recipe.train.device, log) if quantised else torch.device("cpu")
    drift = Drift() if quantised and onto == ORIGINAL else None

    def origin() -> dict[str, Any]:
        found = {"onto": onto, **({"quantised_on": device.type} if quantised else {})}
        return found if drift is None else {**found, "quantisation_difference": drift.relative}

    tensors = partial(merged_tensors, model, finetuned.base, device, drift)
    return _whole_model(finetuned, options, "merged", tensors, origin)


def _device(trained_on: str, log: Log) -> torch.device:
    """Return the kind of device that quantised the base in training: CPU and GPU round a few scales differently."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(trained_on, True):
        log("the base was quantised on a GPU, and this machine has none: a few of its scales may round differently")
        return torch.device("cpu")
    return torch.device(trained_on)


def _whole_model(
    finetuned: _Finetuned,
    options: ExportOptions,
    form: str,
    tensors: Callable[[], Named],
    origin: Callable[[], dict[str, Any]],
) -> Contents:
    base = finetuned.base
    stored = stored_tensors(base.folder)
    return Contents(
        form=form,
        architecture=_architecture(base),
        model_type=base.family,
        stem=MODEL,
        shapes={name: stored[name].shape for _, theirs, _ in tensor_names(base.shape) for name in theirs},
        tensors=tensors,
        files={"config.json": _config(base, options.dtype), GENERATION: _generation(base, finetuned.tokenizer)},
        write_tokenizer=finetuned.tokenizer.save,
        card=_card(finetuned),
        origin=lambda: {**_base_origin(finetuned), **origin()},
        chat=finetuned.tokenizer,
    )


def _config(base: Base, dtype: str) -> dict[str, Any]:
    """Return the base's config.json, with what its weights say where the two differ."""
    kept = {key: value for key, value in read_config(base.folder).items() if key not in _DROPPED_KEYS}
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


def _architecture(base: Base) -> str:
    return next(name for name, family in FAMILIES.items() if family == base.family)


def _base_origin(finetuned: _Finetuned) -> dict[str, Any]:
    adapter, base = finetuned.model.adapter, finetuned.base
    quantised = adapter is not None and adapter.quantised
    return {
        "method": finetuned.model.method,
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


def _card(finetuned: _Finetuned) -> Callable[[Mapping[str, Any]], str]:
    run, learn, template = finetuned.source.run, finetuned.model.learn, finetuned.tokenizer.template is not None
    return lambda origin: finetuned_card(run.path, run.lock, origin, learn=learn, template=template)


# ----------------------------------------------------------------------------------------------------
# The run's tokenizer in the format of transformers.


DEFINITION, SETTINGS = "tokenizer.json", "tokenizer_config.json"


def run_tokenizer(run: Path, name: str, fingerprint: str) -> Tokenizer | None:
    """Open the tokenizer that made the run's tokens: its copy in the run, or by name; None if its files are missing."""
    own = run / DEFINITION
    try:
        tokenizer = load_tokenizer(str(own) if own.is_file() else name)
    except UserError:
        if own.is_file():
            raise
        return None
    if tokenizer.fingerprint != fingerprint:
        what, fix = "this is not the tokenizer of the run.", "Put the run's own file back."
        raise UserError(what, where=str(own if own.is_file() else name), fix=fix)
    return tokenizer


def end_of_text(tokenizer: Tokenizer | None, name: str) -> int:
    """Return the id of the end-of-text token. For well-known vocabularies no files are needed."""
    if tokenizer is not None:
        return tokenizer.eot
    known = named_vocabulary(name)
    if known is None:
        fix = "Copy the tokenizer.json that the tokens were made with into the run's directory."
        raise UserError("the tokenizer's files are missing.", where=name, fix=fix)
    return known[1]


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, seq_len: int, special: tuple[str, ...] = ()) -> None:
    """Write tokenizer.json and its settings. The special tokens follow the tokenizer's own.

    The exported tokenizer puts the end-of-text token before a text, since every document had it there in training.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    path = folder / DEFINITION
    if isinstance(tokenizer, ByteTokenizer):
        backend = byte_definition(tokenizer)
    else:
        tokenizer.save(path)
        backend = Backend.from_file(str(path))
    end = backend.id_to_token(tokenizer.eot)
    if backend.get_vocab_size(with_added_tokens=True) == tokenizer.vocab_size:  # else their ids would be others
        backend.add_special_tokens(list(special))
    backend.post_processor = TemplateProcessing(
        single=f"{end} $A", pair=f"{end} $A {end}:1 $B:1", special_tokens=[(end, tokenizer.eot)]
    )
    backend.save(str(path))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def byte_definition(tokenizer: ByteTokenizer) -> Any:
    """Return a BPE without merges whose tokens are bytes: GPT-2's character for each byte has the byte as its id."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocab={_character(byte): byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    assert backend.token_to_id(END_OF_TEXT) == tokenizer.eot
    return backend


def _character(byte: int) -> str:
    """Return GPT-2's character for a byte (Radford et al. 2019).

    Printable Latin-1 characters stand for themselves; the other bytes are numbered from 256.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte if byte in printable else 256 + [b for b in range(256) if b not in printable].index(byte))
