"""Data-sheet figures of known cards: dense peaks, memory, bandwidth.

An unknown card has no figures here. It never gets another card's, and no figure is for 2:4 sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass

TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True)
class GpuSpec:
    name: str
    bf16: float  # FLOP/s, dense, fp32 accumulation
    fp8: float | None
    fp32: float
    memory_gb: float  # as sold
    memory_gib: float  # as drivers report it, rounded down; measured on the H200, published figures for the others
    bandwidth: float  # bytes/s of its memory
    link: float  # bytes/s to another card of the same node, in one direction
    capability: tuple[int, int]

    def peak(self, precision: str) -> float | None:
        """Return the dense peak in FLOP/s; None if the card has no units for the precision."""
        return {"bf16": self.bf16, "fp16": self.bf16, "fp8": self.fp8, "fp32": self.fp32}[precision]


def _spec(
    name: str,
    bf16: float,
    fp8: float | None,
    fp32: float,
    memory: tuple[float, float],
    tb_s: float,
    link_gb_s: float,
    capability: tuple[int, int],
) -> GpuSpec:
    eight_bit = fp8 * TERA if fp8 else None
    return GpuSpec(name, bf16 * TERA, eight_bit, fp32 * TERA, *memory, tb_s * TERA, link_gb_s * GIGA, capability)


SPECS = {
    spec.name: spec
    for spec in (
        # name, TFLOP/s in bf16, fp8 and fp32, (GB, GiB), TB/s of memory, GB/s between cards, compute capability
        _spec("h100", 989, 1979, 67, (80, 79.1), 3.35, 450, (9, 0)),
        _spec("h100-pcie", 756, 1513, 51, (80, 79.1), 2.0, 64, (9, 0)),
        _spec("h100-nvl", 835, 1671, 60, (94, 93.0), 3.9, 300, (9, 0)),
        _spec("h200", 989, 1979, 67, (141, 139.8), 4.8, 450, (9, 0)),
        _spec("gh200", 989, 1979, 67, (96, 94.5), 4.0, 450, (9, 0)),
        _spec("b200", 2250, 4500, 75, (180, 178.0), 7.7, 900, (10, 0)),
        _spec("a100-40gb", 312, None, 19.5, (40, 39.3), 1.555, 300, (8, 0)),
        _spec("a100-80gb", 312, None, 19.5, (80, 79.1), 2.039, 300, (8, 0)),
        _spec("l40s", 362, 733, 91.6, (48, 44.3), 0.864, 32, (8, 9)),
        _spec("l4", 121, 242, 30.3, (24, 21.9), 0.3, 32, (8, 9)),
        _spec("rtx4090", 165, 330, 82.6, (24, 23.5), 1.008, 32, (8, 9)),
        _spec("rtx5090", 209, 419, 104.8, (32, 31.3), 1.792, 64, (12, 0)),
    )
}


def spec_of(device_name: str, memory_gb: float | None = None) -> GpuSpec | None:
    """Return the figures for a driver's device name ("NVIDIA H100 80GB HBM3") or one of ours ("h100"), or None."""
    name = device_name.lower().replace("nvidia", "").replace("geforce", "").strip()
    if name in SPECS:
        return SPECS[name]
    words = name.replace("-", " ").split()
    if "mig" in words:
        return None  # a MIG slice has only a part of the card's peak
    if "h100" in words:
        key = "h100-nvl" if "nvl" in words else "h100-pcie" if "pcie" in words else "h100"
    elif "a100" in words:
        large = any(w.startswith("80gb") for w in words) or (memory_gb or 0) > 60
        key = "a100-80gb" if large else "a100-40gb"
    elif "rtx" in words:
        # "RTX 4090 Laptop GPU" and "RTX 4090 D" are slower cards.
        key = next((f"rtx{n}" for n in ("4090", "5090") if n in words and len(words) <= 2), "")
    elif "nvl" in words:
        key = ""  # the H200 NVL is a slower card than the H200
    else:
        key = next((k for k in ("gh200", "h200", "b200", "l40s", "l4") if k in words), "")
    return SPECS.get(key)
