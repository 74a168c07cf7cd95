"""The trials that decide whether fused blocks and fp8 matmuls are used, on a real card."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.kernels.float8_choice import choose, try_linears
from redline.models.fused_trial import compare_blocks, fused_failure, trial_shape
from redline.planning.shapes import DecoderShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPE = {"layers": 24, "d_model": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64, "d_ff": 2688, "vocab": 50_304}
MODELS: dict[str, dict[str, Any]] = {
    "350m": {},
    "8b": {"d_model": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "d_ff": 14_336},
    "quickstart": {"d_model": 192, "heads": 4, "kv_heads": 4, "head_dim": 48, "d_ff": 512},
    "speedrun": {"d_model": 512, "heads": 8, "kv_heads": 8, "d_ff": 1408, "qk_norm": True},
    "relu2": {"mlp": "relu2", "tied": False},
    "tables": {"value_embeddings": 2, "skips": "unet"},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_fused_blocks_pass_at_real_widths(changes: dict[str, Any], precision: str) -> None:
    errors = compare_blocks(trial_shape(DecoderShape(**{**SHAPE, **changes})), precision)
    assert errors["fused"] < 2 * errors["torch"] + 0.01


def test_a_pass_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    begin = time.perf_counter()
    assert fused_failure(DecoderShape(**SHAPE), "bf16") == ""
    first = time.perf_counter() - begin
    assert fused_failure(DecoderShape(**SHAPE), "bf16") == ""
    second = time.perf_counter() - begin - first
    print(f"first {first:.2f} s, again {second:.4f} s")
    assert second < 0.1 < first


@pytest.mark.parametrize("learns", [True, False])
def test_linears_are_tried_in_a_child_process(learns: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs tensor cores for fp8")
    shapes = {"qkv": (16_384, 1024, 3072), "up": (16_384, 1024, 5376), "head": (16_384, 1024, 50_304)}
    answers = try_linears("native", shapes, learns=learns)
    assert {name: answer["works"] for name, answer in answers.items()} == dict.fromkeys(shapes, True), answers
    assert all(0 < ms < 1000 for answer in answers.values() for ms in answer["about"])


def test_a_shape_without_memory_is_out_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs tensor cores for fp8")
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path))
    with pytest.raises(torch.OutOfMemoryError):
        choose("auto", {"up": (1 << 24, 16_384, 16_384)}, fused=True)
