"""FLOPs per token, forward and backward, in the two forms people compare.

PaLM form (arXiv 2204.02311, appendix B): 6·N + 12·L·d·T, every query against every key.
Causal form: 6·N + 6·L·d·T, the half that causality leaves. N counts parameters that multiply a token.
Where a model reads a noisy and a clean copy of its data, both forms count pairs that see each other, and they differ in
the head: every position that may be hidden, or those that are.
"""

from __future__ import annotations

from dataclasses import dataclass

from redline.plan.layout import Layout
from redline.plan.shapes import DecoderShape

FORMULA = "6·N_matmul + 12·L·d·T"
FORMULA_CAUSAL = "6·N_matmul + 6·L·d·T"
FORMULA_RECOMPUTED = "6·N_matmul + 6·L·d·T + 2·(N_layers − N_down) + 2·L·d·T"


@dataclass(frozen=True)
class FlopsPerToken:
    useful: float  # PaLM form: for comparison with others
    causal: float  # what the mask leaves: for ceilings
    executed: float  # the causal form plus recomputation
    formula: str = FORMULA
    formula_executed: str = FORMULA_CAUSAL


@dataclass(frozen=True)
class Passes:
    """What one token of the data makes a decoder do."""

    read: float  # positions that go through the blocks
    scored: float  # positions whose logits are formed
    seen: float  # keys, by the queries of all those positions together
    mask: str = "causal"  # who sees whom: the kind that attention was timed with


def causal_passes(seq_len: int) -> Passes:
    return Passes(1.0, 1.0, seq_len / 2)


def layout_passes(layout: Layout, hidden: float = 1.0) -> Passes:
    """`hidden` is the share of the positions that may be hidden which are, on average."""
    length, mask = layout.length, "blocks" if layout.read > layout.denoised else "causal"
    return Passes(layout.read / length, hidden * layout.denoised / length, layout.pairs / length, mask)


def decoder_flops(shape: DecoderShape, seq_len: int, checkpointing: str = "none") -> FlopsPerToken:
    attention = shape.layers * shape.d_attention * seq_len
    useful = 6.0 * shape.matmul_parameters + 12.0 * attention
    causal = 6.0 * shape.matmul_parameters + 6.0 * attention
    if checkpointing != "full":
        return FlopsPerToken(useful, causal, causal)
    again = 2.0 * shape.layers * shape.layer_recomputed_parameters + 2.0 * attention
    return FlopsPerToken(useful, causal, causal + again, formula_executed=FORMULA_RECOMPUTED)


def layout_flops(shape: DecoderShape, layout: Layout, hidden: float, checkpointing: str = "none") -> FlopsPerToken:
    """Of a denoiser: 6·(2·N_trunk + N_head) + 12·L·d·(n + block) for a text in equal blocks."""
    trunk, attention = shape.layers * shape.layer_matmul_parameters, shape.layers * shape.d_attention
    most, mean = layout_passes(layout), layout_passes(layout, hidden)
    blocks = 6.0 * most.read * trunk + 12.0 * most.seen * attention
    useful, exact = (blocks + 6.0 * passes.scored * shape.head_parameters for passes in (most, mean))
    again, told = 0.0, ""
    if checkpointing == "full":
        again += 2.0 * most.read * shape.layers * shape.layer_recomputed_parameters
        told += f" + {2 * most.read:.3g}·(N_trunk − N_down)"
    if attends_again(checkpointing, most.mask):
        again += 4.0 * most.seen * attention
        told += f" + 4·L·d·{most.seen:.5g}"
    return FlopsPerToken(useful, exact, exact + again, _formula(most), _formula(mean) + told)


def attends_again(checkpointing: str, mask: str) -> bool:
    """Whether the backward runs attention's forward once more: `selective` keeps what it makes where that is one
    operation of torch, as it is under a causal mask."""
    return checkpointing == "full" or (checkpointing == "selective" and mask == "blocks")


def _formula(passes: Passes) -> str:
    positions = f"{passes.read:.3g}·N_trunk + {passes.scored:.3g}·N_head"
    return f"6·({positions}) + 12·L·d·{passes.seen:.5g}"


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float | None) -> float | None:
    """Share of the dense peak; unknown stays unknown."""
    return None if not peak_flops else tokens_per_s * flops_per_token / peak_flops
