"""Which Triton kernels each card may use, and what a run chooses there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.hardware import compiled_kernels
from redline.hardware.compiled_kernels import ARCHITECTURES, KIB, TABLE, kernels_off, objection
from redline.hardware.machine import gpu_machine
from redline.hardware.specs import SPECS
from redline.kernels import dispatch
from redline.kernels.dispatch import triton_serves
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, Resolved, resolve

FACTS = DataFacts(50_257, 10**9, 10**6, "", "gpt2", "")
GIB = 1 << 30
CARDS = {  # name → (capability, model.kernels, whether Muon's products are Triton's)
    "NVIDIA H100 80GB HBM3": ((9, 0), "fused", True),
    "NVIDIA H200": ((9, 0), "fused", True),
    "NVIDIA B200": ((10, 0), "fused", True),
    "NVIDIA GeForce RTX 5090": ((12, 0), "fused", False),
    "NVIDIA L4": ((8, 9), "torch", False),
    "NVIDIA A100-SXM4-80GB": ((8, 0), "torch", False),
    "NVIDIA A10G": ((8, 6), "torch", False),
    "An unknown newer card": ((11, 0), "torch", False),
    "An unknown older card": ((7, 5), "torch", False),
}


def resolved(card: str, *overrides: str, recipe: str = "pretrain-350m") -> Resolved:
    machine = gpu_machine(card, 100 * GIB, CARDS[card][0], None)
    return resolve(load(recipe, overrides).recipe, machine, FACTS)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that pretends that the GPU has a compute capability, and that triton is installed."""
    monkeypatch.setattr(dispatch, "find_spec", lambda _: object())

    def pretend(capability: tuple[int, int]) -> torch.device:
        triton_serves.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        return torch.device("cuda", 0)

    yield pretend
    triton_serves.cache_clear()


@pytest.mark.parametrize("card", CARDS)
def test_the_blocks_chosen_on_each_card(card: str) -> None:
    capability, expected, _ = CARDS[card]
    chosen = next(choice for choice in resolved(card).choices if choice.key == "model.kernels")
    assert chosen.value == expected
    assert chosen.reason
    if capability not in ARCHITECTURES:
        assert kernels_off(capability), "nothing was compiled for it"
        assert resolved(card, "train.optimizer=normuon").warnings != resolved(card).warnings


@pytest.mark.parametrize("card", CARDS)
def test_the_operations_served_by_triton_on_each_card(card: str, on_card: Any) -> None:
    capability, _, products = CARDS[card]
    device = on_card(capability)
    assert triton_serves(device, "muon._times_transposed") is products
    assert triton_serves(device, "nf4._dequantise") is (capability in ARCHITECTURES and capability != (10, 0))  # spills
    assert triton_serves(device, "cross_entropy._softmax_loss") is (capability in ARCHITECTURES)
    assert triton_serves(device, "low_rank._project_down on fp8") is (capability >= (8, 9) and capability != (11, 0))


def test_a_kernel_that_is_off_switches_off_the_blocks_that_need_it() -> None:
    """On a B200 the backward of skip connections spills registers, which it does not on Hopper."""
    assert "skip._backward" in kernels_off((10, 0))
    with_skips = resolved("NVIDIA B200", "model.skips=x0")
    assert with_skips.recipe.model.kernels == "torch"
    assert "skip._backward" in next(choice.reason for choice in with_skips.choices if choice.key == "model.kernels")
    assert resolved("NVIDIA B200", "model.skips=none").recipe.model.kernels == "fused"


@pytest.mark.parametrize("card", [card for card, (capability, *_) in CARDS.items() if capability == (9, 0)])
def test_nothing_is_off_where_everything_was_measured(card: str) -> None:
    assert kernels_off(CARDS[card][0]) == {}
    assert resolved(card, "train.precision=fp8").recipe.model.kernels == "fused"


@pytest.mark.parametrize(
    ("row", "off"),
    [
        ({"registers": 64, "spilled": 0, "shared": 99 * KIB}, False),
        ({"registers": 64, "spilled": 0, "shared": 99 * KIB + 1}, True),
        ({"registers": 255, "spilled": 8, "shared": 0}, False),
        ({"registers": 255, "spilled": 12, "shared": 0}, True),
        ({"error": "type fp8e4nv not supported in this architecture"}, True),
    ],
)
def test_the_rule(monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], off: bool) -> None:
    measured = {"registers": 60, "spilled": 8, "shared": 100 * KIB}
    table = {"3.6.0": {"sm_90a": {"m._k": measured}, "sm_120": {"m._k": measured | {"shared": 0}}}}
    table["3.7.1"] = {"sm_90a": {"m._k": measured}, "sm_120": {"m._k": row}}
    monkeypatch.setattr(compiled_kernels, "_table", lambda: table)
    assert bool(objection((12, 0), ["m._k"])) is off
    assert not objection((12, 0), ["m._other"])


def test_the_table_has_every_kernel_for_every_card_and_version() -> None:
    table = json.loads(TABLE.read_text())
    assert len(table) >= 2, "the version that was measured, and that of the torch in constraints.txt"
    kernels = set(table["3.6.0"]["sm_90a"])
    for version in table.values():
        assert {name: set(rows) for name, rows in version.items()} == {
            name: kernels for name, _ in ARCHITECTURES.values()
        }
    assert {spec.capability for spec in SPECS.values()} <= set(ARCHITECTURES)


def test_the_names_that_code_asks_for_are_in_the_table() -> None:
    """A misspelt name would never be off."""
    import re

    source = Path(compiled_kernels.__file__).parents[1]
    text = "".join(path.read_text() for path in [*source.glob("kernels/*.py"), source / "recipe/resolve.py"])
    modules = "|".join(sorted({kernel.split(".")[0] for kernel in _kernels()}))
    asked = set(re.findall(rf'"((?:{modules})\._\w+)"', text))
    assert len(asked) >= 10
    assert asked <= _kernels()


def _kernels() -> set[str]:
    return set(json.loads(TABLE.read_text())["3.6.0"]["sm_90a"])
