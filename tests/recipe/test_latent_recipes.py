"""Recipes of latent prefixes: what they refuse, what they plan, and what the guide asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from redline.cli.main import app
from redline.errors import RecipeError
from redline.hardware.machine import named_gpu
from redline.jobs.base import costs, options_of
from redline.recipe.load import known_keys, load
from redline.recipe.resolve import DataFacts, resolve

NAME = "latent_prefix"
FACTS = DataFacts(257, 0, 0, "", "bytes", "", estimated=True)


def problems(*overrides: str) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        load("latentwire-squad", overrides)
    return {problem.key: problem.line() for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["model.base=null"], "model.base", "is missing"),
        (["model.lora.r=4"], "model.lora", NAME),
        (["model.dropout=0.1"], "model.dropout", NAME),
        (["data.tokenizer=gpt2"], "data.tokenizer", "reads bytes"),
        (["data.pack=true"], "data.pack", "padded"),
        (["data.stream=true", "train.epochs=null", "train.steps=1"], "data.stream", "text"),
        (["train.precision=fp8"], "train.precision", "fp8"),
        ([f"{NAME}.heads=7"], f"{NAME}.heads", "do not divide"),
        ([f"{NAME}.patch=3"], f"{NAME}.patch", "Use latent_prefix.bytes=2049"),
        (["data.seq_len=20"], "data.seq_len", "a prefix of 32"),
        ([f"{NAME}.only=5"], f"{NAME}.only", "0, 1"),
        (
            [f"{NAME}.fade_steps=5", f"{NAME}.kd_weight=0", f"{NAME}.match_weight=0", f"{NAME}.words_weight=0"],
            f"{NAME}.fade_steps",
            "kd_weight",
        ),
        ([f"{NAME}.others=[{{base: x, quant: int3}}]"], f"{NAME}.others", "none, nf4"),
        ([f"{NAME}.others=[{{base: x, shape: {{layers: 2}}}}]"], f"{NAME}.others", "d_model is missing"),
        ([f"{NAME}.others=[{{base: x, shape: {{layer: 2}}}}]"], f"{NAME}.others", "'layers'"),
        ([f"{NAME}.others=3"], f"{NAME}.others", "list of models"),
        ([f"{NAME}.slot=3"], f"{NAME}.slot", "slots"),
    ],
)
def test_invalid_combinations_are_refused(overrides: list[str], key: str, said: str) -> None:
    assert said in problems(*overrides)[key]


def test_only_this_job_reads_what_is_too_long() -> None:
    for recipe, fix in (("quickstart", "causal_lm"), ("qlora-smollm2", "finetune.overlong")):
        with pytest.raises(RecipeError, match=rf"data\.overlong: does nothing.*{fix}"):
            load(recipe, ["data.overlong=error"])
    assert load("latentwire-squad", ["data.overlong=error"]).recipe.data.overlong == "error"


def test_a_sequence_is_prefix_anchor_and_answer() -> None:
    def seq_len(*more: str) -> int:
        return int(load("latentwire-squad", ["data.seq_len=80", *more]).recipe.data.seq_len)

    assert seq_len() == 80
    from redline.jobs.latent_prefix.costs import LatentPrefixJob

    defaults = LatentPrefixJob().defaults

    assert defaults({})["data.seq_len"] == 32 + 64
    assert defaults({f"{NAME}.slots": "1k", f"{NAME}.private_slots": 4})["data.seq_len"] == 1000 + 4 + 64
    assert "data.seq_len" not in defaults({f"{NAME}.slots": "many"})


def test_the_guides_batch_and_schedule() -> None:
    recipe: Any = load("latentwire-squad").recipe
    assert (recipe.train.micro_batch, recipe.train.global_batch) == (4, 64)
    assert (recipe.train.lr, recipe.train.min_lr_ratio, recipe.train.clip) == (1e-4, 0.02, 1.0)
    assert (recipe.latent_prefix.d_z, recipe.latent_prefix.layers, recipe.latent_prefix.heads) == (256, 6, 8)
    assert [recipe.model.quant, *(one.quant for one in recipe.latent_prefix.others)] == ["nf4", "nf4"]


def test_it_is_planned_without_its_models() -> None:
    done = CliRunner().invoke(app, ["plan", "latentwire-squad", "--gpu", "h100", "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout.splitlines()[-1])
    assert 15e9 < plan["parameters"]["total"] < 16.5e9
    assert plan["parameters"]["trainable"] < 2e7
    assert 8 < plan["memory_gib"]["weights"] < 12, "two models of 7 to 8 billion weights in four bits"
    assert plan["memory_gib"]["peak"] < 80
    assert "N_wire" in plan["flops_per_token"]["formula"]


def test_costs_add_up() -> None:
    """Two models cost what they cost apart, and the encoder once."""
    both = load("latentwire-squad").recipe
    alone = load("latentwire-squad", [f"{NAME}.others=[]"]).recipe
    shape = resolve(both, named_gpu("h100"), FACTS).shape
    other = costs(both).shapes(shape)[1]
    flops = {name: costs(recipe).flops(shape, 80, "none").causal for name, recipe in (("both", both), ("one", alone))}
    second = costs(alone).flops(other, 80, "none").causal
    assert flops["both"] == pytest.approx(flops["one"] + second - costs(alone).prefix.flops() / 80)
    full = costs(both).flops(shape, 80, "full")
    assert full.computed > full.executed == flops["both"] < full.useful
    nf4, bf16 = (
        resolve(load("latentwire-squad", [f"model.quant={quant}"]).recipe, named_gpu("h100"), FACTS).memory.weights
        for quant in ("nf4", "none")
    )
    assert bf16 - nf4 > 9e9


def test_every_key_is_documented() -> None:
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs/keys.md").read_text(encoding="utf-8")
    assert all(f"`{NAME}.{key}`" in page for key in known_keys(options_of(NAME)))


def test_the_certain_cost_counts_the_prefix_and_one_token() -> None:
    """Batches are cut to their longest: only a speed beyond that is impossible for certain."""
    resolved = resolve(load("latentwire-squad", ["data.seq_len=80"]).recipe, named_gpu("h200"), FACTS)
    matmul, attention = costs(resolved.recipe).certain(resolved.shape)
    assert attention == 0.0
    slots = resolved.recipe.latent_prefix.slots
    assert 0 < matmul < (slots + 2 + 1) / 80, "the encoder and the head are not in it"
