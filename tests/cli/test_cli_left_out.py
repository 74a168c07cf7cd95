"""Data of fine-tuned runs: dropped rows are reported, a changed template is detected, odd prompts are answered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("transformers", reason="a base is made by transformers")

STORIES = Path(__file__).parents[3] / "shared/data/stories260k"


@pytest.fixture
def tune(tmp_path: Path, tiny_base: Path, answers: Path) -> str:
    shutil.copytree(tiny_base, tmp_path / "base")
    recipe = {
        "objective": "finetune",
        "model": {"base": str(tmp_path / "base"), "lora": {"r": 4}},
        "data": {"source": str(answers), "seq_len": 96, "val_fraction": 0.1},
        "train": {"device": "cpu", "precision": "fp32", "steps": 2, "lr": 1e-2, "global_batch": 4},
        "eval": {"every": 1000, "samples": 0},
    }
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump(recipe))
    return "tune.yaml"


@pytest.fixture
def mostly_long(tmp_path: Path) -> str:
    rows = [{"prompt": "What is the colour?", "completion": "red " * (200 if n else 2)} for n in range(9)]
    rows.append({"prompt": "", "completion": ""})
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_dropped_rows_are_reported(tune: str, mostly_long: str, inside: Any) -> None:
    told = "10 rows, 1 used; 1 cannot be used; 8 longer than data.seq_len, dropped; most of them are too long"
    train = inside("train", tune, f"data.source={mostly_long}", "data.val_fraction=0", "--run", "run")
    assert train.code == 0, train.err
    assert told in train.err
    scored = inside("eval", "run", "--data", mostly_long, "--json")
    assert scored.code == 0, scored.err
    assert told in scored.err
    assert any(told in note for note in json.loads(scored.out)["notes"])


def test_a_template_that_changed_is_noticed(tune: str, inside: Any, tmp_path: Path) -> None:
    assert inside("train", tune, "--run", "run").code == 0
    template = tmp_path / "base/chat_template.jinja"
    before = template.read_text()
    template.write_text(before.replace("<|im_start|>", "<|im_start|>the "))
    assert template.read_text() != before
    for words in (("eval", "run"), ("sample", "run", "--prompt", "What?"), ("export", "run", "--out", "out")):
        refused = inside(*words)
        assert refused.code == 1, refused.err
        assert "template" in refused.message
        assert "Put the old one back" in refused.message
    assert not (tmp_path / "out").exists()
    template.write_text(before)
    assert inside("eval", "run").code == 0


def test_data_that_changed_are_noticed(tune: str, inside: Any, answers: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(answers.read_text())
    assert inside("train", tune, f"data.source={rows}", "--run", "run").code == 0
    assert "any more" not in inside("eval", "run").err
    rows.write_text(answers.read_text() + json.dumps({"prompt": "And now?", "completion": "Now."}) + "\n")
    assert "the data have changed since the run began" in inside("eval", "run").err


def test_odd_prompts_are_answered(tune: str, inside: Any) -> None:
    assert inside("train", tune, "--run", "run").code == 0
    for prompt in ("a\udcffb", "\x00", "☃" * 3):
        assert inside("sample", "run", "--prompt", prompt, "--tokens", "3").code == 0
    long = inside("sample", "run", "--prompt", "colour " * 400, "--tokens", "3")
    assert long.code == 0
    assert "more than the" in long.err


def test_a_tokenizer_of_another_model_is_refused(tune: str, inside: Any, tmp_path: Path) -> None:
    config = tmp_path / "base/tokenizer.json"
    found = json.loads(config.read_text())
    last = max(found["model"]["vocab"].values())
    more = [dict(found["added_tokens"][0], id=last + n, content=f"<|{n}|>") for n in range(1, 100)]
    found["added_tokens"] += more
    config.write_text(json.dumps(found))
    refused = inside("train", tune, "--run", "run")
    assert refused.code != 0
    assert "tokenizer" in refused.message
    assert "belongs to the base" in refused.message
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not STORIES.is_dir(), reason="no such model here")
def test_a_continuation_keeps_its_leading_space(inside: Any) -> None:
    words = ("--prompt", "Once upon", "--plain", "--temperature", "0", "--tokens", "8")
    assert inside("sample", str(STORIES), *words).out.startswith("Once upon a time,")
