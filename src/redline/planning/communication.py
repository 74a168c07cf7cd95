"""Communication between GPUs in a step: the bytes, which are exact, and the seconds, which are an estimate.

Tests compare the bytes with what the trainer sends. The seconds rest on assumptions, because no cluster was available
to measure (docs/decisions/0018-several-cards.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from redline.planning.context import message_bytes
from redline.planning.shapes import DecoderShape

MODES = ("ddp", "fsdp")
# Assumptions, not measurements: the share of its rated bandwidth that a link reaches with large messages, and the
# latency that a message of any size adds at each GPU of a ring.
WIRE_SHARE = 0.8
HOP_SECONDS = 5e-6
NETWORK_GBPS_PER_CARD = 400.0  # if the recipe states none: an adapter of 400 Gbit/s for each GPU
BUCKET = 25 << 20  # bytes that DDP all-reduces in one message
GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Volume:
    """Bytes of one step as passed to the collectives: whole tensors, not one GPU's share of them."""

    reduced: float = 0.0  # gradients, all-reduced
    gathered: float = 0.0  # parameters, all-gathered from their shards
    scattered: float = 0.0  # gradients, reduce-scattered to their shards
    exchanged: float = 0.0  # by all GPUs together, for Muon: rows sent to the owner of a matrix and back
    calls: int = 0
    context: int = 1  # GPUs that share each sequence
    keys_gathered: float = 0.0  # keys and values, all-gathered in each of their groups
    keys_scattered: float = 0.0  # gradients of keys and values, reduce-scattered in each group
    key_calls: int = 0
    micros: int = 1  # micro-batches, whose forward and backward passes hide the messages

    def sent(self, world: int) -> float:
        """Return the bytes that each GPU sends in rings, where an all-reduce is a reduce-scatter and an all-gather."""
        whole = (world - 1) / world * (2 * self.reduced + self.gathered + self.scattered + self.exchanged / world)
        return whole + self.keys_sent

    @property
    def keys_sent(self) -> float:
        """The bytes of keys and values, and of their gradients, that each GPU sends."""
        return (self.context - 1) / self.context * (self.keys_gathered + self.keys_scattered)

    def without_keys(self) -> Volume:
        return replace(self, keys_gathered=0.0, keys_scattered=0.0, key_calls=0)


def ddp_volume(gradient_bytes: float) -> Volume:
    """Return the volume of DDP: gradients once a step, for any number of micro-batches."""
    return Volume(reduced=gradient_bytes, calls=math.ceil(gradient_bytes / BUCKET))


def fsdp_volume(
    *, blocks: float, root: float, gradients: float, layers: int, micros: int, orthogonalised: float = 0.0
) -> Volume:
    """Return the volume of FSDP.

    Every micro-batch gathers each block for the forward pass and again for the backward pass. The rest of the model
    (`root`) is gathered once and kept, because the backward pass needs it first. Gradients are scattered to their
    shards once a step. Muon needs whole matrices: the rows of each go to one GPU, and the update's rows come back.
    """
    return Volume(
        gathered=micros * (2 * blocks + root),
        scattered=gradients,
        exchanged=2 * orthogonalised,
        calls=micros * (2 * layers + 1) + layers + 1 + 2 * (orthogonalised > 0),
        micros=micros,
    )


def with_keys(
    volume: Volume,
    shape: DecoderShape,
    *,
    context: int,
    positions: float,
    micros: int,
    bytes_per_value: int,
    again: bool,
) -> Volume:
    """Add what `context` GPUs exchange that share each sequence.

    `positions` are those of all micro-batches of a step. Each layer gathers keys and values once in every forward pass
    (`again`: also when the backward pass recomputes it), and scatters their gradients.
    """
    if context == 1:
        return volume
    each = shape.layers * message_bytes(shape, positions, bytes_per_value)
    gathers = 2 if again else 1
    calls = shape.layers * (gathers + 1) * micros
    return replace(volume, context=context, keys_gathered=gathers * each, keys_scattered=each, key_calls=calls)


