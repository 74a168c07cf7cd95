"""A run, opened for looking: its objective with trained weights. `folder` opens what is no run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from redline.data.shards import OtherTokenizerError
from redline.errors import UsageError, UserError
from redline.hardware.detect import detect
from redline.jobs import job
from redline.objectives import objective_module
from redline.objectives.base import Objective
from redline.recipe.identity import check_model
from redline.recipe.load import parse_overrides
from redline.recipe.lock import locked_recipe, read_lock
from redline.recipe.parallel import for_world
from redline.recipe.resolve import DataFacts, resolve
from redline.recipe.schema import Recipe
from redline.train.weights import copy_weights, find_weights

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
    module = objective_module(recipe.objective)
    if answers and not module.can_answer(recipe):
        what = f"is a {recipe.objective} run: it continues texts, and answers no questions."
        raise UsageError(what, where=str(run), fix="Leave out --answers for its loss; `redline sample` lets it write.")
    recipe = _with_settings(_with_base(recipe, base, run), settings)
    own = recipe if source is not None and not writes_only else None
    machine = detect(device, "--device ")
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
    check_model(chosen.state["identity"], recipe, run)
    if writes_only:
        facts = DataFacts(**lock["data"])
        data = module.tokenizer_alone(facts, run, recipe)
    else:
        try:
            data = module.load_data(recipe, for_evaluation=source is not None)
        except OtherTokenizerError:
            raise _other_tokenizer(run) from None
        facts = data.facts
        if source is None and facts.fingerprint != chosen.state["identity"]["data"]:
            say("the data are not what the run was trained on any more: what is held out now, it may have learnt from")
    if chosen.state["identity"]["tokenizer"] != facts.tokenizer_fingerprint:
        raise _other_tokenizer(run)
    resolved = resolve(for_world(recipe, 1), machine, facts)  # whoever trained it, one process reads it
    objective: Objective = module.create(resolved, data)
    objective.tell = say
    if source and not writes_only and not (answers and objective.rereads):
        for line in getattr(data, "told", ()):  # what is left out is not in the figures
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
    allowed = [f"{recipe.objective}.{name}" for name in getattr(own, "afterwards", ())]
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
