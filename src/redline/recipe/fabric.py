"""How a resolved recipe's cards share the work, what they tell each other, and over which wires."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redline.jobs import costs
from redline.plan.communication import (
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
from redline.plan.memory import MUON

if TYPE_CHECKING:
    from redline.recipe.resolve import Resolved


def mode_of(resolved: Resolved) -> str:
    """fsdp where each card holds a share of the model, else ddp."""
    return "fsdp" if resolved.recipe.parallel.mode == "fsdp" else "ddp"


def fabric_of(resolved: Resolved) -> Fabric:
    """Links from the table of cards, the network from the recipe or assumed."""
    gpus, spec = resolved.batch.world // resolved.nodes, resolved.machine.spec
    gbps = resolved.recipe.parallel.network_gbps or NETWORK_GBPS_PER_CARD * gpus
    return Fabric(gpus, resolved.nodes, spec.link if spec else None, gbps * GIGABIT)


def volume_of(resolved: Resolved) -> Volume:
    """Nothing, for one card."""
    shape, batch = resolved.shape, resolved.batch
    counted = costs(resolved.recipe).parameters(shape)
    if batch.world == 1:
        return Volume()
    if mode_of(resolved) == "ddp":
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