def padded_bytes(tensors: Iterable[tuple[int, int]], world: int, bytes_per_value: int = 4) -> int:
    """Return the bytes of tensors sharded by rows: FSDP pads the rows to a multiple of the world size."""
    return sum(-(-rows // world) * world * columns for rows, columns in tensors) * bytes_per_value


def block_tensors(shape: DecoderShape) -> list[tuple[int, int]]:
    """Return rows and columns of each parameter of a block."""
    d = shape.d_model
    matrices = [(shape.d_qkv, d), (d, shape.d_attention), (shape.d_up, d), (d, shape.d_ff)]
    norms = [(d, 1), (d, 1), *[(shape.head_dim, 1)] * (2 if shape.qk_norm else 0)]
    return [*matrices, *norms, *([(shape.d_qkv, 1)] if shape.qkv_bias else [])]


def root_tensors(shape: DecoderShape) -> list[tuple[int, int]]:
    """Return rows and columns of each parameter outside the blocks: embeddings, head, last norm, skip weights."""
    tables = [(shape.vocab, shape.d_model)] * (1 if shape.tied else 2)
    values = [(shape.vocab, shape.d_kv)] * shape.value_embeddings
    return [*tables, *values, (shape.d_model, 1), *([(shape.skip_count, 1)] if shape.skip_count else [])]


@dataclass(frozen=True)
class Fabric:
    """The links between GPUs, in bytes/s in one direction; None means unknown."""

    gpus: int = 1
    nodes: int = 1
    link: float | None = None  # from one GPU to the others of its node
    network: float | None = None  # from one node to the others, all its adapters together

    @property
    def world(self) -> int:
        return self.gpus * self.nodes

    @property
    def bandwidth(self) -> float | None:
        """Return the bandwidth of a ring over all GPUs: that of its slowest link. None if a link is unknown."""
        links = [self.link] * (self.gpus > 1) + [self.network] * (self.nodes > 1)
        known = [link for link in links if link]
        return min(known, default=math.inf) if len(known) == len(links) else None

    def seconds(self, volume: Volume) -> float | None:
        """Return the seconds of all messages of a step if none overlapped with computation."""
        bandwidth = self.bandwidth
        if bandwidth is None:
            return None
        hops = self.gpus - 1 + self.nodes - 1
        rest = volume.without_keys()
        return (
            rest.sent(self.world) / (WIRE_SHARE * bandwidth) + rest.calls * hops * HOP_SECONDS + self._of_keys(volume)
        )

    def _of_keys(self, volume: Volume) -> float:
        """Return the seconds of the exchange of keys and values, in groups of consecutive GPUs."""
        within = volume.context <= self.gpus and self.gpus % volume.context == 0
        bandwidth = self.link if within else self.bandwidth
        if volume.context == 1 or not bandwidth:
            return 0.0
        return volume.keys_sent / (WIRE_SHARE * bandwidth) + volume.key_calls * (volume.context - 1) * HOP_SECONDS


def exposed_seconds(volume: Volume, fabric: Fabric, micro: float) -> float | None:
    """Return the seconds that communication adds to a step whose micro-batches take `micro` seconds each.

    All-reduces overlap with the last backward pass, and gathers with the blocks before them. Nothing overlaps with the
    last message of a backward pass, the first gather, the messages of Muon's update, or keys and values, for which
    attention waits.
    """
    in_passes = replace(volume.without_keys(), exchanged=0.0, calls=volume.calls - 2 * (volume.exchanged > 0))
    every, overlapping = fabric.seconds(volume), fabric.seconds(in_passes)
    if every is None or overlapping is None or fabric.world == 1:
        return every
    return every - overlapping + _exposed_in_passes(in_passes, overlapping, micro)


def _exposed_in_passes(volume: Volume, total: float, micro: float) -> float:
    """Return the part of `total` seconds of messages that the forward and backward passes do not hide."""
    message = total / max(volume.calls, 1)

    def exposed(sending: float, computing: float) -> float:
        # At least one message is exposed: the computation that would hide the last one has ended.
        return min(sending, max(message, sending - computing))

    # A forward pass takes a third of a micro-batch's time, a backward pass two thirds.
    if not volume.gathered:
        return exposed(total, micro * 2 / 3)
    gathering = total * volume.gathered / (volume.gathered + volume.scattered)
    each = gathering / volume.micros / 2  # once in a forward pass, once in a backward pass
    forwards = volume.micros * exposed(each, micro / 3)
    backwards = (volume.micros - 1) * exposed(each, micro * 2 / 3)
    return forwards + backwards + exposed(each + total - gathering, micro * 2 / 3)
