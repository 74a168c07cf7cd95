"""The time of a step: the work that it has to do, divided by the rates that the hardware reaches.

There are three times for each part of a step: at the dense peak (`limits`), at the best rate that a kernel has reached
(`limits`), and as expected of redline today (`expected_step_time`). docs/decisions/0007-the-plan.md has the reasons.
"""

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
# The share of a peak that real kernels reach, measured on an H200: benchmarks/results/rates-h200-20261115.json. For
# other GPUs these shares are a prior; `redline plan --probe` measures.


# Mean share of the dense bf16 peak over a layer's matmuls (forward, dgrad, wgrad), by model width.
MATMUL_SHARE = {256: 0.52, 384: 0.61, 512: 0.60, 768: 0.66, 1024: 0.64, 1536: 0.67, 2048: 0.67}
# fp8 reaches this share of what bf16 reaches, each relative to its own peak, with long sums in float32. Measured at a
# width of 1024 (energy-h200-20261115.json). Above it, fp8's share stays the same (plan-fused-h200-20261116.json).
FP8_OF_BF16, MOST_FP8_SHARE = 0.89, 0.57
# The share of fp8's saving that casts cost at a width of 1024 and 16k tokens a micro-batch. It grows for narrower
# layers and fewer tokens: plan-small-h200-20261118.json, and the fp8 rows of the other plan files.
FP8_LOST = 0.12
BEST_MATMUL_SHARE = {"bf16": 0.775, "fp8": 0.66, "fp16": 0.775, "fp32": 0.77}  # of the fastest single matmul
COPY_SHARE = 0.88  # of the memory's rated bandwidth


@dataclass(frozen=True)
class AttentionRate:
    """Time of attention, forward and backward = `passes` over its tensors + FLOPs at `share` of the peak."""

    share: float
    passes: float


# By mask and head dimension. "blocks" was timed at 64 only; at 128 it is taken to differ by the factor of "causal".
ATTENTION = {
    "causal": {64: AttentionRate(0.394, 31.0), 128: AttentionRate(0.50, 26.0)},  # cuDNN
    # flash attention within documents, with its copies: throughput-350m-packed-h200-20261116.json
    "documents": {64: AttentionRate(0.371, 58.0), 128: AttentionRate(0.42, 57.0)},
    # flex attention, or cuDNN with a mask: throughput-bd3lm-h200-20261116.json
    "blocks": {64: AttentionRate(0.394, 88.0), 128: AttentionRate(0.50, 74.0)},
}
# Not measured here: the share of the speed without shards that blocks of shards compute at. Gathers and reductions take
# cores and bandwidth from the kernels beside them. With it an 8B model at 8,192 tokens with recomputation is expected
# at the 6,700 tokens/s per H100 that torchtitan publishes for FSDP2.
SHARDS_SPEED = 0.75
LAUNCH_SECONDS = 6e-6  # the host needs this long to start a kernel


def matmul_share(width: int, precision: str = "bf16") -> float:
    """Return the share of the peak that a layer's matmuls reach, interpolated between the measured widths."""
    share = _share_of_bf16(width)
    return min(FP8_OF_BF16 * share, MOST_FP8_SHARE) if precision == "fp8" else share


def fp8_lost(micro_tokens: int, width: int) -> float:
    """Return the share of fp8's saving that a layer of this size loses to casts."""
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
# The work of a step, by the kind of hardware unit that does it.


@dataclass(frozen=True)
class Work:
    """The work of a step, per token unless a field says otherwise."""

    matmul: float  # FLOPs, forward and backward
    attention: float  # FLOPs, forward and backward, of the pairs that the mask allows
    recomputed: float  # FLOPs of matmuls that gradient checkpointing repeats
    attention_again: float  # FLOPs of attention that it repeats
    touched: float  # bytes that each attention pass reads and writes once: queries, keys, values, outputs
    moved_least: float  # bytes of the work between matmuls if each value were read and written once
    moved: float  # bytes of that work as it is today
    update: float  # bytes of one optimizer step
    update_flops: float  # of one optimizer step, as executed
    gradient_bytes: float  # of one step
    kernels: int  # number of launches for one micro-batch
    mask: str  # causal, documents, or blocks (of a noisy and a clean copy)
    width: int
    head_dim: int
    seq_len: int
    attention_hidden: float = 0.0  # FLOPs of pairs that the mask hides, and that are computed all the same


