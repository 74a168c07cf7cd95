"""What a step needs, part by part, from shapes alone. The warm-up verifies it with the worst-case batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from redline.planning.shapes import DecoderShape
from redline.units import GIB

LOGITS_PER_CHUNK = 1 << 29  # the head runs over this many logits at once (never 2^31: kernels index in int32)
WORKSPACE = 1.0 * GIB  # buffers of cuBLAS, cuDNN and compiled kernels, by measurement
WORKSPACE_FUSED = 0.1 * GIB
PROCESS = 0.26 * GIB  # Python and torch themselves, which share the memory of a CPU
COMPILER = 0.12 * GIB  # torch's, once it is imported
LOW_BIT = ("adamw_8bit", "paged_adamw_8bit")
MUON = ("muon", "normuon")  # of the hidden matrices, with AdamW for the rest
LOW_BIT_BLOCK = 256  # values that share one fp32 scale
LOW_BIT_FROM = 4096  # smaller tensors keep 32-bit moments, as bitsandbytes has it
RECOMPUTED_AT_ONCE = 0.8  # of a block that is computed again: compiled, its parts go as they are used


@dataclass(frozen=True)
class Kernels:
    """How the step is computed, as far as costs depend on it."""

    gpu: bool = True
    compiled: bool = True
    fused: bool = False  # a block's backward written out
    fp8: bool = False  # what its matmuls read, kept in one byte
    packed: bool = False  # attention by documents of any length
    scores: int = 0  # keys whose weights are kept in float32, by attention that forms them


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


def activation_bytes_per_token(
    shape: DecoderShape, bytes_per_value: int, checkpointing: str, kernels: Kernels = Kernels()
) -> float:
    """What the forward keeps for the backward, one token, all layers."""
    whole = _block_bytes(shape, bytes_per_value, kernels)
    d = shape.d_model
    kept = {
        "none": whole,
        "selective": bytes_per_value * (d + shape.d_qkv + shape.d_attention + shape.d_up + d),  # matmuls, attention
        "full": bytes_per_value * d,
    }[checkpointing] + 4 * shape.heads  # + log-sum-exp, fp32
    # the first states, for the skips; gradients of looked-up values, from the last layers until the first add theirs
    besides = (2 + (shape.skips != "none")) * d + shape.value_embeddings * shape.d_kv
    return shape.layers * kept + besides * bytes_per_value


def _backward_bytes(shape: DecoderShape, bytes_per_value: int, checkpointing: str, kernels: Kernels) -> float:
    """What the backward of one block needs besides, per token: the block again, and uncompiled its gradients too."""
    whole = _block_bytes(shape, bytes_per_value, kernels)
    if kernels.fused:
        return _fused_backward_bytes(shape, bytes_per_value, kernels.fp8)
    return (RECOMPUTED_AT_ONCE * whole if checkpointing != "none" else 0.0) + (0.0 if kernels.compiled else whole)


def _fused_backward_bytes(shape: DecoderShape, bytes_per_value: int, fp8: bool) -> float:
    """All gradients that a block's written-out backward has made when it ends, less what the last norm let go before.

    The stream's on the way in, between and out, and of both normed inputs; of the activation; of attention's output; of
    queries, keys and values, and these merged. That of the up-projection takes the place of its output; in fp8 it does
    not, and there three of the stream's are kept as operands too, two bytes a value.
    """
    d = shape.d_model
    made = 5 * d + shape.d_ff + shape.d_attention + 2 * shape.d_qkv + (3 * d + shape.d_up if fp8 else 0)
    return float((made - 2 * d) * bytes_per_value)


def _block_bytes(shape: DecoderShape, bytes_per_value: int, kernels: Kernels) -> float:
    d, rotated, scores = shape.d_model, (shape.heads + shape.kv_heads) * shape.head_dim, kernels.scores
    # fixed-length kernels give the output in a layout of their own, kept beside ours
    attention = shape.d_qkv + rotated + (1 if kernels.packed else 2) * shape.d_attention
    if kernels.fused:  # rotated in place, and attention's output in our layout
        copied = rotated if shape.qk_norm else 0  # what is normed is not rotated in place
        wide = bytes_per_value * (2 * d + shape.d_qkv + copied + shape.d_attention + shape.d_up)
        if kernels.fp8:  # attention keeps its output, and the matmul that reads it an operand of that
            return float(wide + 2 * d + shape.d_ff + shape.d_attention)
        return float(wide + bytes_per_value * (2 * d + shape.d_ff))
    if kernels.compiled:  # block input, both normalised inputs, the stream between attention and MLP
        normed_heads = shape.d_attention if shape.qk_norm else 0  # kept for these norms, by measurement
        return float(bytes_per_value * (4 * d + attention + normed_heads + shape.d_up + shape.d_ff))
    normed = 2 * d + (rotated if shape.qk_norm else 0)
    wide = 2 * 4 * normed  # each norm keeps its input and its result in float32
    gated = shape.d_ff if shape.mlp == "swiglu" else 0
    plain = bytes_per_value * (2 * d + attention + shape.d_up + gated + shape.d_ff)
    formed = 4 * (shape.heads * scores + rotated + shape.d_kv) if scores else 0
    return float(wide + plain + formed)


def moment_bytes(shape: DecoderShape, optimizer: str) -> float:
    """What the optimizer keeps of every parameter's past."""
    total, matrices = shape.parameters, shape.layers * shape.layer_matmul_parameters
    if optimizer in MUON:
        rows = shape.layers * (shape.d_qkv + shape.d_up + 2 * shape.d_model)  # each with a second moment
        return 4.0 * matrices + 8.0 * (total - matrices) + (4.0 * rows if optimizer == "normuon" else 0.0)
    if optimizer in LOW_BIT:
        small = shape.scalar_parameters if shape.d_model < LOW_BIT_FROM else 0
        return 2 * (1 + 4 / LOW_BIT_BLOCK) * (total - small) + 8.0 * small
    return 8.0 * total


