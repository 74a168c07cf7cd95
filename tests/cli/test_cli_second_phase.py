"""Fine-tuned runs from the command line: each form of export, and a second phase that starts from the first."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from redline.runs.events import read_events

pytest.importorskip("transformers", reason="a base is made by transformers")


@pytest.fixture
def tune(tmp_path: Path, tiny_base: Path, answers: Path) -> str:
    recipe = {
        "objective": "finetune",
        "model": {"base": str(tiny_base), "lora": {"r": 4}},
        "data": {"source": str(answers), "seq_len": 96, "val_fraction": 0.1},
        "train": {"device": "cpu", "precision": "fp32", "steps": 4, "lr": 1e-2, "global_batch": 4},
        "eval": {"every": 1000, "samples": 0},
        "monitor": {"log_every": 1},
    }
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump(recipe))
    return "tune.yaml"


@pytest.fixture
def first(tune: str, inside: Any, tmp_path: Path) -> Path:
    assert inside("train", tune, "--run", "first").code == 0
    return tmp_path / "first"


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "events.jsonl") if event["type"] == "eval"]


def test_exported_in_each_form(first: Path, inside: Any, tmp_path: Path) -> None:
    answer = inside("export", "first", "--out", "adapter")
    assert answer.code == 0, answer.err
    assert "(raw weights, fp32) → adapter: adapter for LlamaForCausalLM" in answer.out
    assert "load it with peft: the code is in adapter/README.md" in answer.out
    answer = inside("export", "first", "--out", "original", "--merged", "--onto", "original", "--dtype", "bf16")
    assert answer.code == 0, answer.err
    assert "from the base that was trained against" in answer.out
    row = json.loads(inside("export", "first", "--out", "merged", "--merged", "--json").out)
    assert (row["form"], row["architecture"], row["quantisation_difference"]) == ("merged", "LlamaForCausalLM", None)
    assert row["files"] == {path.name: path.stat().st_size for path in (tmp_path / "merged").iterdir()}


@pytest.mark.parametrize("source", ["first", "adapter"])
def test_a_second_phase_begins_where_the_first_ended(
    first: Path, tune: str, inside: Any, tmp_path: Path, source: str
) -> None:
    assert inside("export", "first", "--out", "adapter").code == 0
    answer = inside("train", tune, f"model.init_from={source}", "--run", "second", "train.steps=2")
    assert answer.code == 0, answer.err
    assert losses(tmp_path / "second")[0] == losses(first)[-1] < losses(first)[0]
    lock = json.loads((tmp_path / "second/lock.json").read_text())
    assert lock["init_from"]["step"] == 4
    answer = inside("export", "second", "--out", "twice")
    assert answer.code == 0, answer.err
    assert "weights of run" in (tmp_path / "twice/README.md").read_text()


@pytest.mark.parametrize("method", ["qlora", "full"])
def test_a_second_phase_can_start_from_a_merged_model(
    first: Path, tune: str, inside: Any, tmp_path: Path, method: str
) -> None:
    """The adapters are new, and the base that is quantised includes the result of the first phase."""
    assert inside("export", "first", "--out", "merged", "--merged").code == 0
    plain = ("model.lora.r=16",) if method == "full" else ()
    words = ("model.base=merged", f"finetune.method={method}", *plain, "train.steps=1", "--run", "second")
    answer = inside("train", tune, *words)
    assert answer.code == 0, answer.err
    begins = losses(tmp_path / "second")[0]
    assert begins == pytest.approx(losses(first)[-1], rel=1e-5 if method == "full" else 0.05)


def test_the_whole_model_of_a_first_phase(tune: str, inside: Any, tmp_path: Path) -> None:
    full = ("finetune.method=full", "model.lora.r=16", "train.lr=1e-3")
    assert inside("train", tune, *full, "--run", "first").code == 0
    assert inside("train", tune, *full, "model.init_from=first", "--run", "second").code == 0
    assert losses(tmp_path / "second")[0] == losses(tmp_path / "first")[-1]
    assert inside("export", "first", "--out", "model").code == 0
    assert inside("train", tune, *full, "model.init_from=model", "--run", "third").code == 0
    assert losses(tmp_path / "third")[0] == losses(tmp_path / "first")[-1]
    answer = inside("train", tune, "model.init_from=first", "--run", "no")
    assert answer.code == 2
    assert "first@4 is a whole model, and this run trains adapters. Use it as the base" in answer.message


def test_incompatible_weights_are_a_one_line_error(
    first: Path, tune: str, inside: Any, tmp_path: Path, tiny_base: Path
) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(tiny_base, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    asked = {
        ("model.base=other",): "first@4 were trained on another base than other. Use their base: model.base=",
        (
            "model.lora.r=2",
        ): "first@4 has adapters of another shape: model.lora.r is 4 there and 2 here. Use: model.lora.r=4",
        ("model.lora.target_modules=[q_proj]",): "model.lora.target_modules is [q_proj,k_proj,v_proj,o_proj,",
        ("finetune.method=full", "model.lora.r=16"): "first@4 holds adapters, and this run trains a whole model.",
    }
    for words, says in asked.items():
        answer = inside("train", tune, "model.init_from=first", *words, "--run", "no")
        assert answer.code == 2, answer.err
        assert says in answer.message
        assert not (tmp_path / "no").exists()
    answer = inside("train", tune, "model.init_from=first", "model.lora.alpha=64", "finetune.method=lora", "--dry-run")
    assert answer.code == 0, answer.err
    assert "model.lora.alpha was 16.0 when" in answer.err
    assert "model.quant was nf4 when" in answer.err


def test_merging_a_run_without_adapters_is_a_usage_error(home: Path, inside: Any) -> None:
    answer = inside("export", "latest", "--out", "out", "--merged", cwd=home)
    assert answer.code == 2
    assert "no adapters" in answer.message
    answer = inside("export", "latest", "--out", "out", "--onto", "mars", cwd=home)
    assert "--onto: 'mars' is not trained or original." in answer.message
    assert not (home / "out").exists()