# Bytes that pass through memory between the matmuls, per byte that the forward pass keeps for the backward pass. Fitted
# to whole steps on an H200: benchmarks/results/plan-h200-20261115.json.
TRAFFIC = 4.25
TRAFFIC_UNCOMPILED = 16.3
KERNELS_PER_LAYER = 45  # launches of a compiled block, forward and backward
KERNELS_UNCOMPILED = 220
# A CPU's step, fitted to whole steps of one and two threads, with and without AVX-512: docs/decisions/0037. The
# matmul share is above 1 because the head's matmul is larger than the one that `hardware/probe.py` measures.
CPU_MATMUL_SHARE, CPU_ATTENTION_SHARE, CPU_UPDATE_SHARE = 1.33, 0.5, 0.8
CPU_TRAFFIC = 74.0  # bytes, at the rate of a multiplication in the caches, per byte that the forward pass keeps
CPU_LOSS_TRAFFIC = 170.0  # the same per logit: exponentials are slow
CPU_UPDATE_PASSES = 2.5
CPU_KERNELS_PER_LAYER = 120
CPU_LAUNCH_SECONDS = 19e-6  # of one operation of torch: Python, dispatch, and waking the other threads
CACHED_OF_COPY = 4.0  # the rate in the caches, where only that of the memory is known
SYMMETRIC_TILE = 128  # rows and columns of the tile that one program of a symmetric matmul computes


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
    """Count the work of a decoder. `passes` None means next-token prediction over rows of one document."""
    layers, d, passes = shape.layers, shape.d_model, passes or causal_passes(seq_len)
    layer_matmul = 6.0 * passes.read * layers * shape.layer_matmul_parameters
    attention = 12.0 * passes.seen * layers * shape.d_attention
    again = checkpointing == "full"
    kept = passes.read * activation_bytes_per_token(shape, bytes_per_value, "none", kernels)
    traffic = TRAFFIC if kernels.compiled else TRAFFIC_UNCOMPILED
    recompute_traffic = 0.0 if checkpointing == "none" else kept  # the forward pass once more
    beside = passes.read * _skip_and_value_traffic(shape) * bytes_per_value
    moved = traffic * kept + recompute_traffic + beside
    if kernels.fused:
        moved = _fused_traffic(shape, bytes_per_value, kernels.fp8, passes)
    elif kernels.cpu:
        # A forward pass is about a third of the traffic and of the operations, and is repeated with recomputation.
        moved = (4 / 3 if recompute_traffic else 1.0) * CPU_TRAFFIC * kept
        moved += CPU_LOSS_TRAFFIC * passes.scored * shape.vocab
    launches = KERNELS_PER_LAYER if kernels.compiled else KERNELS_UNCOMPILED
    if kernels.cpu:
        launches = round(CPU_KERNELS_PER_LAYER * (4 / 3 if recompute_traffic else 1))
    hidden = 12.0 * passes.read * kernels.keys * layers * shape.d_attention - attention
    return Work(
        matmul=layer_matmul + 6.0 * passes.scored * shape.head_parameters,
        attention=attention,
        recomputed=2.0 * passes.read * layers * shape.layer_recomputed_parameters if again else 0.0,
        attention_again=attention / 3 if recomputes_attention(checkpointing, passes.mask) else 0.0,
        touched=float(passes.read * layers * shape.d_attention * bytes_per_value),
        moved_least=_least_traffic(shape, bytes_per_value, passes),
        moved=moved,
        update=_update_traffic(shape, optimizer, ema, muon_steps),
        gradient_bytes=4.0 * shape.parameters,
        kernels=launches * layers,
        update_flops=_orthogonalisation(shape, muon_steps, symmetric=not kernels.cpu) if optimizer in MUON else 0.0,
        mask="documents" if kernels.packed else passes.mask,
        width=d,
        head_dim=shape.head_dim,
        seq_len=seq_len,
        attention_hidden=max(0.0, hidden) if kernels.cpu else 0.0,
    )


def _least_traffic(shape: DecoderShape, bytes_per_value: int, passes: Passes) -> float:
    """Return the bytes between the matmuls if ideal kernels read and wrote each value once."""
    d, f, up = shape.d_model, shape.d_ff, shape.d_up
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim
    norms = 2 * (3 * d + 4 * d)  # residual and branch in, sum and normalised out; backward: three in, one out
    rotary = 2 * 2 * rotated  # in and out, forward and backward
    activation = (up + f) + (f + up + up + f)  # forward: in, out; backward: two in, and both gradients out
    logits = 2 * shape.vocab  # read once, their gradient written once
    blocks = shape.layers * (norms + rotary + activation) + _skip_and_value_traffic(shape)
    return float((passes.read * blocks + passes.scored * logits) * bytes_per_value)


