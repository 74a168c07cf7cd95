"""A recipe loads, or all its problems are reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redline.errors import EXIT_USAGE, RecipeError, UsageError
from redline.fields import AUTO
from redline.recipe.load import load, shipped
from redline.recipe.schema import Model


def problems(name: str, *overrides: str) -> dict[str, str]:
    with pytest.raises(RecipeError) as caught:
        load(name, overrides)
    assert caught.value.exit_code == EXIT_USAGE
    return {p.key: p.line() for p in caught.value.problems}


def written(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_every_error_at_once_with_its_key_and_a_suggestion() -> None:
    found = problems(
        "quickstart", "train.stepz=3", "train.lr=abc", "model.layers=0", "train.optimizer=adamww", "data.pack=2"
    )
    assert set(found) == {"train.stepz", "train.lr", "model.layers", "train.optimizer", "data.pack"}
    assert "Did you mean 'train.steps'?" in found["train.stepz"]
    assert "Did you mean 'adamw'?" in found["train.optimizer"]
    assert "'abc' is not a number (or auto)" in found["train.lr"]
    assert "at least 1" in found["model.layers"]
    assert "true or false" in found["data.pack"]


def test_the_message_names_the_recipe_and_counts_the_problems() -> None:
    with pytest.raises(RecipeError) as caught:
        load("quickstart", ["train.stepz=3", "train.lr=abc"])
    assert caught.value.message().splitlines()[0] == "quickstart: 2 problems"
    with pytest.raises(RecipeError) as caught:
        load("quickstart", ["train.lr=abc"])
    assert caught.value.message().startswith("quickstart: train.lr: ")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optimizer=adamw", "train.optimizer"),
        ("train.seq_len=64", "data.seq_len"),
        ("model.steps=3", "train.steps"),
        ("train.globl_batch=8", "train.global_batch"),
        ("trian.steps=8", "train"),
        ("max_seq_ln=64", "max_seq_len"),
    ],
)
def test_the_intended_key_is_suggested(override: str, meant: str) -> None:
    (line,) = problems("quickstart", override).values()
    assert f"Did you mean '{meant}" in line


def test_an_unknown_key_without_a_similar_one_gets_the_list() -> None:
    (line,) = problems("quickstart", "checkpoint.zzzzzz=1").values()
    assert "every, keep, best, mirror." in line
    (line,) = problems("quickstart", "zzzzzz=1").values()
    assert "model, data, train" in line


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.lr=abc", "'abc' is not a number"),
        ("train.lr=0", "above 0"),
        ("train.lr=-1e-3", "above 0"),
        ("train.lr=nan", "not a number"),
        ("train.lr=1e999", "not a finite number"),
        ("train.steps=-3", "at least 1"),
        ("train.steps=-3k", "at least 1"),
        ("train.steps=1.5", "not a whole number"),
        ("train.steps=yes", "not a count"),
        ("train.steps=[1]", "not a whole number"),
        ("train.steps=" + "9" * 400, "too large"),
        ("train.hours=-2", "above 0"),
        ("train.hours=0", "above 0"),
        ("train.hours=1:30", "not a duration"),
        ("train.hours=.nan", "not a duration"),
        ("train.hours=1e999", "not a finite number"),
        ("train.hours=" + "9" * 400, "not a finite number"),
        ("train.seed=1e30", "too large"),
        ("train.global_batch=1e15", "too large"),
        ("train.decay_fraction=1.5", "at most 1"),
        ("train.memory_fraction=0", "above 0"),
        ("train.pct_start=1.5", "at most 1"),
        ("train.pct_start=0.3", "does nothing with train.schedule=wsd"),
        ("train.cycle_momentum=[0.85, 0.95]", "does nothing with train.schedule=wsd"),
        ("train.cycle_momentum=0.9", "two numbers"),
        ("train.cycle_momentum=[0.95, 0.85]", "not in order"),
        ("train.betas=0.9", "two numbers"),
        ("train.betas=[0.9, 1]", "two numbers"),
        ("train.betas=[false, 0.9]", "two numbers"),
        ("data.val_fraction=1", "at most 0.999"),
        ("data.source=", "is empty"),
        ("data.source=5", "in quotes"),
        ("data.pack=maybe", "true or false"),
        ("eval.prompt=5", "in quotes"),
        ("objective=finetuning", "not one of"),
        ("train=fast", "is a section of keys, not 'fast'"),
        ("train.steps.each=3", "not a whole number"),
    ],
)
def test_a_wrong_value_is_refused(override: str, says: str) -> None:
    (line,) = problems("quickstart", override).values()
    assert says in line


def value_of(key: str, *overrides: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(load("quickstart", overrides).recipe, section), name)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.lr", "1e-4", 1e-4),
        ("train.lr", "5E-3", 5e-3),
        ("train.lr", ".5", 0.5),
        ("train.lr", "auto", "auto"),
        ("train.steps", "1e4", 10_000),
        ("train.steps", "512k", 512_000),
        ("train.steps", "010", 10),
        ("train.steps", "1_000", 1000),
        ("train.tokens", "1.5B", 1_500_000_000),
        ("train.tokens", "0.017T", 17_000_000_000),
        ("train.hours", "90s", 0.025),
        ("train.hours", "90m", 1.5),
        ("train.hours", "2", 2.0),
        ("train.hours", "1.5h", 1.5),
        ("train.hours", "1d", 24.0),
        ("train.clip", "null", None),
        ("train.grad_checkpointing", "true", "full"),
        ("train.grad_checkpointing", "false", "none"),
        ("train.betas", "[0.8, 0.99]", (0.8, 0.99)),
        ("data.pack", "false", False),
        ("eval.prompt", "def ", "def "),
        ("eval.prompt", "a: b: [", "a: b: ["),
        ("eval.prompt", '"5"', "5"),
        ("eval.prompt", "", ""),
    ],
)
def test_values_as_people_write_them(key: str, text: str, value: Any) -> None:
    got = value_of(key, f"{key}={text}")
    assert got == value
    assert type(got) is type(value)


def test_a_plus_before_the_key_changes_nothing() -> None:
    assert value_of("train.steps", "+train.steps=7") == 7


def test_a_whole_section_can_be_overridden() -> None:
    recipe = load("quickstart", ["eval={every: 3, samples: 0}"]).recipe
    assert (recipe.eval.every, recipe.eval.samples, recipe.eval.prompt) == (3, 0, "def ")


@pytest.mark.parametrize("word", ["=3", "+=3", "train.steps"])
def test_an_override_without_key_or_value(word: str) -> None:
    assert "is not key=value." in problems("quickstart", word)[word]


def test_numbers_in_files(tmp_path: Path) -> None:
    recipe = load(written(tmp_path, "model: {size: 1m}\ntrain: {lr: 1e-4, steps: 1e3, hours: 90s}")).recipe
    assert (recipe.train.lr, recipe.train.steps, recipe.train.hours) == (1e-4, 1000, 0.025)


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "objective: causal_lm\ntrain:\n  steps: 3\n  lr: 1e-3\n  steps: 4\n")
    (line,) = problems(path).values()
    assert line.startswith("line 5: ")
    assert "'steps'" in line
    assert "lines 3 and 5" in line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("train: [1, 2\nmodel: 3", "line 2"),
        ("train:\n\tsteps: 3", "line 2"),
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- train\n- model\n", "holds a list"),
        ("just words", "holds a str"),
        ("1: 2", "the key 1"),
        ("model: &m {size: 1m}\ntrain: *m", "references"),
        (b"\x7fELF\x00\x01\xff\xfe\x80", "cannot be read"),
        (b"\x00\x01\x02", "not YAML"),
        ("!!python/object/apply:os.system ['true']", "tags"),
        ("[" * 5000, "levels"),
    ],
)
def test_a_file_that_is_not_a_recipe(tmp_path: Path, content: str | bytes, says: str) -> None:
    (line,) = problems(written(tmp_path, content)).values()
    assert says in line


def test_names_of_recipes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean 'quickstart'"):
        load("quickstrat")
    with pytest.raises(UsageError, match=r"no recipe file './nothing.yaml'.*redline recipes"):
        load("./nothing.yaml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load(written(tmp_path, b"\xff\xfe\xff"))


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (("model.size=null",), "model.layers", "is missing"),
        (("model.size=350m", "model.heads=7"), "model.heads", "does not divide"),
        (("model.size=350m", "model.kv_heads=5"), "model.kv_heads", "does not divide"),
        (("model.d_model=96",), "model.heads", "is missing beside model.d_model"),
        (("model.heads=4",), "model.d_model", "is missing beside model.heads"),
        (("model.kv_heads=2",), "model.heads", "is missing beside model.kv_heads"),
        (("model.d_model=90", "model.heads=6"), "model.head_dim", "odd"),
        (("model.head_dim=33",), "model.head_dim", "odd"),
        (("model.layers=1", "model.skips=unet"), "model.skips", "does nothing"),
        (("train.hours=null", "train.epochs=null"), "train.steps", "train.hours"),
        (("train.global_batch=32", "train.micro_batch=5"), "train.micro_batch", "divisor"),
        (("train.global_batch=33", "train.micro_batch=4", "train.accumulation=4"), "train.global_batch", "any two"),
    ],
)
def test_contradictions(overrides: tuple[str, ...], key: str, says: str) -> None:
    assert says in problems("quickstart", *overrides)[key]


@pytest.mark.parametrize("key", ["softcap=15", "init=zero", "embedding_std=0.1", "skips=x0", "value_embeddings=1"])
def test_model_keys_that_do_not_apply_to_a_base(key: str) -> None:
    assert "model.base" in problems("qlora-8b", f"model.{key}")[f"model.{key.partition('=')[0]}"]


def test_a_head_lr_is_accepted_for_a_base_whose_head_may_be_untied() -> None:
    all_of_it = ("finetune.method=full", "model.lora=null", "train.head_lr=1e-3")
    assert load("qlora-8b", all_of_it).recipe.train.head_lr == 1e-3
    assert "does nothing" in problems("pretrain-350m", "train.head_lr=1e-3")["train.head_lr"]


def test_a_size_beside_another_shape_is_refused() -> None:
    refused = problems("pretrain-350m", "model.size=1.3b")["model.size"]
    assert "does nothing" in refused
    words = refused.split("Add ")[1].split(",")[0].split()
    assert load("pretrain-350m", ["model.size=1.3b", *words]).recipe.model.layers == AUTO
    assert load("pretrain-350m", ["model.size=350m"]).recipe.model.layers == 24, "the size that the recipe states"


# --- another base than the recipe's


@pytest.mark.parametrize("name", sorted(shipped()))
def test_another_base_replaces_what_a_shipped_recipe_says_of_its_model(name: str) -> None:
    loaded = load(name, ["model.base=./other"])
    model, fields = loaded.recipe.model, Model.model_fields
    kept = {key for key in fields if getattr(model, key) != fields[key].default}
    assert kept <= {"base", "quant", "quant_double", "lora", "attention", "kernels", "dropout"}
    expected = "bytes" if loaded.recipe.objective == "latent_prefix" else "base"
    assert loaded.recipe.data.tokenizer == expected
    assert [note for note in loaded.notes if note.startswith("model.base=./other replaces the recipe's own model.")]


def test_the_shape_beside_the_recipes_own_base_stays() -> None:
    own = load("qlora-8b").recipe
    again = load("qlora-8b", [f"model.base={own.model.base}"])
    assert again.recipe.model == own.model
    assert not again.notes


def test_a_typed_shape_stays_beside_a_typed_base() -> None:
    loaded = load("pretrain-350m", ["model.base=./other", "model.layers=3", "data.tokenizer=gpt2"])
    assert (loaded.recipe.model.layers, loaded.recipe.data.tokenizer) == (3, "gpt2")
    assert "model.layers" not in loaded.notes[0]
    assert "data.tokenizer" not in loaded.notes[0]
