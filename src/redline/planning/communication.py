"""Communication between GPUs in a step: the bytes, which are exact, and the seconds, which are an estimate.

Tests compare the bytes with what the trainer sends. The seconds rest on assumptions, because no cluster was available
to measure (docs/decisions/0018-several-cards.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from redline.planning.context import message_bytes
from redline.planning.shapes import DecoderShape
from redline.planning.shards import Units

SHARDED = ("fsdp", "hsdp")  # modes in which a rank holds rows of every tensor
MODES = ("ddp", *SHARDED)
# How gradients of several micro-batches are summed in these modes: as rows, scattered after each of them, or whole
# until the last one.
ROWS, WHOLE = "sharded", "whole"
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
    shards: int = 0  # GPUs of a group that shares one copy of the model; 0: all of them
    context: int = 1  # GPUs that share each sequence
    keys_gathered: float = 0.0  # keys and values, all-gathered in each of their groups
    keys_scattered: float = 0.0  # gradients of keys and values, reduce-scattered in each group
    key_calls: int = 0
    micros: int = 1  # micro-batches, whose forward and backward passes hide the messages
    scatters: int = 1  # backward passes that scatter gradients: the last one, or each

    def sent(self, world: int) -> float:
        """Return the bytes that each GPU sends in rings, where an all-reduce is a reduce-scatter and an all-gather."""
        return self.sent_in_group(world) + self.sent_between_groups(world) + self.keys_sent

    def sent_in_group(self, world: int) -> float:
        """Return the bytes that each GPU sends to those with which it shares a copy of the model."""
        ranks = self.shards or world
        reduced = 0.0 if self.shards else 2 * self.reduced
        return (ranks - 1) / ranks * (reduced + self.gathered + self.scattered + self.exchanged / ranks)

    def sent_between_groups(self, world: int) -> float:
        """Return the bytes that each GPU sends to those that hold the same rows of other copies."""
        replicas = world // (self.shards or world)
        return (replicas - 1) / replicas * 2 * self.reduced

    @property
    def keys_sent(self) -> float:
        """The bytes of keys and values, and of their gradients, that each GPU sends."""
        return (self.context - 1) / self.context * (self.keys_gathered + self.keys_scattered)

    def without_keys(self) -> Volume:
        return replace(self, keys_gathered=0.0, keys_scattered=0.0, key_calls=0)


def ddp_volume(gradient_bytes: float) -> Volume:
    """Return the volume of DDP: gradients once a step, for any number of micro-batches."""
    return Volume(reduced=gradient_bytes, calls=math.ceil(gradient_bytes / BUCKET))


def sharded_volume(
    units: Units, ranks: int, replicas: int = 1, *, micros: int, whole: bool, orthogonalised: float = 0.0
) -> Volume:
    """Return the volume of FSDP over groups of `ranks`, and with several `replicas` (groups) of HSDP.

    Every micro-batch gathers each block for the forward pass and again for the backward pass. The rest of the model is
    gathered once and kept, because the backward pass needs it first. Gradients are scattered to their shards in every
    micro-batch, or once a step if they are summed whole; the groups all-reduce their shards once a step. Muon needs
    whole matrices: the rows of each go to one GPU of the group, and the update's rows come back.
    """
    block, root = units.gathered(ranks)
    of_block, of_root = units.scattered(ranks)
    gradients, times = units.layers * of_block + of_root, 1 if whole else micros
    messages = units.layers * (of_block > 0) + (of_root > 0)
    return Volume(
        reduced=gradients / ranks if replicas > 1 else 0.0,
        gathered=micros * (2 * units.layers * block + root),
        scattered=times * gradients,
        exchanged=2 * orthogonalised,
        calls=micros * (2 * units.layers + 1) + (times + (replicas > 1)) * messages + 2 * (orthogonalised > 0),
        micros=micros,
        shards=ranks,
        scatters=times,
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
        in_group, between = rest.sent_in_group(self.world), rest.sent_between_groups(self.world)
        if self._within_node(rest.shards or self.world) and self.link:
            sending = in_group / self.link
        else:
            sending = in_group / bandwidth
        if between:  # all GPUs of a node send at the same time
            sending += between * self.gpus / self.network if self.nodes > 1 and self.network else between / bandwidth
        return sending / WIRE_SHARE + rest.calls * hops * HOP_SECONDS + self._of_keys(volume)

    def _within_node(self, group: int) -> bool:
        """Return whether groups of so many consecutive GPUs each lie within one node."""
        return group <= self.gpus and self.gpus % group == 0

    def _of_keys(self, volume: Volume) -> float:
        """Return the seconds of the exchange of keys and values, in groups of consecutive GPUs."""
        bandwidth = self.link if self._within_node(volume.context) else self.bandwidth
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
    scattering = (total - gathering) / volume.scatters
    forwards = volume.micros * exposed(each, micro / 3)
    backwards = (volume.micros - volume.scatters) * exposed(each, micro * 2 / 3)
    return forwards + backwards + volume.scatters * exposed(each + scattering, micro * 2 / 3)