def _skip_and_value_traffic(shape: DecoderShape) -> int:
    """Return the values per token that skips and value embeddings read and write.

    A skip: read its state, write the sum and read it again, because no norm produces it; backward, read the gradient
    and the state, write the state's gradient, read it and add to it (5 + 3). A table: a lookup in float32 and its cast
    (4 + 3), the same for its gradient (3 + 4), and in each of its two layers an addition to the values (3) and a copy
    and an addition of their gradient (4).
    """
    return 8 * shape.d_model * shape.skip_count + (14 + 2 * 7) * shape.d_kv * shape.value_embeddings


def _fused_traffic(shape: DecoderShape, bytes_per_value: int, fp8: bool, passes: Passes) -> float:
    """Return the bytes that the kernels of fused blocks read and write.

    Of the loss's three passes over the logits one is served by the L2 cache. fp8 operands are written twice in one byte
    each, which is as much as once in bf16. Some need a cast kernel: the gradients of both norms, attention's output and
    the gradient of the logits.
    """
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim
    norms, rotary = 2 * 4 * shape.d_model * 2, 2 * rotated + 2 * shape.d_qkv + (rotated if shape.qk_norm else 0)
    activation = (shape.d_up + shape.d_ff) + (shape.d_ff + 2 * shape.d_up)
    cast = shape.layers * (2 * 4 * shape.d_model + 4 * shape.d_attention) + 2 * shape.vocab if fp8 else 0
    blocks = shape.layers * (norms + rotary + activation) + _skip_and_value_traffic(shape)
    return float((passes.read * blocks + passes.scored * 2 * shape.vocab) * bytes_per_value + passes.read * cast)


def _update_traffic(shape: DecoderShape, optimizer: str, ema: bool, muon_steps: int) -> float:
    """Return the bytes of one update: weights, gradients and moments, and the gradients again for their norm."""
    hidden = shape.layers * shape.layer_matmul_parameters if optimizer in MUON else 0
    moments = 0.5 if optimizer in LOW_BIT else 2  # in units of four bytes
    per_parameter = 4 * (2 + 2 + 2 * moments)
    averaged = 12 * shape.parameters if ema else 0
    orthogonal = _muon_traffic(shape, optimizer, muon_steps) if optimizer in MUON else 0.0
    return per_parameter * (shape.parameters - hidden) + orthogonal + averaged


def _muon_traffic(shape: DecoderShape, optimizer: str, steps: int) -> float:
    """Return the bytes of Muon's update of the hidden matrices.

    For each parameter, with q = shorter / longer side of its matrix: 4 to read the gradient for its norm; 4 + 4 + 4 for
    the gradient and the momentum, read and written; 2 + 2 + 2 for Nesterov's sum, written, read and scaled; 2 + 4 + 4
    for the update and the weight, read and written. NorMuon reads the update once more. Each step of orthogonalisation
    adds 2 + 2 + 2 (X read for its Gram matrix, then read and written for the product) and 8q (that matrix and its
    polynomial).
    """
    per_parameter = 32 + 6 * steps + (2 if optimizer == "normuon" else 0)
    moved = sum(m * n * per_parameter + 8 * steps * min(m, n) ** 2 for m, n in _hidden_matrices(shape))
    return float(moved * shape.layers)


def _orthogonalisation(shape: DecoderShape, steps: int, *, symmetric: bool = True) -> float:
    """Return the FLOPs of Muon's orthogonalisation of all hidden matrices, as executed.

    Each step computes X·Xᵀ, its square, and their product with X. The first two are symmetric, so GPU kernels compute
    only the tiles on and above the diagonal.
    """
    per_step = 0.0
    for m in _hidden_matrices(shape):
        short, tiles = min(m), ceil(min(m) / SYMMETRIC_TILE)
        computed = (tiles + 1) / (2 * tiles) if symmetric else 1.0  # share of a symmetric matrix
        per_step += 2.0 * short * short * (computed * (max(m) + short) + max(m))
    return steps * shape.layers * per_step


def _hidden_matrices(shape: DecoderShape) -> list[tuple[int, int]]:
    """Return the sides of a block's matrices; Muon treats merged ones separately."""
    d, attention, kv = shape.d_model, shape.d_attention, shape.d_kv
    ups = 2 if shape.gated else 1
    return [(attention, d), (kv, d), (kv, d), (d, attention), (d, shape.d_ff), *[(shape.d_ff, d)] * ups]


