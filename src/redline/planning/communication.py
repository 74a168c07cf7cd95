"""What cards say to each other in a step: how many bytes, and how long that takes. The bytes are counted; the seconds
are an estimate, for no cluster has been measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from redline.planning.shapes import DecoderShape

MODES = ("ddp", "fsdp")
# Assumptions, not measurements: the share of a rated wire that large messages reach, and what a message costs at each
# card it passes, however small it is.
WIRE_SHARE = 0.8
HOP_SECONDS = 5e-6
NETWORK_GBPS_PER_CARD = 400.0  # where a recipe does not say: an adapter of 400 Gbit/s for each card
BUCKET = 25 << 20  # bytes that DDP reduces at once
GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Volume:
    """Bytes of one step as the collectives are given them: whole tensors, not a card's share of them."""

    reduced: float = 0.0  # gradients, all-reduced
    gathered: float = 0.0  # parameters, all-gathered from their shards
    scattered: float = 0.0  # gradients, reduce-scattered to their shards
    exchanged: float = 0.0  # by all cards together: rows of what one of them orthogonalises, and of its result
    calls: int = 0
    micros: int = 1  # forwards and backwards behind which it hides

    def sent(self, world: int) -> float:
        """Bytes that each card sends, by rings: an all-reduce is a reduce-scatter and an all-gather."""
        return (world - 1) / world * (2 * self.reduced + self.gathered + self.scattered + self.exchanged / world)


def ddp_volume(gradient_bytes: float) -> Volume:
    """Gradients once a step, however many micro-batches made them."""
    return Volume(reduced=gradient_bytes, calls=math.ceil(gradient_bytes / BUCKET))


def fsdp_volume(
    *, blocks: float, root: float, gradients: float, layers: int, micros: int, orthogonalised: float = 0.0
) -> Volume:
    """Every micro-batch gathers each block for the forward and again for the backward; the rest of the model, which
    the backward needs first, is gathered once and kept. Gradients go to their shards once a step. Muon's update takes
    whole matrices: their rows go to one card each, and come back."""
    return Volume(
        gathered=micros * (2 * blocks + root),
        scattered=gradients,
        exchanged=2 * orthogonalised,
        calls=micros * (2 * layers + 1) + layers + 1 + 2 * (orthogonalised > 0),
        micros=micros,
    )


def padded_bytes(tensors: Iterable[tuple[int, int]], world: int, bytes_per_value: int = 4) -> int:
    """Of tensors that are shared by rows: the shares are equal, so that the last is filled up."""
    return sum(-(-rows // world) * world * columns for rows, columns in tensors) * bytes_per_value


def block_tensors(shape: DecoderShape) -> list[tuple[int, int]]:
    """Rows and columns of a block's parameters."""
    d = shape.d_model
    matrices = [(shape.d_qkv, d), (d, shape.d_attention), (shape.d_up, d), (d, shape.d_ff)]
    norms = [(d, 1), (d, 1), *[(shape.head_dim, 1)] * (2 if shape.qk_norm else 0)]
    return [*matrices, *norms, *([(shape.d_qkv, 1)] if shape.qkv_bias else [])]


def root_tensors(shape: DecoderShape) -> list[tuple[int, int]]:
    """The same of what no block holds: embeddings, head, the last norm, the weights of skips."""
    tables = [(shape.vocab, shape.d_model)] * (1 if shape.tied else 2)
    values = [(shape.vocab, shape.d_kv)] * shape.value_embeddings
    return [*tables, *values, (shape.d_model, 1), *([(shape.skip_count, 1)] if shape.skip_count else [])]


@dataclass(frozen=True)
class Fabric:
    """The wires: cards in each node, nodes, and bytes/s in one direction; None where nobody knows."""

    gpus: int = 1
    nodes: int = 1
    link: float | None = None  # of a card to the others of its node
    network: float | None = None  # of a node to the others, all its adapters together

    @property
    def world(self) -> int:
        return self.gpus * self.nodes

    @property
    def bandwidth(self) -> float | None:
        """Of rings over all cards at their narrowest: a card's link carries all of them, and so do the adapters of a
        node together."""
        wires = [self.link] * (self.gpus > 1) + [self.network] * (self.nodes > 1)
        known = [wire for wire in wires if wire]
        return min(known, default=math.inf) if len(known) == len(wires) else None

    def seconds(self, volume: Volume) -> float | None:
        """Of all messages of a step one after the other, if nothing hid them."""
        bandwidth = self.bandwidth
        if bandwidth is None:
            return None
        hops = self.gpus - 1 + self.nodes - 1
        return volume.sent(self.world) / (WIRE_SHARE * bandwidth) + volume.calls * hops * HOP_SECONDS


def exposed_seconds(volume: Volume, fabric: Fabric, micro: float) -> float | None:
    """What the messages add to a step whose micro-batches take `micro` seconds each.

    All-reduces hide behind the last backward, gathers behind the blocks before them; the last message of a backward,
    the first gather, and what an update waits for hide behind nothing.
    """
    within = replace(volume, exchanged=0.0, calls=volume.calls - 2 * (volume.exchanged > 0))
    whole, total = fabric.seconds(volume), fabric.seconds(within)
    if whole is None or total is None or fabric.world == 1:
        return whole
    return whole - total + _unhidden(within, total, micro)


def _unhidden(volume: Volume, total: float, micro: float) -> float:
    one = total / max(volume.calls, 1)

    def beyond(spoken: float, hidden: float) -> float:
        return min(spoken, max(one, spoken - hidden))

    if not volume.gathered:
        return beyond(total, micro * 2 / 3)
    gathering = total * volume.gathered / (volume.gathered + volume.scattered)
    each = gathering / volume.micros / 2  # in a forward, and in a backward
    forwards = volume.micros * beyond(each, micro / 3)
    backwards = (volume.micros - 1) * beyond(each, micro * 2 / 3)
    return forwards + backwards + beyond(each + total - gathering, micro * 2 / 3)
