"""causal_lm: predict the next token. Its costs are the decoder's."""

from __future__ import annotations

from redline.fields import Section
from redline.plan.flops import decoder_flops as flops
from redline.plan.memory import training_memory as memory
from redline.plan.work import decoder_work as work

__all__ = ["Options", "flops", "memory", "work"]


class Options(Section):
    """Plain next-token prediction has none of its own."""
