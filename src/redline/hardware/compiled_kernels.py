"""Which Triton kernels a card may use, by what they compile to for its architecture.

`make kernels` compiles every kernel for each architecture below, with the versions of Triton that torch 2.11 and 2.13
bring, and writes compiled_kernels.json: registers, spilled bytes and shared memory. All measurements were made on
Hopper, so a kernel that needs more shared memory than an architecture has, or that spills registers where Hopper's
binary does not, is not used there. Nor is any on an architecture that it was not compiled for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

KIB = 1024
# compute capability → (architecture, shared memory of a block in bytes)
ARCHITECTURES = {
    (8, 0): ("sm_80", 163 * KIB),  # A100
    (8, 6): ("sm_86", 99 * KIB),  # A10, A40, RTX 3090
    (8, 9): ("sm_89", 99 * KIB),  # L4, L40S, RTX 4090
    (9, 0): ("sm_90a", 227 * KIB),  # H100, H200, GH200
    (10, 0): ("sm_100", 227 * KIB),  # B200
    (12, 0): ("sm_120", 99 * KIB),  # RTX 5090
}
MEASURED = "3.6.0", "sm_90a"  # the version of Triton and the architecture of all measurements
TABLE = Path(__file__).with_suffix(".json")


def kernels_off(capability: tuple[int, int] | None) -> dict[str, str]:
    """Return the kernels that may not run on cards of this compute capability, each with the reason.

    A kernel is called as in the table, for instance "rms_norm._forward", or "rms_norm._forward on fp8".
    """
    measured = _table()[MEASURED[0]][MEASURED[1]]
    architecture, shared = ARCHITECTURES.get(capability or (0, 0), ("", 0))
    if not architecture:
        dotted = "an unknown compute capability" if capability is None else f"compute capability {_dotted(capability)}"
        return dict.fromkeys(measured, f"the Triton kernels were not compiled for {dotted}")
    off: dict[str, str] = {}
    for version, of_version in _table().items():
        for kernel, row in of_version[architecture].items():
            if reason := _objection(row, measured[kernel], shared):
                off.setdefault(kernel, f"{kernel} {reason} for {architecture} with Triton {version}")
    return off


def objection(capability: tuple[int, int] | None, kernels: Iterable[str]) -> str:
    """Return why one of these kernels may not run on cards of this compute capability, or "" if all may."""
    off = kernels_off(capability)
    return next((off[kernel] for kernel in kernels if kernel in off), "")


def _objection(row: dict[str, Any], measured: dict[str, Any], shared: int) -> str:
    if "error" in row:
        return "does not compile"
    if row["shared"] > shared:
        return f"needs {row['shared'] / KIB:.0f} KiB of shared memory, of which there are {shared // KIB},"
    if row["spilled"] > measured["spilled"]:
        return f"spills {row['spilled']} bytes of registers"
    return ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table
