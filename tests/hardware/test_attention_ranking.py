"""Attention back-ends are ranked once on a machine, and the next start says when that was."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redline.kernels import attention
from redline.kernels.attention import MaskSpec, Selection, select

MS = {"flash": 2.0, "efficient": 3.0, "flex": 1.25}


@pytest.fixture
def measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A card whose back-ends are timed by decree; cuDNN is not there."""
    timed: list[str] = []

    def measure(name: str, *_: Any, **__: Any) -> float:
        timed.append(name)
        return MS[name]

    monkeypatch.setattr(attention, "measure", measure)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H200"))
    return timed


def chosen(documents: bool = False, dtype: torch.dtype = torch.bfloat16, shape: Any = (8, 8, 512, 64)) -> Selection:
    return select("auto", MaskSpec(documents=documents), device="cuda", dtype=dtype, shape=shape)


def test_the_second_start_takes_it_from_the_cache(measured: list[str], cache: Path) -> None:
    first = chosen()
    assert first.backend == "flex"
    assert "flex 1.25, flash 2.00, efficient 3.00" in first.reason
    assert "as measured on" not in first.reason
    assert measured == ["flash", "efficient", "flex"]
    second = chosen()
    assert len(measured) == 3
    assert second.backend == "flex"
    entries = json.loads((cache / "attention.json").read_text())["entries"]
    (key,), (entry,) = entries, entries.values()
    assert f"8×8×512×64, as measured on {entry['date']}: flex 1.25, flash 2.00, efficient 3.00; cudnn:" in second.reason
    assert entry["ms"] == MS
    assert "NVIDIA H200" in key


@pytest.mark.parametrize(
    "other", [{"documents": True}, {"dtype": torch.float16}, {"shape": (4, 8, 512, 64)}, {"shape": (8, 8, 1024, 64)}]
)
def test_another_question_is_measured(measured: list[str], other: dict[str, Any]) -> None:
    chosen()
    assert "as measured on" not in chosen(**other).reason
    assert len(measured) == 6


@pytest.mark.parametrize("what", ["emptied", "torn", "no times", "other back-ends", "strange times"])
def test_what_cannot_be_used_is_measured_anew(measured: list[str], cache: Path, what: str) -> None:
    chosen()
    path = cache / "attention.json"
    content = json.loads(path.read_text())
    (entry,) = content["entries"].values()
    if what == "emptied":
        path.unlink()
    elif what == "torn":
        path.write_text(path.read_text()[:-20])
    else:
        entry["ms"] = {"no times": 5, "other back-ends": {"flash": 1.0}, "strange times": dict.fromkeys(MS, "fast")}[
            what
        ]
        path.write_text(json.dumps(content))
    assert "as measured on" not in chosen().reason
    assert len(measured) == 6
    assert "as measured on" in chosen().reason


def test_a_refusal_is_remembered_and_a_full_card_is_not(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    errors: dict[str, Exception] = {"flex": torch.OutOfMemoryError("CUDA out of memory")}

    def measure(name: str, *_: Any, **__: Any) -> float:
        measured.append(name)
        if name in errors:
            raise errors[name]
        return MS[name]

    monkeypatch.setattr(attention, "measure", measure)
    assert chosen().backend == "flash"
    assert "as measured on" not in chosen().reason, "another time there may be room"
    errors["flex"] = RuntimeError("no kernel\nfor this")
    chosen()
    count = len(measured)
    again = chosen()
    assert len(measured) == count
    assert again.backend == "flash"
    assert "flex: no kernel" in again.reason


def test_what_is_asked_for_is_not_measured(measured: list[str]) -> None:
    spec = MaskSpec()
    assert select("flash", spec, device="cuda", dtype=torch.bfloat16, shape=(1, 1, 64, 64)).reason == "as asked"
    assert select("auto", spec, device="cpu", dtype=torch.float32, shape=(1, 1, 64, 64)).backend == "matmul"
    assert measured == []
