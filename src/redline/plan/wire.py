"""What turns a text into latents and latents into prefixes, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORDS = 4096  # kinds that words are sorted into, by a hash
BYTES = 257  # and one for padding
GROUP = 32  # values that share a scale of two bytes, where they are sent as whole numbers
BITS = {"fp16": 16, "int8": 8, "int4": 4}  # of a value that is sent


def wire_bytes(values: int, kind: str) -> int:
    """Of so many values: their bits, and the scales."""
    scales = 0 if kind == "fp16" else -(-values // GROUP) * 2
    return -(-values * BITS[kind] // 8) + scales


@dataclass(frozen=True)
class WireShape:
    d_z: int
    layers: int
    heads: int
    patch: int
    bytes: int  # of a text, at most
    slots: int
    private: int
    models: int
    words: bool  # a head that tells the words of the text
    focus: float = 1.0  # of a query on its own stretch of the text, at first

    @classmethod
    def of(cls, options: Any, models: int) -> WireShape:
        """`options` are a recipe's `latent_prefix`."""
        names = ("d_z", "layers", "heads", "patch", "bytes", "slots", "focus")
        chosen = {name: getattr(options, name) for name in names}
        return cls(**chosen, private=options.private_slots, models=models, words=options.words_weight > 0)

    @property
    def read(self) -> int:
        """Latents that one model reads."""
        return self.slots + self.private

    @property
    def positions(self) -> int:
        """Of the encoder, for the longest text."""
        return self.bytes // self.patch

    @property
    def layer_parameters(self) -> int:
        return 12 * self.d_z**2 + 2 * self.d_z * 2

    def encoder_parameters(self) -> int:
        d = self.d_z
        embedded = BYTES * d + (self.patch * d * d if self.patch > 1 else 0)
        queries = (self.slots + self.models * self.private) * d
        pool = 12 * d * d + 2 * d * 3 + 2 + self.heads  # q, k, v, out and MLP; three norms; two gates; the focus
        return embedded + self.layers * self.layer_parameters + 2 * d + queries + pool + 2 * d + self.word_parameters

    @property
    def word_parameters(self) -> int:
        return self.d_z * WORDS if self.words else 0

    def adapter_parameters(self, d_model: int) -> int:
        d = self.d_z
        layers = 2 * d * d + 4 * d * d + 2 * d * d_model + d * d_model  # three of the MLP, and the skip
        return self.read * d + 2 * d + layers + 2 * d * d_model + 1  # slots, norm, FiLM, scale

    def parameters(self, widths: Sequence[int]) -> int:
        """All that learns, for models of these widths."""
        return self.encoder_parameters() + sum(self.adapter_parameters(width) for width in widths)

    def flops(self, positions: float | None = None, pairs: float | None = None, held: float | None = None) -> float:
        """Forward and backward, of the encoder and of the latents' look at it, for one text; the longest if not given.

        `positions` are the encoder's, padding included; `held` those of them that hold a byte; `pairs` the queries and
        keys that see each other: every position sees those that hold a byte.
        """
        positions = float(self.positions) if positions is None else positions
        held = positions if held is None else held
        pairs = positions * held if pairs is None else pairs
        d, queries = self.d_z, self.slots + self.models * self.private
        join = self.patch * d * d if self.patch > 1 else 0
        by_position = positions * (join + self.layers * 12 * d * d + 2 * d * d)  # the last: keys and values of the look
        by_query = queries * (2 + 8) * d * d  # query and output; the feed-forward layer
        return 6.0 * (by_position + by_query) + 12.0 * d * (self.layers * pairs + queries * held)

    def adapter_flops(self, d_model: int) -> float:
        """Forward and backward, of one model's prefix, and of telling the text's words from its latents."""
        d = self.d_z
        by_slot = 2 * d * d + 4 * d * d + 3 * d * d_model + self.word_parameters
        return 6.0 * (self.read * by_slot + 2 * d * d_model)

    def activation_bytes(self, wide: int) -> float:
        """Kept of one text: in each layer the stream, what is normed (in float32 too), attention and the MLP."""
        return float(self.positions * self.layers * self.d_z * (14 * wide + 16))
