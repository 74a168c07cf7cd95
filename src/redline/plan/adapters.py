"""Low-rank adapters (arXiv 2106.09685) on a frozen base, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from redline.plan.shapes import DecoderShape

# what transformers calls the matrices of a block → the decoder's linear that holds it, and which part of it
TARGETS: dict[str, tuple[str, str]] = {
    "q_proj": ("qkv", "q"),
    "k_proj": ("qkv", "k"),
    "v_proj": ("qkv", "v"),
    "o_proj": ("out", "out"),
    "gate_proj": ("up", "gate"),
    "up_proj": ("up", "up"),
    "down_proj": ("down", "down"),
}
NF4_BLOCK, NESTED_BLOCK = 64, 256  # values that share a scale; scales that share one, doubly quantised


def nf4_bytes(values: float, double: bool) -> float:
    """Of so many values: half a byte each, and a scale for each block: four bytes, or one that has a scale itself."""
    scale = 1 + 4 / NESTED_BLOCK if double else 4
    return values * (0.5 + scale / NF4_BLOCK)


@dataclass(frozen=True)
class Adapter:
    r: int
    targets: tuple[str, ...]
    quantised: bool = True  # the base in NF4 (arXiv 2305.14314)
    double: bool = True

    def parameters(self, shape: DecoderShape) -> int:
        sides = matrix_sides(shape)
        return shape.layers * sum(self.r * sum(sides[name]) for name in self.targets)

    def base_bytes(self, shape: DecoderShape, bytes_per_value: int) -> float:
        """The frozen weights as they lie in memory; norms and biases stay in float32."""
        matrices = shape.layers * shape.layer_matmul_parameters
        blocks = nf4_bytes(matrices, self.double) if self.quantised else bytes_per_value * matrices
        return blocks + bytes_per_value * shape.embedding_parameters + 4.0 * shape.scalar_parameters

    def kept_values(self) -> int:
        """What its forward keeps for the backward besides, one token, one block: the narrow products. The masks of
        dropout are drawn again."""
        return self.r * len(self.targets)

    def moved_values(self, shape: DecoderShape) -> int:
        """What the narrow matmuls read and write beside the base's, one token, one block.

        Forward: the input in; the wide output out, and in again where the base's product is added. Backward: the
        output's gradient in twice, the input in, its gradient out, and in again.
        """
        return sum(4 * inputs + 4 * outputs for inputs, outputs in _linear_sides(shape, self.targets))


def _linear_sides(shape: DecoderShape, targets: tuple[str, ...]) -> list[tuple[int, int]]:
    """Inputs, and outputs that have adapters, of each of a block's linears: merged matrices read one input."""
    sides, found = matrix_sides(shape), dict[str, tuple[int, int]]()
    for name in targets:
        if name in sides:
            linear, (inputs, outputs) = TARGETS[name][0], sides[name]
            found[linear] = (inputs, found.get(linear, (0, 0))[1] + outputs)
    return list(found.values())


def matrix_sides(shape: DecoderShape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each matrix of a block."""
    d, f = shape.d_model, shape.d_ff
    gated = {"gate_proj": (d, f)} if shape.mlp == "swiglu" else {}
    return {
        "q_proj": (d, shape.d_attention),
        "k_proj": (d, shape.d_kv),
        "v_proj": (d, shape.d_kv),
        "o_proj": (shape.d_attention, d),
        **gated,
        "up_proj": (d, f),
        "down_proj": (f, d),
    }
