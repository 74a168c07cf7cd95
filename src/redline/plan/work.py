"""What a step has to do, by the kind of unit that does it: the numerator of every ceiling."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from redline.plan.flops import Passes, attends_again, causal_passes
from redline.plan.memory import LOW_BIT, MUON, Kernels, activation_bytes_per_token
from redline.plan.shapes import DecoderShape


@dataclass(frozen=True)
class Work:
    """Per token, unless it says otherwise."""

    matmul: float  # FLOPs, forward and backward
    attention: float  # FLOPs, forward and backward, what the mask leaves
    recomputed: float  # FLOPs of matmuls done again for want of memory
    attention_again: float
    touched: float  # bytes that each attention pass reads and writes once: queries, keys, values, outputs
    moved_least: float  # bytes of the work between matmuls if each value were read and written once
    moved: float  # bytes of that work as it is compiled today
    update: float  # bytes of one optimizer step
    update_flops: float  # of one optimizer step, as executed
    gradient_bytes: float  # of one step
    kernels: int  # launched for one micro-batch
    mask: str  # causal, by documents, or by blocks of a noisy and a clean copy
    width: int
    head_dim: int
    seq_len: int


# Bytes that pass through memory between the matmuls, per byte that the forward keeps for the backward.
# From whole steps on an H200: benchmarks/results/plan-h200-20261115.json.
TRAFFIC = 4.25
TRAFFIC_UNCOMPILED = 16.3
KERNELS_PER_LAYER = 45  # a compiled block, forward and backward
KERNELS_UNCOMPILED = 220
SYMMETRIC_TILE = 128  # rows and columns of what one program of a symmetric matmul makes


def decoder_work(
    shape: DecoderShape,
    seq_len: int,
    *,
    checkpointing: str,
    bytes_per_value: int,
    optimizer: str,
    ema: bool,
    muon_steps: int = 5,
    kernels: Kernels = Kernels(),
    passes: Passes | None = None,
) -> Work:
    """`passes` says how often a token goes through the model; not given: once, and it sees what lies before it."""
    layers, d, passes = shape.layers, shape.d_model, passes or causal_passes(seq_len)
    layer_matmul = 6.0 * passes.read * layers * shape.layer_matmul_parameters
    attention = 12.0 * passes.seen * layers * shape.d_attention
    again = checkpointing == "full"
    kept = passes.read * activation_bytes_per_token(shape, bytes_per_value, "none", kernels)
    traffic = TRAFFIC if kernels.compiled else TRAFFIC_UNCOMPILED
    recompute_traffic = 0.0 if checkpointing == "none" else kept  # the forward's share once more
    beside = passes.read * _beside_blocks(shape) * bytes_per_value
    fused = _fused_traffic(shape, bytes_per_value, kernels.fp8, passes) if kernels.fused else None
    return Work(
        matmul=layer_matmul + 6.0 * passes.scored * shape.head_parameters,
        attention=attention,
        recomputed=2.0 * passes.read * layers * shape.layer_recomputed_parameters if again else 0.0,
        attention_again=attention / 3 if attends_again(checkpointing, passes.mask) else 0.0,
        touched=float(passes.read * layers * shape.d_attention * bytes_per_value),
        moved_least=_least_traffic(shape, bytes_per_value, passes),
        moved=traffic * kept + recompute_traffic + beside if fused is None else fused,
        update=_update_traffic(shape, optimizer, ema, muon_steps),
        gradient_bytes=4.0 * shape.parameters,
        kernels=(KERNELS_PER_LAYER if kernels.compiled else KERNELS_UNCOMPILED) * layers,
        update_flops=_orthogonalisation(shape, muon_steps) if optimizer in MUON else 0.0,
        mask="documents" if kernels.packed else passes.mask,
        width=d,
        head_dim=shape.head_dim,
        seq_len=seq_len,
    )


def _least_traffic(shape: DecoderShape, bytes_per_value: int, passes: Passes) -> float:
    """Values read and written once by each fused kernel between the matmuls; the matmuls' own are not counted."""
    d, f, up = shape.d_model, shape.d_ff, shape.d_up
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim
    norms = 2 * (3 * d + 4 * d)  # residual and branch in, sum and normalised out; backward: three in, one out
    rotary = 2 * 2 * rotated  # in and out, forward and backward
    activation = (up + f) + (f + up + up + f)  # forward: in, out; backward: two in, and both gradients out
    logits = 2 * shape.vocab  # read once, their gradient written once
    blocks = shape.layers * (norms + rotary + activation) + _beside_blocks(shape)
    return float((passes.read * blocks + passes.scored * logits) * bytes_per_value)


