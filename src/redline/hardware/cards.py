"""Cards by name, for planning a run on one that is not here."""

from __future__ import annotations

from redline.errors import UsageError, did_you_mean
from redline.hardware.machine import Machine
from redline.hardware.specs import SPECS
from redline.units import GIB

_CORES = 16  # of the machine around it; the plan uses it for nothing but loader threads


def card(name: str) -> Machine:
    """The machine that a card of the table makes."""
    spec = SPECS.get(name.lower())
    if spec is None:
        hint = did_you_mean(name, SPECS) or f"Known: auto, cpu, {', '.join(SPECS)}."
        raise UsageError(
            f"no figures are known for a {name!r}.",
            where="--gpu",
            fix=f"{hint} On the card itself use --gpu auto with --probe, which measures it.",
        )
    bf16 = spec.capability >= (8, 0)
    return Machine("cuda", spec.name, int(spec.memory_gib * GIB), _CORES, spec.capability, fast_bf16=bf16)
