"""The memory that a training step needs, part by part, computed from shapes.

Before step 1 a dry run of the largest batch shows whether the estimate holds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from redline.planning.shapes import DecoderShape
from redline.units import GIB

LOGITS_PER_CHUNK = 1 << 29  # logits that exist at once; must stay below 2^31, because kernels index in int32
WORKSPACE = 1.0 * GIB  # measured: buffers of cuBLAS, cuDNN and compiled kernels
WORKSPACE_FUSED = 0.1 * GIB
PROCESS = 0.33 * GIB  # Python, torch and oneDNN, which occupy the same memory when training on a CPU
# A CPU's heap holds this much per byte of activations and logits that a step needs at once: pieces that no buffer fits
# into, and what the running block makes and frees. Fitted to whole steps: docs/decisions/0037-plans-on-cpus.md.
HEAP, HEAP_LOGITS = 1.36, 1.2
MATMUL_POSITIONS, QUERIES_AT_ONCE = 2048, 128  # the longest rows of attention by matmuls, and its tiles
COMPILER = 0.13 * GIB  # torch's compiler, once it is imported
HALF = ("bf16", "fp16")  # precisions in which weights can be gathered as they are computed with
LOW_BIT = ("adamw_8bit", "paged_adamw_8bit")
MUON = ("muon", "normuon")  # they update the hidden matrices, and AdamW the rest
LOW_BIT_BLOCK = 256  # values that share one fp32 scale
LOW_BIT_FROM = 4096  # values; smaller tensors keep 32-bit moments, as in bitsandbytes
# Share of a recomputed block that exists at once: compiled code frees parts of it as they are used.
RECOMPUTED_AT_ONCE = 0.8


@dataclass(frozen=True)
class Kernels:
    """How a step is computed, as far as its costs depend on it."""

    gpu: bool = True
    compiled: bool = True
    fused: bool = False  # blocks with a hand-written backward pass (models/fused.py)
    fp8: bool = False  # operands of matmuls are kept in one byte
    packed: bool = False  # attention within documents of any length
    scores: int = 0  # keys per query whose attention weights are kept in float32; 0 if they are never stored
    cpu: bool = False  # the decoder's own backward passes for CPUs (docs/decisions/0030-cpu-steps.md)
    keys: float = 0.0  # keys per query that attention by matmuls computes; it keeps their weights


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
    """Return the number of tokens whose logits exist at once."""
    return max(1, min(tokens, LOGITS_PER_CHUNK // vocab))


def activation_bytes_per_token(
    shape: DecoderShape, bytes_per_value: int, checkpointing: str, kernels: Kernels = Kernels()
) -> float:
    """Return the bytes per token that the forward pass keeps for the backward pass, over all layers."""
    whole = _block_bytes(shape, bytes_per_value, kernels)
    d = shape.d_model
    kept = {
        "none": whole,
        "selective": bytes_per_value * (d + shape.d_qkv + shape.d_attention + shape.d_up + d),  # matmuls, attention
        "full": bytes_per_value * d,
    }[checkpointing] + 4 * shape.heads  # + log-sum-exp, fp32
    # The first states, for the skips; gradients of value embeddings, which wait for those of the first layers.
    besides = (2 + (shape.skips != "none")) * d + shape.value_embeddings * shape.d_kv
    return shape.layers * kept + besides * bytes_per_value


def _backward_bytes(shape: DecoderShape, bytes_per_value: int, checkpointing: str, kernels: Kernels) -> float:
    """Return the bytes per token that one block's backward pass adds: recomputation and, uncompiled, gradients."""
    whole = _block_bytes(shape, bytes_per_value, kernels)
    if kernels.cpu:
        return RECOMPUTED_AT_ONCE * whole if checkpointing != "none" else 0.0
    if kernels.fused:
        return _fused_backward_bytes(shape, bytes_per_value, kernels.fp8)
    return (RECOMPUTED_AT_ONCE * whole if checkpointing != "none" else 0.0) + (0.0 if kernels.compiled else whole)


def _fused_backward_bytes(shape: DecoderShape, bytes_per_value: int, fp8: bool) -> float:
    """Return the bytes per token of all gradients that exist when the hand-written backward pass of a block ends.

    They are: of the residual stream before, within and after the block, and of both normed inputs (5·d); of the
    activation (d_ff); of attention's output; of queries, keys and values, separately and merged (2·d_qkv). The gradient
    of the up-projection takes the place of its output, except in fp8, where three gradients of the stream are kept as
    operands too, at two bytes a value. The last norm has freed 2·d by then.
    """
    d = shape.d_model
    made = 5 * d + shape.d_ff + shape.d_attention + 2 * shape.d_qkv + (3 * d + shape.d_up if fp8 else 0)
    return float((made - 2 * d) * bytes_per_value)