@dataclass(frozen=True)
class Peaks:
    """The dense peaks of a GPU: FLOP/s of matmuls in the precision in use and of attention, which is never in fp8, and
    the bytes/s of its memory."""

    matmul: float
    attention: float
    bandwidth: float
    precision: str


@dataclass(frozen=True)
class Limit:
    """The time of one kind of work in a step, at the dense peak and at the best rate that a kernel has reached."""

    part: str
    at_peak: float | None  # seconds; None for memory-bound work, which no FLOP/s peak limits
    at_best: float


def limits(work: Work, peaks: Peaks, tokens: float) -> list[Limit]:
    """Return the limits of a step in which one GPU processes `tokens` tokens."""
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
    """Return the seconds of a step at the dense peaks. No step can be faster."""
    return sum(part.at_peak or 0.0 for part in parts)


def seconds_at_best_rates(parts: list[Limit]) -> float:
    """Return the seconds of a step at the rates of the best kernels if they hid all memory-bound work."""
    return sum(part.at_best for part in parts if part.at_peak is not None)


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by kind of work; None where the links between GPUs are unknown."""

    compute: float
    update: float
    communication: float | None = 0.0  # of all messages, if none overlapped
    exposed: float | None = 0.0  # the part that does not overlap with computation

    @property
    def total(self) -> float | None:
        return None if self.exposed is None else self.compute + self.update + self.exposed


def expected_step_time(work: Work, peaks: Peaks, *, micro_tokens: int, accumulation: int, shards: int = 1) -> StepTime:
    """Return the expected time of a step on one GPU, by the measured shares; `shards` GPUs share the weights."""
    matmul, never_fp8 = _seconds_per_flop(work.width, peaks, micro_tokens)
    rate, bandwidth = attention_rate(work.head_dim, work.mask), COPY_SHARE * peaks.bandwidth
    again = work.attention_again / work.attention if work.attention else 0.0
    attention = work.attention / (rate.share * peaks.attention) + rate.passes * work.touched / bandwidth
    per_token = (work.matmul + work.recomputed) * matmul + attention * (1 + again) + work.moved / bandwidth
    micro = max(micro_tokens * per_token, work.kernels * LAUNCH_SECONDS)
    update = work.update / bandwidth + work.update_flops * never_fp8
    compute = accumulation * micro / (SHARDS_SPEED if shards > 1 else 1.0)
    return StepTime(compute, update / shards)


@dataclass(frozen=True)
class CpuRates:
    """What `hardware/probe.py` measured: FLOP/s of a matmul in the precision in use, bytes/s in the caches and of a
    copy in memory."""

    matmul: float
    cached: float
    copy: float


def expected_cpu_step_time(work: Work, rates: CpuRates, *, micro_tokens: int, accumulation: int) -> StepTime:
    """Return the expected time of a step on a CPU, whose cores work on one operation after the other."""
    attention = work.attention + work.attention_again + work.attention_hidden
    per_token = (
        (work.matmul + work.recomputed) / (CPU_MATMUL_SHARE * rates.matmul)
        + attention / (CPU_ATTENTION_SHARE * rates.matmul)
        + work.moved / rates.cached
    )
    micro = micro_tokens * per_token + work.kernels * CPU_LAUNCH_SECONDS
    update = CPU_UPDATE_PASSES * work.update / rates.copy + work.update_flops / (CPU_UPDATE_SHARE * rates.matmul)
    return StepTime(accumulation * micro, update)


def _seconds_per_flop(width: int, peaks: Peaks, micro_tokens: int) -> tuple[float, float]:
    """Return the seconds per FLOP of a layer's matmuls, and of matmuls that are never in fp8."""
    fast = 1 / (matmul_share(width, peaks.precision) * peaks.matmul)
    if peaks.precision != "fp8":
        return fast, fast
    bf16 = 1 / (matmul_share(width) * peaks.attention)
    return fast + fp8_lost(micro_tokens, width) * max(0.0, bf16 - fast), bf16


def add_communication(time: StepTime, volume: Volume, fabric: Fabric, accumulation: int) -> StepTime:
    """Return the time of the same step when several GPUs share it."""
    seconds = fabric.seconds(volume)
    return replace(time, communication=seconds, exposed=exposed_seconds(volume, fabric, time.compute / accumulation))
