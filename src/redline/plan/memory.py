"""What a step needs, part by part, from shapes alone. The warm-up verifies it with the worst-case batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from redline.plan.shapes import DecoderShape
from redline.units import GIB

LOGITS_PER_CHUNK = 1 << 29  # the head runs over this many logits at once (never 2^31: kernels index in int32)
WORKSPACE = 1.0 * GIB  # CUDA context, cuBLAS and cuDNN workspaces


@dataclass(frozen=True)
class MemoryParts:
    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspace: float

    @property
    def peak(self) -> float:
        return sum(asdict(self).values())

    def gib(self) -> dict[str, float]:
        parts = {name: round(value / GIB, 3) for name, value in asdict(self).items()}
        return {**parts, "peak": round(self.peak / GIB, 3)}


def head_chunk(vocab: int, tokens: int) -> int:
    """Tokens whose logits are held at once."""
    return max(1, min(tokens, LOGITS_PER_CHUNK // vocab))


def activation_bytes_per_token(shape: DecoderShape, bytes_per_value: int, checkpointing: str) -> float:
    """What the forward keeps for the backward, one token, all layers."""
    d = shape.d_model
    residual_and_norms = 4 * d  # block input, both normalised inputs, the stream between attention and MLP
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim
    attention = shape.d_qkv + rotated + 2 * shape.d_attention  # the output in the kernel's layout and in ours
    mlp = shape.d_up + shape.d_ff
    values = {
        "none": residual_and_norms + attention + mlp,
        "selective": d + shape.d_qkv + shape.d_attention + shape.d_up + d,  # matmul and attention outputs only
        "full": d,
    }[checkpointing]
    per_layer = values * bytes_per_value + 4 * shape.heads  # + log-sum-exp, fp32
    one_block = (residual_and_norms + attention + mlp) * bytes_per_value if checkpointing != "none" else 0
    return shape.layers * per_layer + one_block + 2 * d * bytes_per_value


def training_memory(
    shape: DecoderShape,
    *,
    tokens: int,
    bytes_per_value: int,
    optimizer: str,
    ema: bool,
    checkpointing: str,
    gpu: bool = True,
) -> MemoryParts:
    total = shape.parameters
    matrices = shape.layers * shape.layer_matmul_parameters
    moments = 4 * (matrices + 2 * (total - matrices)) if optimizer == "muon" else 8 * total
    chunk = head_chunk(shape.vocab, tokens)
    # a chunk's logits and their gradient (on a CPU float32 copies too); the head's weight gradient, summed in fp32
    logits = chunk * shape.vocab * (2 * bytes_per_value + (0 if gpu else 12)) + 6 * shape.head_parameters
    activations = tokens * activation_bytes_per_token(shape, bytes_per_value, checkpointing)
    cast_weights = 2 * shape.matmul_parameters if bytes_per_value == 2 else 0
    return MemoryParts(
        weights=4.0 * total * (2 if ema else 1),
        gradients=4.0 * total,
        optimizer=float(moments),
        activations=float(activations),
        logits=float(logits),
        workspace=float(cast_weights + (WORKSPACE if gpu else 0)),
    )