def causal_keys(length: float) -> float:
    """Return the keys per query that causal attention by matmuls computes: it skips whole tiles only."""
    return (length + min(length, QUERIES_AT_ONCE)) / 2


def _cpu_block_bytes(shape: DecoderShape, bytes_per_value: int, kernels: Kernels) -> float:
    """Return what the decoder's own backward passes for CPUs keep: the inputs of the norms in float32, and operands of
    matmuls."""
    d, rotated = shape.d_model, (shape.heads + shape.kv_heads) * shape.head_dim
    normed = 2 * d + (rotated if shape.qk_norm else 0)
    gated = shape.d_ff if shape.gated else 0
    operands = 2 * d + shape.d_qkv + shape.d_attention + shape.d_up + gated + shape.d_ff
    return float(4 * normed + bytes_per_value * (operands + shape.heads * kernels.keys))


def _block_bytes(shape: DecoderShape, bytes_per_value: int, kernels: Kernels) -> float:
    if kernels.cpu and not kernels.scores:
        return _cpu_block_bytes(shape, bytes_per_value, kernels)
    d, rotated, scores = shape.d_model, (shape.heads + shape.kv_heads) * shape.head_dim, kernels.scores
    # Kernels for fixed lengths return the output in a layout of their own, which is kept beside ours.
    attention = shape.d_qkv + rotated + (1 if kernels.packed else 2) * shape.d_attention
    if kernels.fused:  # rotary positions are applied in place, and attention's output has our layout
        copied = rotated if shape.qk_norm else 0  # with QK norm they are not in place
        wide = bytes_per_value * (2 * d + shape.d_qkv + copied + shape.d_attention + shape.d_up)
        if kernels.fp8:  # attention's output is kept, and also its fp8 copy for the next matmul
            return float(wide + 2 * d + shape.d_ff + shape.d_attention)
        return float(wide + bytes_per_value * (2 * d + shape.d_ff))
    if kernels.compiled:  # 4·d: block input, both normed inputs, the stream between attention and MLP
        normed_heads = shape.d_attention if shape.qk_norm else 0  # measured: kept for these norms
        return float(bytes_per_value * (4 * d + attention + normed_heads + shape.d_up + shape.d_ff))
    normed = 2 * d + (rotated if shape.qk_norm else 0)
    wide = 2 * 4 * normed  # each norm keeps its input and its result in float32
    gated = shape.d_ff if shape.gated else 0
    plain = bytes_per_value * (2 * d + attention + shape.d_up + gated + shape.d_ff)
    formed = 4 * (shape.heads * scores + rotated + shape.d_kv) if scores else 0
    return float(wide + plain + formed)


def moment_bytes(shape: DecoderShape, optimizer: str) -> float:
    """Return the bytes of the optimizer's moments."""
    total, matrices = shape.parameters, shape.layers * shape.layer_matmul_parameters
    if optimizer in MUON:
        rows = shape.layers * (
            shape.d_qkv + shape.d_up + 2 * shape.d_model
        )  # NorMuon keeps a second moment for each row
        return 4.0 * matrices + 8.0 * (total - matrices) + (4.0 * rows if optimizer == "normuon" else 0.0)
    if optimizer in LOW_BIT:
        small = shape.scalar_parameters if shape.d_model < LOW_BIT_FROM else 0
        return 2 * (1 + 4 / LOW_BIT_BLOCK) * (total - small) + 8.0 * small
    return 8.0 * total


def adapter_moments(parameters: int, optimizer: str) -> float:
    """Return the bytes of the optimizer's moments for adapters, whose matrices are all quantised."""
    if optimizer in LOW_BIT:
        return 2 * (1 + 4 / LOW_BIT_BLOCK) * parameters
    return (4.0 if optimizer in MUON else 8.0) * parameters


