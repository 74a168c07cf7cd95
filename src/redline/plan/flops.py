"""FLOPs per token, forward and backward, in the two forms people compare.

PaLM form (arXiv 2204.02311, appendix B): 6·N + 12·L·d·T, every query against every key.
Causal form: 6·N + 6·L·d·T, the half that causality leaves. N counts parameters that multiply a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from redline.plan.shapes import DecoderShape

FORMULA = "6·N_matmul + 12·L·d·T"
FORMULA_CAUSAL = "6·N_matmul + 6·L·d·T"
FORMULA_RECOMPUTED = "6·N_matmul + 6·L·d·T + 2·N_layers + 2·L·d·T"


@dataclass(frozen=True)
class FlopsPerToken:
    useful: float  # PaLM form: for comparison with others
    causal: float  # what the mask leaves: for ceilings
    executed: float  # the causal form plus recomputation
    formula: str = FORMULA
    formula_executed: str = FORMULA_CAUSAL


def decoder_flops(shape: DecoderShape, seq_len: int, checkpointing: str = "none") -> FlopsPerToken:
    attention = shape.layers * shape.d_attention * seq_len
    useful = 6.0 * shape.matmul_parameters + 12.0 * attention
    causal = 6.0 * shape.matmul_parameters + 6.0 * attention
    if checkpointing != "full":
        return FlopsPerToken(useful, causal, causal)
    again = 2.0 * shape.layers * shape.layer_matmul_parameters + 2.0 * attention
    return FlopsPerToken(useful, causal, causal + again, formula_executed=FORMULA_RECOMPUTED)


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float | None) -> float | None:
    """Share of the dense peak; unknown stays unknown."""
    return None if not peak_flops else tokens_per_s * flops_per_token / peak_flops
