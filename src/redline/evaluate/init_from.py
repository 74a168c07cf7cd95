"""`model.init_from`: start a new run with weights from another run's checkpoint or from an exported folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from redline.cache import check_regular, read_text
from redline.data.tokenizer import named_vocabulary
from redline.errors import UsageError, UserError
from redline.export.adapter import ADAPTER, from_peft
from redline.export.folder import ORIGIN
from redline.fields import AUTO
from redline.hub import MODEL, fetch, parse_address
from redline.jobs.base import job
from redline.jobs.objective import Log, ignore_message
from redline.models.families import from_llama, shape_of
from redline.models.pretrained import StoredTensor, open_base, read_tensor, stored_tensors
from redline.planning.shapes import SHAPE_KEYS, Adapter
from redline.recipe.lock import job_options
from redline.recipe.schema import Model, Recipe
from redline.remote import MIRROR_SCHEMES, is_url, url_problem
from redline.runs.summary import is_locked, resolve_run
from redline.training.checkpoint import Tensors, file_digest, newest_valid, step_name
from redline.training.mirror import fetch_weights, mirrored_run, run_url
from redline.training.saved_run import SavedRun
from redline.vocabulary import CHECKPOINTS_FOLDER

KEY = "model.init_from"
_EXPORTED = (ORIGIN, "*.safetensors", "*.safetensors.index.json", "tokenizer.json")
_SIZE = ("layers", "d_model", "heads", "d_ff")
# Keys that may differ, since the weights still fit; but they were trained with the source's values.
_TRAINED_WITH = ("rope_theta", "rope_scaling", "norm_eps", "softcap")
_ADAPTERS_TRAINED_WITH = ("quant", "quant_double", "lora.alpha", "lora.rslora")


@dataclass(frozen=True)
class Initial:
    """Weights to start with, found and verified but not read yet."""

    source: str  # absolute path, with @STEP for a run: it names the same weights even when `latest` has moved on
    run_id: str
    step: int
    weights: str
    fingerprint: str
    tokenizer: str  # fingerprint
    model: Model
    tokenizer_spec: str  # the value of data.tokenizer that names it
    tensors: Callable[[], Tensors]
    adapters: bool = False  # they are adapters, not a whole model
    base: str | None = None  # fingerprint of the base that adapters were trained on
    options: dict[str, Any] = field(default_factory=dict)  # of the source's job: those that change what it computes

    def record(self) -> dict[str, Any]:
        """Return what the lock records."""
        names = ("source", "run_id", "step", "weights", "fingerprint")
        return {name: getattr(self, name) for name in names}

    def fill(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the source's shape for keys that are `auto`."""
        model = recipe.model
        if model.size not in (None, AUTO) or model.base is not None:  # a base brings its own shape
            return recipe
        shape = {name: getattr(self.model, name) for name in SHAPE_KEYS if getattr(model, name) == AUTO}
        return recipe.model_copy(update={"model": model.model_copy(update={**shape, "size": None})})

    def check(self, recipe: Recipe, tokenizer: str) -> list[str]:
        """Raise a UsageError if the weights do not fit the recipe's model or tokenizer.

        Return notes about keys that differ from the source's and still fit.
        """
        self._check_adapters(recipe)
        if tokenizer != self.tokenizer:
            fix = f"Use the source's tokenizer: data.tokenizer={self.tokenizer_spec}"
            what = (
                f"the weights of {self.source} belong to another tokenizer than {recipe.data.tokenizer} on this data."
            )
            raise UsageError(what, where=KEY, fix=fix)
        differing = self._differing(recipe.model, SHAPE_KEYS)
        if differing:
            wanted = {**{name: getattr(self.model, name) for name in _SIZE}, **{n: was for n, was, _ in differing}}
            fix = " ".join(f"model.{name}={str(value).lower()}" for name, value in wanted.items())
            lines = ", ".join(f"model.{name} is {was} there and {now} here" for name, was, now in differing)
            raise UsageError(f"{self.source} has another shape: {lines}.", where=KEY, fix=f"Use that shape: {fix}")
        changed = self._differing(recipe.model, _TRAINED_WITH + (_ADAPTERS_TRAINED_WITH if self.adapters else ()))
        then = {f"model.{name}": was for name, was, _ in changed}
        now = job_options(recipe)
        then |= {key: was for key, was in self.options.items() if now.get(key, was) != was}
        return [f"{KEY}: {key} was {was} when {self.source} was trained" for key, was in then.items()]

    def _check_adapters(self, recipe: Recipe) -> None:
        """Raise a UsageError unless both sides are whole models, or adapters of one shape on one base."""
        trains_adapters = _trains_adapters(recipe)
        if trains_adapters and not self.adapters:
            fix = "Use it as the base: `redline export` it, and set model.base to that folder."
            raise UsageError(f"{self.source} is a whole model, and this run trains adapters.", where=KEY, fix=fix)
        if self.adapters and not trains_adapters:
            fix = "Merge them into their base with `redline export --merged`, and use that folder."
            raise UsageError(f"{self.source} holds adapters, and this run trains a whole model.", where=KEY, fix=fix)
        if self.adapters and open_base(str(recipe.model.base)).fingerprint != self.base:
            what = f"the adapters of {self.source} were trained on another base than {recipe.model.base}."
            raise UsageError(what, where=KEY, fix=f"Use their base: model.base={self.model.base}")
        if differing := self._differing(recipe.model, ("lora.r", "lora.target_modules")) if self.adapters else []:
            lines = ", ".join(
                f"model.{name} is {_text(was)} there and {_text(now)} here" for name, was, now in differing
            )
            fix = " ".join(f"model.{name}={_text(was)}" for name, was, _ in differing)
            raise UsageError(f"{self.source} has adapters of another shape: {lines}.", where=KEY, fix=f"Use: {fix}")

    def _differing(self, model: Model, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
        pairs = [(name, attrgetter(name)(self.model), attrgetter(name)(model)) for name in names]
        return [(name, was, now) for name, was, now in pairs if was != now]


def _trains_adapters(recipe: Recipe) -> bool:
    return job(recipe.objective).adapter(recipe) is not None


def _text(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, tuple) else str(value)


def open_initial(spec: str, root: Path, log: Log = ignore_message) -> Initial:
    """Open RUN[@step|@best], the URL of a run in a mirror, or a folder or hub repository that `redline export` wrote.

    A run's moving average is used if it has one.
    """
    if is_url(spec):
        return _from_mirror(spec, log)
    if hub_id := parse_address(spec):
        folder = fetch(spec, hub_id, MODEL, _EXPORTED)
        if not (folder / ORIGIN).is_file():
            what, fix = "was not written by redline export: it has no redline.json.", f"Use model.base={spec}."
            raise UsageError(what, where=f"{KEY}={spec}", fix=fix)
        return replace(_from_folder(folder), source=hub_id.at(folder.name))
    folder = Path(spec).expanduser()
    if (folder / ORIGIN).is_file():
        return _from_folder(folder)
    try:
        path, selector = resolve_run(spec, root)
    except UserError as error:
        fix = f"{error.fix} A folder that `redline export` wrote works too, also as hf://OWNER/NAME."
        raise UsageError(error.what, where=f"{KEY}={spec}", fix=fix) from None
    if selector is None and (copy := _newer_copy(path, log)):
        return _from_mirror(copy, log)
    return _from_run(path, selector, log)


def _newer_copy(path: Path, log: Log) -> str | None:
    """Return URL@STEP of a newer checkpoint in the run's mirror; None if there is none.

    Another machine may have continued the run, or this one may have lost its checkpoints.
    """
    mirror = SavedRun.open(path).recipe.checkpoint.mirror
    if mirror is None or is_locked(path):
        return None
    newest = newest_valid(path / CHECKPOINTS_FOLDER, log)
    try:
        copies = [step for step, _ in mirrored_run(path, mirror).whole()]
    except UserError as error:
        log(f"the mirror cannot be read: {error.message()}")
        return None
    newer = copies and (newest is None or step_name(copies[0]) > newest.name)
    return f"{run_url(path, mirror)}@{copies[0]}" if newer else None


def _from_mirror(spec: str, log: Log) -> Initial:
    """Open URL[@step|@best]: a run in a mirror, of which one checkpoint is copied to the cache."""
    url, at, tail = spec.rpartition("@")
    known = at and (tail == "best" or (tail.isascii() and tail.isdigit()))
    url, selector = (url, tail if tail == "best" else int(tail)) if known else (spec, None)
    if problem := url_problem(url, MIRROR_SCHEMES):
        raise UsageError(problem, where=KEY)
    initial = _from_run(fetch_weights(url, selector, log), selector, log)
    return replace(initial, source=f"{url}@{initial.step}")


def _from_run(path: Path, selector: int | str | None, log: Log) -> Initial:
    run = SavedRun.open(path)
    chosen = run.weights(selector, log=log)
    return Initial(
        source=f"{path.resolve()}@{chosen.step}",
        run_id=str(run.lock["run_id"]),
        step=chosen.step,
        weights=chosen.kind,
        fingerprint=chosen.fingerprint,
        tokenizer=str(chosen.state["identity"]["tokenizer"]),
        model=run.recipe.model,
        tokenizer_spec=_tokenizer_spec(path, str(run.lock["data"]["tokenizer"])),
        tensors=chosen.tensors,
        adapters=_trains_adapters(run.recipe),
        base=chosen.state["identity"].get("base"),
        options=job_options(run.recipe),
    )


def _from_folder(folder: Path) -> Initial:
    try:
        origin = json.loads(read_text(folder / ORIGIN))
        model = Model.model_validate(origin["model"])
        adapters = origin.get("form") == "adapter"
        return Initial(
            source=str(folder.resolve()),
            run_id=str(origin["run_id"]),
            step=int(origin["step"]),
            weights=str(origin["weights"]),
            fingerprint=_digest(folder, adapters),
            tokenizer=str(origin["tokenizer_fingerprint"]),
            model=model,
            tokenizer_spec=_tokenizer_spec(folder, str(origin["tokenizer"])),
            tensors=lambda: _adapters_of(folder, model) if adapters else _folder_tensors(folder, model),
            adapters=adapters,
            base=origin["base"]["fingerprint"] if adapters else None,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "Export the model again."
        what = f"is damaged, or was not written by redline export ({type(error).__name__})."
        raise UserError(what, where=f"{KEY}={folder}", fix=fix) from None


def _digest(folder: Path, adapters: bool) -> str:
    """Return the SHA-256 of the weights file; of several files, the SHA-256 of their digests."""
    files = (
        [folder / f"{ADAPTER}.safetensors"] if adapters else sorted({entry.path for entry in _entries(folder).values()})
    )
    digests = [file_digest(file) for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _entries(folder: Path) -> dict[str, StoredTensor]:
    try:
        return stored_tensors(folder)
    except UserError as error:
        raise UserError(error.what, where=error.where, fix="Export the model again.") from None


def _folder_tensors(folder: Path, model: Model) -> Tensors:
    try:
        return from_llama({name: read_tensor(entry, name) for name, entry in _entries(folder).items()}, shape_of(model))
    except KeyError as error:
        raise UserError(f"has no {error}.", where=str(folder), fix="Export the model again.") from None


def _adapters_of(folder: Path, model: Model) -> Tensors:
    path = folder / f"{ADAPTER}.safetensors"
    try:
        tensors = load_file(check_regular(path))
        return from_peft(tensors, shape_of(model), Adapter(model.lora.r, model.lora.target_modules), model.lora)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot be read ({error}).", where=str(path), fix="Export it again.") from None


def _tokenizer_spec(folder: Path, name: str) -> str:
    """Return the value of `data.tokenizer` that names the tokenizer of the run or export in this folder."""
    return name if named_vocabulary(name) else str(folder / "tokenizer.json")


def reopen_initial(recorded: dict[str, Any], root: Path, log: Log = ignore_message) -> Initial:
    """Open the weights that a run started with again: it was stopped before its first checkpoint, and is resumed."""
    found = open_initial(str(recorded["source"]), root, log)
    if found.fingerprint != recorded["fingerprint"]:
        fix = "Start a new run."
        raise UserError(
            "holds other weights than those that this run started with.", where=f"{KEY}={recorded['source']}", fix=fix
        )
    return found