def _beside_blocks(shape: DecoderShape) -> int:
    """Values of skips and value embeddings that are read and written besides.

    A skip: its state in, and its sum out and in, as no norm makes that; backward: gradient and state in, the state's
    gradient out, that in and added to (5 + 3). A table: looked up in float32 and cast (4 + 3), and the same again for
    its gradient (3 + 4); in each of its two layers added to the values (3), the gradient of these copied and added (4).
    """
    return 8 * shape.d_model * shape.skip_count + (14 + 2 * 7) * shape.d_kv * shape.value_embeddings


def _fused_traffic(shape: DecoderShape, bytes_per_value: int, fp8: bool, passes: Passes) -> float:
    """What the hand-written kernels read and write, counted; of the loss's three sweeps over logits one hits the L2.

    fp8 operands are written twice in one byte, at the price of bf16 ones; some have a kernel of their own: both norms'
    gradients, attention's output, and the gradient of the logits.
    """
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim
    norms, rotary = 2 * 4 * shape.d_model * 2, 2 * rotated + 2 * shape.d_qkv + (rotated if shape.qk_norm else 0)
    activation = (shape.d_up + shape.d_ff) + (shape.d_ff + 2 * shape.d_up)
    cast = shape.layers * (2 * 4 * shape.d_model + 4 * shape.d_attention) + 2 * shape.vocab if fp8 else 0
    blocks = shape.layers * (norms + rotary + activation) + _beside_blocks(shape)
    return float((passes.read * blocks + passes.scored * 2 * shape.vocab) * bytes_per_value + passes.read * cast)


def _update_traffic(shape: DecoderShape, optimizer: str, ema: bool, muon_steps: int) -> float:
    """Weights, gradients and moments, read and written by one update; the norm reads the gradients before."""
    hidden = shape.layers * shape.layer_matmul_parameters if optimizer in MUON else 0
    moments = 0.5 if optimizer in LOW_BIT else 2  # of four bytes; 8-bit moments are a quarter each
    per_parameter = 4 * (2 + 2 + 2 * moments)
    averaged = 12 * shape.parameters if ema else 0
    orthogonal = _muon_traffic(shape, optimizer, muon_steps) if optimizer in MUON else 0.0
    return per_parameter * (shape.parameters - hidden) + orthogonal + averaged


def _muon_traffic(shape: DecoderShape, optimizer: str, steps: int) -> float:
    """Of one update of the hidden matrices. A parameter's bytes, with q = shorter / longer side of its matrix:

    4: the gradient, for its norm. 4 + 4 + 4: gradient, momentum in and out. 2 + 2 + 2: Nesterov's sum written, read and
    scaled. 2 + 4 + 4: the update, the weight in and out. NorMuon reads the update once more. For each of the steps:
    2 + 2 + 2, x read for its Gram matrix, read and written for the product; 8q, that matrix and its polynomial.
    """
    per_parameter = 32 + 6 * steps + (2 if optimizer == "normuon" else 0)
    moved = sum(m * n * per_parameter + 8 * steps * min(m, n) ** 2 for m, n in _hidden_matrices(shape))
    return float(moved * shape.layers)


def _orthogonalisation(shape: DecoderShape, steps: int) -> float:
    """So many quintics for every hidden matrix: X·Xᵀ, its square, and their product with X, as they are executed.

    Of the first two, which are symmetric, the tiles on and above the diagonal alone.
    """
    per_step = 0.0
    for m in _hidden_matrices(shape):
        short, tiles = min(m), ceil(min(m) / SYMMETRIC_TILE)
        made = (tiles + 1) / (2 * tiles)
        per_step += 2.0 * short * short * (made * (max(m) + short) + max(m))
    return steps * shape.layers * per_step


def _hidden_matrices(shape: DecoderShape) -> list[tuple[int, int]]:
    """A block's, as Muon takes them: merged ones apart."""
    d, attention, kv = shape.d_model, shape.d_attention, shape.d_kv
    ups = 2 if shape.mlp == "swiglu" else 1
    return [(attention, d), (kv, d), (kv, d), (d, attention), (d, shape.d_ff), *[(shape.d_ff, d)] * ups]
