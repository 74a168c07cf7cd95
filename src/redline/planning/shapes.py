"""The decoder's shape: the numbers from which the model is built and its parameters and FLOPs are counted.

Beside the shape, this module has the named sizes, the RoPE scaling options and the shapes of adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

VOCAB_MULTIPLE = 64  # tensor cores are faster with it; 50257 becomes 50304


def padded_vocab(vocab: int) -> int:
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


# The activations of the feed-forward layer, and whether each is gated (its up projection is two matrices, gate and up).
# Their functions are in kernels/activations.py.
ACTIVATIONS = {"swiglu": True, "relu2": False}


@dataclass(frozen=True)
class DecoderShape:
    """The fields are keys of the recipe's `model` section."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    mlp: str = "swiglu"
    tied: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False  # biases on queries, keys and values
    value_embeddings: int = 0  # embedding tables whose rows are added to the values of attention
    skips: str = "none"  # none, x0 or unet: which earlier states of the residual stream are added to it

    @property
    def d_attention(self) -> int:
        return self.heads * self.head_dim

    @property
    def d_qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the activation multiplies a gate with the up projection."""
        return ACTIVATIONS[self.mlp]

    @property
    def d_up(self) -> int:
        """Width of the first feed-forward matrix, which holds gate and up merged."""
        return 2 * self.d_ff if self.gated else self.d_ff

    @property
    def d_kv(self) -> int:
        """Width of the keys, which is that of the values."""
        return self.kv_heads * self.head_dim

    @property
    def value_tables(self) -> list[int | None]:
        """For each layer, the table that is added to its values; the first layers share them with the last."""
        tables: list[int | None] = [None] * self.layers
        for table in range(self.value_embeddings):
            tables[table] = tables[self.layers - self.value_embeddings + table] = table
        return tables

    @property
    def skip_sources(self) -> list[int | None]:
        """For each layer, the layer whose input is added to its own."""
        layers = range(self.layers)
        if self.skips == "x0":
            return [0 if layer else None for layer in layers]
        if self.skips == "unet":
            return [self.layers - 1 - layer if 2 * layer >= self.layers else None for layer in layers]
        return [None for _ in layers]

    @property
    def skip_count(self) -> int:
        return sum(source is not None for source in self.skip_sources)

    @property
    def layer_matmul_parameters(self) -> int:
        attention = self.d_model * self.d_qkv + self.d_attention * self.d_model
        return attention + self.d_model * self.d_up + self.d_ff * self.d_model

    @property
    def layer_recomputed_parameters(self) -> int:
        """Parameters of a layer that recomputation multiplies again.

        `down` is left out: no gradient depends on its output.
        """
        return self.layer_matmul_parameters - self.d_ff * self.d_model

    @property
    def head_parameters(self) -> int:
        return self.vocab * self.d_model

    @property
    def matmul_parameters(self) -> int:
        """Parameters that multiply a token: the head, tied or not, but not the embedding, which is looked up."""
        return self.layers * self.layer_matmul_parameters + self.head_parameters

    @property
    def scalar_parameters(self) -> int:
        per_layer = 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0) + (self.d_qkv if self.qkv_bias else 0)
        return self.layers * per_layer + self.d_model + self.skip_count

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * (self.d_model * (1 if self.tied else 2) + self.d_kv * self.value_embeddings)

    def not_fused(self, *, dropout: float, checkpointing: str) -> str:
        """Return why the fused blocks cannot compute such a model, or "" if they can."""
        reasons = {
            "model.dropout is on": dropout > 0,
            "train.grad_checkpointing is on": checkpointing != "none",
        }
        return ", ".join(reason for reason, holds in reasons.items() if holds)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_matmul_parameters + self.embedding_parameters + self.scalar_parameters


SHAPE_KEYS = tuple(field.name for field in fields(DecoderShape))


# name → (layers, d_model, heads, d_ff); d_ff is about 8/3·d, a multiple of 64
SIZES: dict[str, tuple[int, int, int, int]] = {
    "1m": (4, 128, 4, 384),
    "2.1m": (3, 192, 3, 512),  # heads of 64, which suit the matmuls of a CPU
    "2m": (4, 192, 4, 512),
    "5m": (6, 256, 4, 704),
    "15m": (8, 384, 6, 1024),
    "40m": (12, 512, 8, 1408),
    "125m": (12, 768, 12, 2048),
    "350m": (24, 1024, 16, 2688),
    "760m": (24, 1536, 16, 4096),
    "1.3b": (24, 2048, 16, 5504),
}


_HUGE = 1e18
# rope_type → its parameters, by the names that published models use
ROPE_SCALING: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def checked_rope_scaling(value: Any) -> dict[str, Any]:
    """Return `rope_type` and exactly the parameters of that type. Raise a ValueError that says what is wrong."""
    kind = value.get("rope_type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in ROPE_SCALING:
        form = f"a mapping with a rope_type of {', '.join(ROPE_SCALING)}"
        raise ValueError(f"{value!r} is not null or {form}: {{rope_type: linear, factor: 2}}.")
    names = ROPE_SCALING[kind]
    wrong = [f"{name} is missing" for name in names if name not in value]
    wrong += [f"{name} is not one of them" for name in value if name not in ("rope_type", *names)]
    if wrong:
        raise ValueError(f"{kind} has {', '.join(names)}: {', '.join(wrong)}.")
    for name in names:
        number = value[name]
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < _HUGE:
            raise ValueError(f"{name} is {number!r}, not a number above 0.")
    if kind == "llama3" and value["low_freq_factor"] >= value["high_freq_factor"]:
        raise ValueError("low_freq_factor must be below high_freq_factor.")
    numbers = {name: int(value[name]) if name.startswith("original") else float(value[name]) for name in names}
    return {"rope_type": kind, **numbers}


# ----------------------------------------------------------------------------------------------------
# Low-rank adapters (arXiv 2106.09685) on a frozen base.


# transformers' name of a block's matrix → the decoder's linear layer that holds it, and which part of it
TARGETS: dict[str, tuple[str, str]] = {
    "q_proj": ("qkv", "q"),
    "k_proj": ("qkv", "k"),
    "v_proj": ("qkv", "v"),
    "o_proj": ("out", "out"),
    "gate_proj": ("up", "gate"),
    "up_proj": ("up", "up"),
    "down_proj": ("down", "down"),
}
NF4_BLOCK, NESTED_BLOCK = 64, 256  # values that share a scale; scales that share a scale if quantised doubly


def nf4_bytes(values: float, double: bool) -> float:
    """Return the bytes of `values` in NF4: half a byte each, and a scale per block.

    A scale takes four bytes, or one byte and its part of a shared scale if quantised doubly.
    """
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
        """Return the bytes of the frozen weights in memory; norms and biases stay in float32."""
        matrices = shape.layers * shape.layer_matmul_parameters
        blocks = nf4_bytes(matrices, self.double) if self.quantised else bytes_per_value * matrices
        return blocks + bytes_per_value * shape.embedding_parameters + 4.0 * shape.scalar_parameters

    def kept_values(self) -> int:
        """Return the values per token and block that the forward keeps for the backward: the narrow products.

        Dropout masks are not kept; the backward pass draws them again.
        """
        return self.r * len(self.targets)

    def moved_values(self, shape: DecoderShape) -> int:
        """Return the values per token and block that the narrow matmuls read and write, beside those of the base.

        Forward: read the input, write the wide output, and read it again to add the base's product. Backward: read the
        output's gradient twice, read the input, write its gradient, and read it again.
        """
        return sum(4 * inputs + 4 * outputs for inputs, outputs in _linear_sides(shape, self.targets))


def _linear_sides(shape: DecoderShape, targets: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the inputs, and the outputs with adapters, of each linear layer of a block.

    Merged matrices count their input once, because one matmul reads it for all of them.
    """
    sides, linears = matrix_sides(shape), dict[str, tuple[int, int]]()
    for name in targets:
        if name in sides:
            linear, (inputs, outputs) = TARGETS[name][0], sides[name]
            linears[linear] = (inputs, linears.get(linear, (0, 0))[1] + outputs)
    return list(linears.values())


def matrix_sides(shape: DecoderShape) -> dict[str, tuple[int, int]]:
    """Return the numbers of inputs and outputs of each matrix of a block."""
    d, f = shape.d_model, shape.d_ff
    gated = {"gate_proj": (d, f)} if shape.gated else {}
    return {
        "q_proj": (d, shape.d_attention),
        "k_proj": (d, shape.d_kv),
        "v_proj": (d, shape.d_kv),
        "o_proj": (shape.d_attention, d),
        **gated,
        "up_proj": (d, f),
        "down_proj": (f, d),
    }
