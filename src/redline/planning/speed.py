"""How fast a step can be, and how fast it will probably be: work over rates."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from redline.planning.communication import Fabric, Volume, exposed_seconds
from redline.planning.flops import Passes, causal_passes, recomputes_attention
from redline.planning.memory import LOW_BIT, MUON, Kernels, activation_bytes_per_token
from redline.planning.shapes import DecoderShape

# ----------------------------------------------------------------------------------------------------
# How much of a peak real kernels reach. Measured on an H200: benchmarks/results/rates-h200-20261115.json.
#
# On another card these shares are a prior, not a measurement; `redline plan --probe` measures.


# Mean share of the dense bf16 peak over a layer's matmuls (forward, dgrad, wgrad), by model width.
MATMUL_SHARE = {256: 0.52, 384: 0.61, 512: 0.60, 768: 0.66, 1024: 0.64, 1536: 0.67, 2048: 0.67}
# The share of its own peak that fp8 reaches, over bf16's: energy-h200-20261115.json, long sums exact. Beyond the width
# that was for (1024) the share grew no more: plan-fused-h200-20261116.json.
FP8_OF_BF16, MOST_FP8_SHARE = 0.89, 0.57
# Casts take of what fp8 saves, the more the narrower a layer is, and the fewer tokens it sees at once:
# plan-small-h200-20261118.json, and the fp8 rows of the other plan files. This much at a width of 1024 and 16k tokens.
FP8_LOST = 0.12
BEST_MATMUL_SHARE = {"bf16": 0.775, "fp8": 0.66, "fp16": 0.775, "fp32": 0.77}  # the fastest single one
COPY_SHARE = 0.88  # of the memory's rated bandwidth


@dataclass(frozen=True)
class AttentionRate:
    """Time of a causal pass and its backward = passes over its tensors + FLOPs at a share of the peak."""

    share: float
    passes: float


# By mask and head dimension. Blocks were timed at 64 alone; the other is as much slower than causal attention.
ATTENTION = {
    "causal": {64: AttentionRate(0.394, 31.0), 128: AttentionRate(0.50, 26.0)},  # cuDNN
    # flash by documents, its copies included: throughput-350m-packed-h200-20261116.json
    "documents": {64: AttentionRate(0.371, 58.0), 128: AttentionRate(0.42, 57.0)},
    # flex, or cuDNN with a mask: throughput-bd3lm-h200-20261116.json
    "blocks": {64: AttentionRate(0.394, 88.0), 128: AttentionRate(0.50, 74.0)},
}
LAUNCH_SECONDS = 6e-6  # the host needs this long to start a kernel


def matmul_share(width: int, precision: str = "bf16") -> float:
    """Linear between the measured widths, flat beyond them; fp8 was measured at two."""
    share = _share_of_bf16(width)
    return min(FP8_OF_BF16 * share, MOST_FP8_SHARE) if precision == "fp8" else share


def fp8_lost(micro_tokens: int, width: int) -> float:
    """The part of fp8's saving that a layer of this size does not see."""
    return min(1.0, FP8_LOST * (1024 / width) ** 3 * (16_384 / micro_tokens) ** 0.5)


def _share_of_bf16(width: int) -> float:
    widths = sorted(MATMUL_SHARE)
    if width <= widths[0]:
        return MATMUL_SHARE[widths[0]] * max(width / widths[0], 0.1)
    if width >= widths[-1]:
        return MATMUL_SHARE[widths[-1]]
    low, high = list(pairwise(widths))[bisect_left(widths, width) - 1]
    part = (width - low) / (high - low)
    return MATMUL_SHARE[low] * (1 - part) + MATMUL_SHARE[high] * part


def attention_rate(head_dim: int, mask: str = "causal") -> AttentionRate:
    return ATTENTION[mask][128 if head_dim >= 96 else 64]


