"""`model.init_from`: a new run's first weights, from another run's checkpoint or from an exported folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
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
from redline.jobs.base import job
from redline.models.families import from_llama, shape_of
from redline.models.pretrained import Entry, entries, open_base, read
from redline.planning.shapes import SHAPE_KEYS, Adapter
from redline.recipe.lock import check_model_identity, locked_recipe, read_lock
from redline.recipe.schema import Model, Recipe
from redline.runs.summary import resolve_run
from redline.training.checkpoint import Tensors, file_digest, find_weights

KEY = "model.init_from"
_SIZE = ("layers", "d_model", "heads", "d_ff")
# others fit, but were trained so
_CALIBRATION = ("rope_theta", "rope_scaling", "norm_eps", "softcap")
_ADAPTERS_CALIBRATION = ("quant", "quant_double", "lora.alpha", "lora.rslora")


@dataclass(frozen=True)
class Initial:
    """Weights to begin with, found and verified but not yet read."""

    source: str  # path, with @step for a run: what finds the same weights again, whatever happens to `latest`
    run_id: str
    step: int
    weights: str
    fingerprint: str
    tokenizer: str  # fingerprint
    model: Model
    tokenizer_spec: str  # what names it
    tensors: Callable[[], Tensors]
    adapters: bool = False  # and not a whole model
    base: str | None = None  # the fingerprint of what they were trained on

    def record(self) -> dict[str, Any]:
        """For the lock."""
        names = ("source", "run_id", "step", "weights", "fingerprint")
        return {name: getattr(self, name) for name in names}

    def fill(self, recipe: Recipe) -> Recipe:
        """The recipe, with the source's shape wherever it leaves that open."""
        model = recipe.model
        if model.size not in (None, AUTO) or model.base is not None:  # a base has its own shape
            return recipe
        shape = {name: getattr(self.model, name) for name in SHAPE_KEYS if getattr(model, name) == AUTO}
        return recipe.model_copy(update={"model": model.model_copy(update={**shape, "size": None})})

    def check(self, recipe: Recipe, tokenizer: str) -> list[str]:
        """Refuses a model or a tokenizer that these weights are not of; returns what only deserves a word."""
        self._check_adapters(recipe)
        if tokenizer != self.tokenizer:
            fix = f"Use the source's: data.tokenizer={self.tokenizer_spec}"
            what = f"the weights of {self.source} are for another tokenizer than {recipe.data.tokenizer} on this data."
            raise UsageError(what, where=KEY, fix=fix)
        differing = self._differing(recipe.model, SHAPE_KEYS)
        if differing:
            wanted = {**{name: getattr(self.model, name) for name in _SIZE}, **{n: was for n, was, _ in differing}}
            fix = " ".join(f"model.{name}={str(value).lower()}" for name, value in wanted.items())
            lines = ", ".join(f"model.{name} is {was} there and {now} here" for name, was, now in differing)
            raise UsageError(f"{self.source} is another model: {lines}.", where=KEY, fix=f"Give it that shape: {fix}")
        changed = self._differing(recipe.model, _CALIBRATION + (_ADAPTERS_CALIBRATION if self.adapters else ()))
        return [f"{KEY}: model.{name} was {was} when {self.source} was trained" for name, was, _ in changed]

    def _check_adapters(self, recipe: Recipe) -> None:
        """They fit onto the base they were trained on, and no other; and a whole model is no adapter."""
        wanted = _learns_adapters(recipe)
        if wanted and not self.adapters:
            fix = "Use it as the base: `redline export` it, and set model.base to that folder."
            raise UsageError(f"{self.source} is a whole model, and adapters learn here.", where=KEY, fix=fix)
        if self.adapters and not wanted:
            fix = "Make one of them: `redline export --merged`, and use that folder."
            raise UsageError(f"{self.source} holds adapters, and a whole model learns here.", where=KEY, fix=fix)
        if self.adapters and open_base(str(recipe.model.base)).fingerprint != self.base:
            what = f"the adapters of {self.source} were trained on another base than {recipe.model.base}."
            raise UsageError(what, where=KEY, fix=f"Use theirs: model.base={self.model.base}")
        if differing := self._differing(recipe.model, ("lora.r", "lora.target_modules")) if self.adapters else []:
            lines = ", ".join(
                f"model.{name} is {_text(was)} there and {_text(now)} here" for name, was, now in differing
            )
            fix = " ".join(f"model.{name}={_text(was)}" for name, was, _ in differing)
            raise UsageError(f"{self.source} has other adapters: {lines}.", where=KEY, fix=f"Use: {fix}")

    def _differing(self, model: Model, names: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
        pairs = [(name, attrgetter(name)(self.model), attrgetter(name)(model)) for name in names]
        return [(name, was, now) for name, was, now in pairs if was != now]


def _learns_adapters(recipe: Recipe) -> bool:
    return job(recipe.objective).adapter(recipe) is not None


def _text(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, tuple) else str(value)


def open_initial(spec: str, root: Path, say: Callable[[str], None] = lambda _: None) -> Initial:
    """RUN[@step|@best], its moving average if there is one, or a folder that `redline export` wrote."""
    folder = Path(spec).expanduser()
    if (folder / ORIGIN).is_file():
        return _from_folder(folder)
    try:
        path, selector = resolve_run(spec, root)
    except UserError as error:
        fix = f"{error.fix} A folder that `redline export` wrote works too; models of a hub are not read yet."
        raise UsageError(error.what, where=f"{KEY}={spec}", fix=fix) from None
    lock = read_lock(path)
    chosen = find_weights(path, selector, warn=say)
    recipe = locked_recipe(path, lock).recipe
    check_model_identity(chosen.state["identity"], recipe, path)
    return Initial(
        source=f"{path.resolve()}@{chosen.step}",
        run_id=str(lock["run_id"]),
        step=chosen.step,
        weights=chosen.kind,
        fingerprint=chosen.fingerprint,
        tokenizer=str(chosen.state["identity"]["tokenizer"]),
        model=recipe.model,
        tokenizer_spec=_tokenizer_spec(path, str(lock["data"]["tokenizer"])),
        tensors=chosen.tensors,
        adapters=_learns_adapters(recipe),
        base=chosen.state["identity"].get("base"),
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
        what = f"is not what redline export wrote ({type(error).__name__})."
        raise UserError(what, where=f"{KEY}={folder}", fix=fix) from None


def _digest(folder: Path, adapters: bool) -> str:
    """SHA-256 of the file of weights; of several, that of theirs."""
    files = (
        [folder / f"{ADAPTER}.safetensors"] if adapters else sorted({entry.path for entry in _entries(folder).values()})
    )
    digests = [file_digest(file) for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _entries(folder: Path) -> dict[str, Entry]:
    try:
        return entries(folder)
    except UserError as error:
        raise UserError(error.what, where=error.where, fix="Export the model again.") from None


def _folder_tensors(folder: Path, model: Model) -> Tensors:
    try:
        return from_llama({name: read(entry, name) for name, entry in _entries(folder).items()}, shape_of(model))
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
    """What `data.tokenizer` must say to get the tokenizer of the run or export in this folder."""
    return name if named_vocabulary(name) else str(folder / "tokenizer.json")


def reopen_initial(recorded: dict[str, Any], root: Path, say: Callable[[str], None] = lambda _: None) -> Initial:
    """The weights that a run began with; only a run that was stopped before its first save asks for them again."""
    found = open_initial(str(recorded["source"]), root, say)
    if found.fingerprint != recorded["fingerprint"]:
        fix = "Start a new run."
        raise UserError("is not what this run began with.", where=f"{KEY}={recorded['source']}", fix=fix)
    return found
