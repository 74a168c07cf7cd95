"""Plan a recipe for this machine or for a named card: everything that `redline plan` prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.data.estimate import expected_facts, vocabulary
from redline.errors import (
    TORCH_REQUIREMENT,
    UsageError,
    UserError,
    dependency_hint,
    require_torch,
    torch_is_installed,
)
from redline.fields import AUTO, none_if_auto
from redline.hardware.machine import local_cpu, local_machine, named_gpu, numpy_cpu
from redline.jobs.base import job
from redline.recipe.forecast import ProbeResult, check_target, forecast
from redline.recipe.load import Loaded
from redline.recipe.resolve import DataFacts, Resolved, resolve
from redline.runs.monitor import price_notes, price_of

if TYPE_CHECKING:
    from redline.hardware.machine import Machine
    from redline.recipe.schema import Recipe

Probe = Callable[[Resolved, DataFacts], ProbeResult]


@dataclass(frozen=True)
class Plan:
    machine: str
    event: dict[str, Any]  # the fields of `redline plan --json`
    refusal: UserError | None  # set if the target speed is impossible


def plan_recipe(
    loaded: Loaded,
    *,
    gpu: str = AUTO,
    gpus: int = 1,
    nodes: int = 1,
    price: float | None = None,
    target: float | None = None,
    probe: Probe | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan a recipe for `nodes` machines with `gpus` cards each.

    `gpu` is the name of a card, "cpu", or "auto" for this machine. `price` is in USD per card and hour, `target` in
    tokens/s. `probe` measures one card's share of a step on this machine.
    """
    recipe = _complete_shape(loaded.recipe, log)
    facts = expected_facts(recipe.data, _base_vocabulary(recipe))
    facts = replace(facts, vocab_size=facts.vocab_size + job(recipe.objective).added_tokens(recipe))
    machine = _find_machine(gpu, recipe)

    def resolve_for(cards: int, machines: int) -> Resolved:
        return resolve(recipe, machine, facts, gpus=cards, nodes=machines)

    resolved = resolve_for(gpus, nodes)
    measured = None
    if probe is not None:
        _check_probe(resolved, gpu)
        measured = probe(_share_of_one_card(resolved), facts)
    price = price if price is not None else price_of(recipe.monitor.price_per_hour)
    event = resolved.plan_event(price=price, measured=measured)
    event["warnings"] = [*loaded.notes, *event["warnings"], *_caveats(resolved, facts), *price_notes(price)]
    event["measured"] = vars(measured) if measured else None
    event["scaling"] = None
    if gpus * nodes > 1:
        from redline.recipe.forecast import scaling

        event["scaling"] = scaling(resolve_for, gpus, nodes, price=price, measured=measured).event()
    refusal: UserError | None = None
    if target is not None:
        try:
            warning = check_target(target, resolved, forecast(resolved, price=price, measured=measured))
            event["warnings"] += [warning] if warning else []
        except UserError as error:
            refusal = error
        event["target"] = {
            "tokens_per_s": target,
            "possible": refusal is None,
            "reason": refusal.message() if refusal else None,
        }
    return Plan(resolved.machine.name, event, refusal)


def _complete_shape(recipe: Recipe, log: Callable[[str], None]) -> Recipe:
    """Read the shape of the base model if the recipe does not state it; shipped recipes do, and need no download."""
    if recipe.model.base is None or AUTO not in (recipe.model.layers, recipe.model.vocab):
        return recipe
    from redline.jobs.objective import job_runtime  # imports torch

    completed: Recipe = job_runtime(recipe.objective).complete(recipe, log)
    return completed


def _base_vocabulary(recipe: Recipe) -> int:
    """Return how many ids the base's tokenizer has. If its file is not on this machine: the rows of the embedding, of
    which some may be spare."""
    file = Path(recipe.model.base or "").expanduser() / "tokenizer.json"
    if recipe.model.base is not None and file.is_file():
        return vocabulary(str(file))
    return int(none_if_auto(recipe.model.vocab) or 0)


def _find_machine(gpu: str, recipe: Recipe) -> Machine:
    """Return the named card, or this machine, without importing torch if its card is in the table."""
    if gpu not in ("auto", "cpu"):
        return named_gpu(gpu)
    on_cpu = gpu == "cpu" or recipe.train.device == "cpu"
    known = local_cpu() if on_cpu else local_machine()
    if known is not None and (on_cpu or recipe.train.device in ("auto", known.device)):
        return known
    if (on_cpu or recipe.train.device == AUTO) and not torch_is_installed():
        return numpy_cpu()
    require_torch()
    from redline.hardware.probe import detect_machine  # measures a CPU the first time

    try:
        return detect_machine("cpu" if on_cpu else recipe.train.device)
    except UserError as error:
        fix = "Name the card to plan for, for example --gpu h100, or use train.device=cpu."
        raise UserError(error.what, where="train.device", fix=fix) from None


def _check_probe(resolved: Resolved, gpu: str) -> None:
    """Refuse to measure a plan for another card than the one in this machine, or one that no single card can run."""
    if (context := resolved.batch.context) > 1:
        what = f"parallel.context={context} splits each sequence over {context} cards; one card cannot measure it."
        raise UsageError(what, where="--probe", fix="Leave out --probe, or use parallel.context=1.")
    require_torch()
    from redline.hardware.probe import detect_machine

    here = detect_machine(resolved.machine.device if gpu != "auto" else "auto")
    planned = resolved.machine
    if (here.spec or here.name) != (planned.spec or planned.name):
        what = f"this machine has a {here.name}, so a plan for {gpu} cannot be measured on it."
        raise UsageError(what, where="--probe", fix="Leave out --gpu or --probe.")


def _share_of_one_card(resolved: Resolved) -> Resolved:
    """Return the plan with the global batch of one card."""
    share = resolved.batch.micro * resolved.batch.accumulation
    train = resolved.recipe.train.model_copy(update={"global_batch": share})
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"train": train}))


def _caveats(resolved: Resolved, facts: DataFacts) -> list[str]:
    """Return warnings about what the plan had to assume."""
    train, warnings = resolved.recipe.train, []
    if not facts.train_tokens:
        epochs = ", so train.epochs cannot be converted into steps" if train.epochs else ""
        sources = " and ".join(part.source for part in resolved.recipe.data.parts)
        warnings.append(f"the number of tokens in {sources} is not known before it is prepared{epochs}")
    elif facts.estimated and train.epochs:
        warnings.append("the number of tokens is estimated from the size of the files")
    if resolved.machine.device == "cpu" and not torch_is_installed():
        warnings.append(
            "numpy measured this CPU, because torch is not installed; torch may be faster or slower. "
            f"Training needs it: {dependency_hint(TORCH_REQUIREMENT)}"
        )
    if resolved.batch.world > 1 and resolved.machine.device == "cuda":
        warnings.append("the speed of several cards is an estimate: the communication between them was not measured")
    return warnings
