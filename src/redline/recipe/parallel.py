"""How several GPUs share a run: a copy of the model in each (ddp), or a share of it (fsdp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redline.errors import Problem, RecipeError
from redline.fields import AUTO, none_if_auto
from redline.planning.memory import LOW_BIT
from redline.units import GIB

if TYPE_CHECKING:
    from redline.recipe.schema import Recipe
from redline.jobs.base import costs
from redline.planning.communication import (
    GIGABIT,
    NETWORK_GBPS_PER_CARD,
    Fabric,
    Volume,
    block_tensors,
    ddp_volume,
    fsdp_volume,
    padded_bytes,
    root_tensors,
)
from redline.planning.memory import MUON

if TYPE_CHECKING:
    from redline.recipe.resolve import Resolved


DDP, FSDP = "ddp", "fsdp"


def choose_mode(recipe: Recipe, world: int, *, frozen: bool, copy: float, room: float) -> tuple[str, str]:
    """Mode and reason. `copy` bytes is the least that a rank needs which holds all of the model, of `room`; `frozen`:
    most of the model does not learn."""
    asked, reason = recipe.parallel.mode, _not_sharded(recipe, frozen)
    if asked == FSDP and reason:
        raise RecipeError("recipe", [Problem("parallel.mode", f"fsdp cannot be: {reason}.", "Use parallel.mode: ddp.")])
    if asked != AUTO:
        return asked, "as asked"
    if world == 1:
        return DDP, ""
    if reason:
        return DDP, reason
    needs = f"a copy of the model needs {copy / GIB:.1f} of {room / GIB:.1f} GiB with one sequence"
    return (DDP, needs) if copy <= room else (FSDP, f"{needs}: each GPU holds a share of 1/{world}")


def _not_sharded(recipe: Recipe, frozen: bool) -> str:
    """Why a model is not shared by rows; empty when it can be."""
    if recipe.model.quant != "none":
        return "a quantised base has no rows to share; each GPU holds all of its 4 bits"
    if frozen:
        return "a frozen base has neither gradients nor moments to share; each GPU holds all of it"
    if recipe.train.optimizer in LOW_BIT:
        return f"{recipe.train.optimizer} keeps moments in blocks that do not end where rows do"
    return ""


def adapt_to_world(recipe: Recipe, world: int) -> Recipe:
    """A resolved recipe as so many ranks would go on with it: the global batch stays, and its parts follow from it."""
    train = recipe.train
    total, micro, accumulation = (none_if_auto(x) for x in (train.global_batch, train.micro_batch, train.accumulation))
    if not total or not micro or micro * (accumulation or 0) * world == total:
        return recipe
    keeps = total % (micro * world) == 0
    update = {"accumulation": AUTO, "micro_batch": micro if keeps else AUTO}
    return recipe.model_copy(update={"train": train.model_copy(update=update)})


# ----------------------------------------------------------------------------------------------------
# How a resolved recipe's cards share the work, what they tell each other, and over which wires.


def parallel_mode(resolved: Resolved) -> str:
    """fsdp where each card holds a share of the model, else ddp."""
    return "fsdp" if resolved.recipe.parallel.mode == "fsdp" else "ddp"


def planned_fabric(resolved: Resolved) -> Fabric:
    """Links from the table of cards, the network from the recipe or assumed."""
    gpus, spec = resolved.batch.world // resolved.nodes, resolved.machine.spec
    gbps = resolved.recipe.parallel.network_gbps or NETWORK_GBPS_PER_CARD * gpus
    return Fabric(gpus, resolved.nodes, spec.link if spec else None, gbps * GIGABIT)


def communication_volume(resolved: Resolved) -> Volume:
    """Nothing, for one card."""
    shape, batch = resolved.shape, resolved.batch
    counted = costs(resolved.recipe).parameters(shape)
    if batch.world == 1:
        return Volume()
    if parallel_mode(resolved) == "ddp":
        return ddp_volume(4.0 * counted["trainable"])
    blocks = shape.layers * padded_bytes(block_tensors(shape), batch.world)
    root = padded_bytes(root_tensors(shape), batch.world)
    muon = resolved.recipe.train.optimizer in MUON
    return fsdp_volume(
        blocks=blocks,
        root=root,
        gradients=blocks + root,
        layers=shape.layers,
        micros=batch.accumulation,
        orthogonalised=4.0 * shape.layers * shape.layer_matmul_parameters if muon else 0.0,
    )