def adapter_moments(parameters: int, optimizer: str) -> float:
    """The same for the many small matrices of adapters."""
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
    """Of so many `tokens` that the blocks read; `scored` of them have logits, all if not given.

    The parts as they are when most is held. Gradients are all there only when micro-batches are added up.
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
            activations = logits = 0.0  # most is held at the update: all gradients, and nothing that passed
        else:
            gradients = shape.head_parameters
    return MemoryParts(
        weights=4.0 * shape.parameters * (2 if ema else 1),
        gradients=4.0 * gradients,
        optimizer=moment_bytes(shape, optimizer),
        activations=activations,
        logits=logits,
        workspace=_cast_weights(shape, bytes_per_value, kernels, checkpointing) + workspace(kernels),
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
    """Activations and logits when most is held: while the head runs, or the last block's backward, logits gone."""
    copied = 0 if scored is None else 2 * scored * shape.d_model * bytes_per_value  # with their gradient
    kept = copied + tokens * activation_bytes_per_token(shape, bytes_per_value, checkpointing, kernels)
    backward = tokens * _backward_bytes(shape, bytes_per_value, checkpointing, kernels)
    logits = _head_bytes(shape, tokens if scored is None else scored, bytes_per_value, kernels, head_learns)
    if not (kernels.compiled or kernels.fused):  # nothing is let go early
        return kept + backward, logits
    return (kept, logits) if logits > backward else (kept + backward, 0.0)


def _head_bytes(shape: DecoderShape, tokens: int, bytes_per_value: int, kernels: Kernels, learns: bool) -> float:
    """A chunk's logits and their gradient, and the head's weight gradient, summed in float32."""
    chunk, weights = head_chunk(shape.vocab, tokens), shape.head_parameters
    logits = chunk * shape.vocab
    if kernels.fused and kernels.fp8 and learns:  # gradients both ways round, and the last until there is one more
        second = min(chunk, tokens - chunk) * shape.vocab
        most = max(logits * (bytes_per_value + 2), logits * 2 + second * (bytes_per_value + 2))
        return float(most + 2 * tokens * shape.d_model + (2 + 4) * weights)
    if kernels.fused:  # the gradient takes the logits' place
        return float((logits + tokens * shape.d_model) * bytes_per_value + (4 * weights if learns else 0))
    copies = 0 if kernels.gpu else 12 if bytes_per_value == 2 else 4  # a CPU's kernel makes float32 ones
    return float(logits * (2 * bytes_per_value + copies) + (6 * weights if learns else 0))


def workspace(kernels: Kernels, *, imported: bool = False) -> float:
    """`imported`: the compiler, whether or not anything is compiled."""
    if not kernels.gpu:
        return PROCESS + (COMPILER if imported or kernels.compiled else 0.0)
    return WORKSPACE_FUSED if kernels.fused else WORKSPACE


def _cast_weights(shape: DecoderShape, bytes_per_value: int, kernels: Kernels, checkpointing: str) -> float:
    """Weights in the compute precision, kept from the forward to the backward; of fp8 ones, one way round.

    A checkpointed block casts its weights inside the checkpoint: autograd keeps none of them, and the backward casts
    those of one block at a time.
    """
    if bytes_per_value != 2:
        return 0.0
    if checkpointing != "none":
        return 2.0 * (shape.layer_matmul_parameters + shape.head_parameters)
    return float((1 if kernels.fused and kernels.fp8 else 2) * shape.matmul_parameters)


GATHERED_BLOCKS = 2  # at once: the one that runs, and the one that is fetched meanwhile


def fsdp_rank_memory(parts: MemoryParts, shape: DecoderShape, world: int, *, accumulates: bool = True) -> MemoryParts:
    """What one of `world` ranks holds under fsdp, where `parts` are those of a model that is not shared, with all
    gradients: its rows of weights, averages and moments, and what is gathered while it is used.

    Micro-batches that accumulate add up whole gradients until the last of a step. With one micro-batch a step, each
    block's gradient is scattered when its backward ends: a rank holds its rows, and the whole of what is under way.
    """
    block = 4.0 * shape.layer_matmul_parameters
    root = 4.0 * (shape.parameters - shape.layers * shape.layer_matmul_parameters)
    gathered = min(GATHERED_BLOCKS * block, shape.layers * block) + root
    return replace(
        parts,
        weights=parts.weights / world + gathered,
        gradients=parts.gradients if accumulates else parts.gradients / world + gathered,
        optimizer=parts.optimizer / world,
    )
