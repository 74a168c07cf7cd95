"""Every key is explained from one source, and shipped recipes say why they set what they set."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
from pydantic import Field

from redline.errors import UsageError
from redline.jobs import base
from redline.recipe.explain import (
    as_yaml,
    auto_texts,
    every_key,
    explain,
    key_texts,
    keys_by_section,
    keys_in,
    sections,
    set_by_recipes,
)
from redline.recipe.load import load, parse_yaml, shipped


def test_every_key_of_redline_has_a_text_and_no_text_is_left_over() -> None:
    assert set(key_texts()) == set(every_key())
    assert all(text.strip() == text and text for text in key_texts().values())
    assert set(sections()) == {key.rpartition(".")[0] for key in every_key()}
    assert {name for names in keys_by_section().values() for name in names} == set(every_key())


def test_a_text_about_auto_belongs_to_a_key_that_takes_it() -> None:
    keys = [key for section in sections() for key in keys_in(section)]
    assert {key.name for key in keys if "`auto`" in key.type} == set(auto_texts())


def test_a_key_is_explained() -> None:
    key = explain("train.lr")
    assert (key.type, key.default, key.resumable) == ("`auto` or number > 0", "auto", False)
    assert key.auto == auto_texts()["train.lr"]
    assert key.aliases == ("train.learning_rate", "learning_rate")
    assert explain("learning_rate") == key
    assert explain("train.steps").resumable
    assert explain("model.lora.r").section == "model.lora"
    assert explain("finetune.method").type == "`qlora`, `lora`, `full`"
    assert explain("train.betas").default == "[0.9, 0.95]"


def test_the_recipes_that_set_a_key_are_those_that_load_it() -> None:
    for key in ("train.lr", "train.ema", "model.lora.r", "finetune.method", "data.seq_len"):
        written = set_by_recipes(key)
        assert written
        for name, value in written.items():
            found: Any = load(name).recipe
            for part in key.split("."):
                found = getattr(found, part)
            assert found == value
        assert all(
            not re.search(rf"\b{key.rpartition('.')[2]}:", shipped()[n].read_text()) for n in {*shipped()} - {*written}
        )
    assert set_by_recipes("train.clip") == {}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("lr", "train.lr"), ("train.lrr", "train.lr"), ("block_size", "block_diffusion.block_size"), ("trian", "train")],
)
def test_an_unknown_key_is_answered_with_the_one_meant(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"Did you mean '{meant}'"):
        explain(typed)


@pytest.mark.parametrize(
    "value", [None, True, "", "auto", "Answer: ", "true", "1e-4", 4e-4, 0.0, 1e-8, 10000.0, 3, [0.9, 0.95]]
)
def test_a_value_is_shown_as_yaml_that_reads_back(value: Any) -> None:
    assert parse_yaml(as_yaml(value), "test") == value


def test_the_keys_of_another_packages_job_are_described_by_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(base.JobOptions):
        classes: int = Field(2, description="labels to tell apart")
        silent: int = 1

    class Mine(base.Job):
        name = "mine"
        runtime = "nowhere:Nothing"
        Options: ClassVar[type[base.JobOptions]] = Own

        def costs(self, recipe: Any, rows: Any = None, micro: int = 1) -> Any:
            raise NotImplementedError

    monkeypatch.setattr(base, "_registered", {"mine": Mine()})
    assert sections()["mine"] == "options of `objective: mine`"
    assert [(key.name, key.text, key.default) for key in keys_in("mine")] == [
        ("mine.classes", "labels to tell apart", "2"),
        ("mine.silent", "", "1"),
    ]


# What needs no reason: what the recipe is, its shape by the description, and how often it reports.
OBVIOUS = re.compile(
    r"(objective|description|base|layers|d_model|heads|kv_heads|d_ff|vocab|rope_theta|tied|rope_scaling|every|samples"
    r"|tokens|steps|hours|epochs|global_batch|micro_batch|batch_base|warmup_steps|muon_lr|lr|lr_base|betas|precision"
    r"|weight_decay|schedule|min_lr_ratio|optimizer|log_every|words_weight|muon_momentum|ema|seq_len)\b"
)


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_recipe_says_why(name: str) -> None:
    """Each recipe explains its training choices; a key outside the usual ones always has a comment."""
    lines = shipped()[name].read_text(encoding="utf-8").splitlines()
    assert sum("# " in line for line in lines) >= 3
    for above, line in zip(["", *lines], lines, strict=False):
        key = re.match(r"\s*([a-z_0-9]+): (?!\{)", line)
        if key and not OBVIOUS.match(key[1]):
            assert "# " in line or above.lstrip().startswith("#"), line
