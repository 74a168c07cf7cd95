"""FLOPs per token of data, forward and backward, in the two forms people compare.

`useful` is the PaLM form (arXiv 2204.02311, appendix B): 6·N + 12·L·d·T, every query against every key of its document.
`executed` is what the attention mask and the loss leave: half of these pairs under a causal mask, and the head only at
positions that have a target. N counts parameters that multiply a token. Neither form counts recomputation (gradient
checkpointing), padding rows of the head, or the optimizer. Where rows of the data differ, both are averages over the
training data; before the data are read, `assumed` says what is assumed of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from redline.planning.layout import Layout
from redline.planning.shapes import DecoderShape

FORMULA = "6·N_matmul + 12·L·d·T"
FORMULA_CAUSAL = "6·N_matmul + 6·L·d·T"
FORMULA_RECOMPUTED = "2·(N_layers − N_down) + 2·L·d·T"
ASSUMES_FULL_LOSS = "every position that can be hidden is content or padding that is learnt"
ASSUMES_FULL_ROWS = "every token sees its whole row"


@dataclass(frozen=True)
class FlopsPerToken:
    useful: float  # PaLM form: for comparison with others
    executed: float  # what the mask and the loss leave: for ceilings and `mfu_causal`
    recomputed: float = 0.0  # the forward FLOPs that gradient checkpointing runs a second time
    formula: str = FORMULA
    formula_executed: str = FORMULA_CAUSAL
    formula_recomputed: str = ""
    assumed: str = ""  # about data that have not been read; "" if the counts are those of the data

    @property
    def causal(self) -> float:
        """The name of `executed` in older versions, which plan events and locks still carry."""
        return self.executed

    @property
    def computed(self) -> float:
        """All FLOPs of a step, with recomputation."""
        return self.executed + self.recomputed

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the plan event and the lock; older versions read `causal`."""
        return {**asdict(self), "causal": self.executed}


@dataclass(frozen=True)
class Passes:
    """What a decoder computes for one token of the data."""

    read: float  # positions that pass through the blocks
    scored: float  # positions whose logits are computed
    seen: float  # keys that the queries of all those positions attend to, in sum
    mask: str = "causal"  # the kind of mask, which selects the measured attention rate


def causal_passes(seq_len: float, scored: float = 1.0) -> Passes:
    """Return the passes of next-token prediction.

    `seq_len` is the token-weighted mean length of a document where documents do not attend to each other.
    """
    return Passes(1.0, scored, seq_len / 2)


def layout_passes(layout: Layout, hidden: float = 1.0) -> Passes:
    """Return the passes of block diffusion; `hidden` is the mean share of noised positions that are masked."""
    length, mask = layout.length, "blocks" if layout.read > layout.denoised else "causal"
    return Passes(layout.read / length, hidden * layout.denoised / length, layout.pairs / length, mask)


def decoder_flops(
    shape: DecoderShape, seq_len: float, checkpointing: str = "none", *, scored: float = 1.0, assumed: str = ""
) -> FlopsPerToken:
    """Return the FLOPs of next-token prediction; `scored` is the share of the positions that have a target."""
    attention = shape.layers * shape.d_attention * seq_len
    matmuls = 6.0 * (shape.layers * shape.layer_matmul_parameters + scored * shape.head_parameters)
    useful, executed = matmuls + 12.0 * attention, matmuls + 6.0 * attention
    palm, masked = (with_scored_head(form, "N_matmul", scored) for form in (FORMULA, FORMULA_CAUSAL))
    if checkpointing != "full":
        return FlopsPerToken(useful, executed, 0.0, palm, masked, assumed=assumed)
    again = 2.0 * shape.layers * shape.layer_recomputed_parameters + 2.0 * attention
    return FlopsPerToken(useful, executed, again, palm, masked, FORMULA_RECOMPUTED, assumed)


def with_scored_head(formula: str, every: str, scored: float) -> str:
    """Return the formula with the head as a term of its own if it does not run at every position."""
    return formula if scored == 1.0 else formula.replace(every, f"(N_layers + {scored:.3g}·N_head)")


def layout_flops(
    shape: DecoderShape, layout: Layout, hidden: float, checkpointing: str = "none", assumed: str = ""
) -> FlopsPerToken:
    """Return the FLOPs of block diffusion.

    For a text in equal blocks they are 6·(2·N_trunk + hidden·N_head) + 12·L·d·(n + block).

    Both forms are the same: a bidirectional mask has no half that a kernel skips, and the head runs only where a
    position is hidden and has a loss.
    """
    trunk, attention = shape.layers * shape.layer_matmul_parameters, shape.layers * shape.d_attention
    passes = layout_passes(layout, hidden)
    counted = 6.0 * passes.read * trunk + 12.0 * passes.seen * attention + 6.0 * passes.scored * shape.head_parameters
    again, formulas = 0.0, []
    if checkpointing == "full":
        again += 2.0 * passes.read * shape.layers * shape.layer_recomputed_parameters
        formulas.append(f"{2 * passes.read:.3g}·(N_trunk − N_down)")
    if recomputes_attention(checkpointing, passes.mask):
        again += 4.0 * passes.seen * attention
        formulas.append(f"4·L·d·{passes.seen:.5g}")
    formula = _formula(passes)
    return FlopsPerToken(counted, counted, again, formula, formula, " + ".join(formulas), assumed)


def recomputes_attention(checkpointing: str, mask: str) -> bool:
    """Return whether the backward pass computes attention's forward again.

    `selective` keeps attention's output where attention is a single operation of torch, as under a causal mask.
    """
    return checkpointing == "full" or (checkpointing == "selective" and mask == "blocks")


def _formula(passes: Passes) -> str:
    positions = f"{passes.read:.3g}·N_trunk + {passes.scored:.3g}·N_head"
    return f"6·({positions}) + 12·L·d·{passes.seen:.5g}"


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float | None) -> float | None:
    """Return the share of the dense peak, or None if the peak is unknown."""
    return None if not peak_flops else tokens_per_s * flops_per_token / peak_flops