# ----------------------------------------------------------------------------------------------------
# What a step has to do, by the kind of unit that does it: the numerator of every ceiling.


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
        attention_again=attention / 3 if recomputes_attention(checkpointing, passes.mask) else 0.0,
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


@dataclass(frozen=True)
class Peaks:
    """What a card can do at best: FLOP/s of matmuls in the precision used, and of attention and whatever else is never
    in fp8; bytes/s of its memory."""

    matmul: float
    attention: float
    bandwidth: float
    precision: str


@dataclass(frozen=True)
class Limit:
    """One kind of work: its time in a step at the dense peak, and at the best rate that kernels were seen to reach."""

    part: str
    at_peak: float | None  # seconds; None where a peak says nothing
    at_best: float


def limits(work: Work, peaks: Peaks, tokens: float) -> list[Limit]:
    """`tokens` is what one card handles in a step."""
    rate, bandwidth = attention_rate(work.head_dim), COPY_SHARE * peaks.bandwidth
    attention = work.attention / (rate.share * peaks.attention) + rate.passes * work.touched / bandwidth
    return [
        Limit(
            "matmul",
            tokens * work.matmul / peaks.matmul,
            tokens * work.matmul / (BEST_MATMUL_SHARE[peaks.precision] * peaks.matmul),
        ),
        Limit("attention", tokens * work.attention / peaks.attention, tokens * attention),
        Limit("memory-bound", None, (tokens * work.moved_least + work.update) / bandwidth),
    ]


def seconds_at_peak(parts: list[Limit]) -> float:
    """Seconds of a step at the dense peaks, all of the time: nothing can be faster."""
    return sum(part.at_peak or 0.0 for part in parts)


def seconds_at_best_rates(parts: list[Limit]) -> float:
    """Seconds at the rates of the best kernels, if the memory-bound work hid entirely behind them."""
    return sum(part.at_best for part in parts if part.at_peak is not None)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on; None where the wires between cards are not known."""

    compute: float
    update: float
    communication: float | None = 0.0  # of all messages, if nothing hid them
    exposed: float | None = 0.0  # what remains of these

    @property
    def total(self) -> float | None:
        return None if self.exposed is None else self.compute + self.update + self.exposed


def expected_step_time(work: Work, peaks: Peaks, *, micro_tokens: int, accumulation: int, shards: int = 1) -> StepTime:
    """Of one card as redline runs it today, by prior; `shards` is how many share the update."""
    matmul, plain = _seconds_per_flop(work.width, peaks, micro_tokens)
    rate, bandwidth = attention_rate(work.head_dim, work.mask), COPY_SHARE * peaks.bandwidth
    again = work.attention_again / work.attention if work.attention else 0.0
    attention = work.attention / (rate.share * peaks.attention) + rate.passes * work.touched / bandwidth
    per_token = (work.matmul + work.recomputed) * matmul + attention * (1 + again) + work.moved / bandwidth
    micro = max(micro_tokens * per_token, work.kernels * LAUNCH_SECONDS)
    update = work.update / bandwidth + work.update_flops * plain
    return StepTime(accumulation * micro, update / shards)


def _seconds_per_flop(width: int, peaks: Peaks, micro_tokens: int) -> tuple[float, float]:
    """Of a layer's matmuls, and of those that are in no case in fp8."""
    quick, plain = (
        1 / (matmul_share(width, peaks.precision) * peaks.matmul),
        1 / (matmul_share(width) * peaks.attention),
    )
    if peaks.precision != "fp8":
        return quick, quick
    return quick + fp8_lost(micro_tokens, width) * max(0.0, plain - quick), plain


def add_communication(time: StepTime, volume: Volume, fabric: Fabric, accumulation: int) -> StepTime:
    """The same step as one of a world of cards."""
    spoken = fabric.seconds(volume)
    return replace(time, communication=spoken, exposed=exposed_seconds(volume, fabric, time.compute / accumulation))