def training_memory(
    shape: DecoderShape,
    *,
    tokens: int,
    bytes_per_value: int,
    optimizer: str,
    ema: bool,
    checkpointing: str,
    kernels: Kernels = Kernels(),
    scored: int | None = None,
    accumulates: bool = True,
) -> MemoryParts:
    """Return the parts of memory at the moment when their sum is largest.

    `tokens` is the number of tokens that pass through the blocks in a micro-batch, and `scored` how many of them have
    logits (None: all). With a single micro-batch a step, gradients exist in full only after the activations are freed.
    """
    activations, logits = activation_memory(
        shape,
        tokens=tokens,
        bytes_per_value=bytes_per_value,
        checkpointing=checkpointing,
        kernels=kernels,
        scored=scored,
    )
    gradients = shape.parameters
    if kernels.gpu and not accumulates:
        if 4.0 * (shape.parameters - shape.head_parameters) > activations + logits:
            activations = logits = 0.0  # the peak is at the update: all gradients, no activations
        else:
            gradients = shape.head_parameters
    return MemoryParts(
        weights=4.0 * shape.parameters * (2 if ema else 1),
        gradients=4.0 * gradients,
        optimizer=moment_bytes(shape, optimizer),
        activations=activations,
        logits=logits,
        # torch's checkpointing imports its compiler, to keep it from tracing the recomputation.
        workspace=cast_weights(shape, bytes_per_value, kernels, checkpointing)
        + workspace(kernels, imported=checkpointing != "none"),
    )


def activation_memory(
    shape: DecoderShape,
    *,
    tokens: int,
    bytes_per_value: int,
    checkpointing: str,
    kernels: Kernels,
    scored: int | None = None,
    head_learns: bool = True,
) -> tuple[float, float]:
    """Return the bytes of activations and logits at their peak.

    That is while the head runs, or during the last block's backward pass, when the logits have been freed.
    """
    copied = 0 if scored is None else 2 * scored * shape.d_model * bytes_per_value  # the head's input, and its gradient
    kept = copied + tokens * activation_bytes_per_token(shape, bytes_per_value, checkpointing, kernels)
    backward = tokens * _backward_bytes(shape, bytes_per_value, checkpointing, kernels)
    logits = _head_bytes(shape, tokens if scored is None else scored, bytes_per_value, kernels, head_learns)
    if kernels.cpu:
        return HEAP * (kept + backward), HEAP_LOGITS * logits
    if not (kernels.compiled or kernels.fused):  # nothing is freed early
        return kept + backward, logits
    return (kept, logits) if logits > backward else (kept + backward, 0.0)


def _head_bytes(shape: DecoderShape, tokens: int, bytes_per_value: int, kernels: Kernels, learns: bool) -> float:
    """Return the bytes of a chunk's logits and their gradient, and of the head's weight gradient in float32."""
    chunk, weights = head_chunk(shape.vocab, tokens), shape.head_parameters
    logits = chunk * shape.vocab
    if kernels.fused and kernels.fp8 and learns:  # gradients in both layouts, of two chunks for a moment
        second = min(chunk, tokens - chunk) * shape.vocab
        most = max(logits * (bytes_per_value + 2), logits * 2 + second * (bytes_per_value + 2))
        return float(most + 2 * tokens * shape.d_model + (2 + 4) * weights)
    if kernels.fused:  # the gradient overwrites the logits
        return float((logits + tokens * shape.d_model) * bytes_per_value + (4 * weights if learns else 0))
    if kernels.cpu:  # the gradient overwrites the logits
        return float(logits * bytes_per_value)
    copies = 0 if kernels.gpu else 12 if bytes_per_value == 2 else 4  # CPU kernels make float32 copies
    return float(logits * (2 * bytes_per_value + copies) + (6 * weights if learns else 0))


def workspace(kernels: Kernels, *, imported: bool = False) -> float:
    """Return the bytes of buffers and of the process; `imported`: torch's compiler counts even if it is idle."""
    if not kernels.gpu:
        return PROCESS + (COMPILER if imported or kernels.compiled else 0.0)
    return WORKSPACE_FUSED if kernels.fused else WORKSPACE


def cast_weights(shape: DecoderShape, bytes_per_value: int, kernels: Kernels, checkpointing: str) -> float:
    """Return the bytes of weights cast to the compute precision for forward and backward; fp8 keeps one layout.

    A checkpointed block casts its weights inside the checkpoint: autograd keeps none of them, and the backward pass
    casts those of one block at a time.
    """
    if bytes_per_value != 2:
        return 0.0
    if checkpointing != "none":
        return 2.0 * (shape.layer_matmul_parameters + shape.head_parameters)
    return float((1 if kernels.fused and kernels.fp8 else 2) * shape.matmul_parameters)
