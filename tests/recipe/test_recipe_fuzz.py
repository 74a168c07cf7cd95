"""Any input is either a valid recipe or a UserError."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import RecipeError, UsageError, UserError
from redline.hardware.machine import Machine
from redline.recipe.aliases import ALIASES
from redline.recipe.load import known_keys, load, parse_yaml, shipped
from redline.recipe.resolve import DataFacts, resolve
from redline.recipe.schema import Recipe

KEYS = [*known_keys(Recipe), *ALIASES, "causal_lm", "model", "train", "nothing", "train.steps.x"]
VALUES = [
    *("auto", "null", "true", "0", "-1", "1", "3", "7", "64", "1e-4", "1e400", "9" * 330, "nan", "1:30", "90s", "2k"),
    *("[]", "{}", "[0.9, 0.95]", "{a: 1}", "bf16", "fp16", "350m", "full", "muon", "wsd"),
    *("'", "&a", "*a", "!!x y", "\x00", "…"),
]
MACHINES = [
    Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11),
    Machine("cuda", "NVIDIA H200", 141 * 10**9, 16, (9, 0), fast_bf16=True),
    Machine("cuda", "Tesla V100", 1 << 30, 1, (7, 0)),
]
DATA = DataFacts(257, 100_000, 5_000, "data", "bytes", "tokenizer")
known = st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES) | st.text(max_size=8)).map("=".join)
words = st.lists(known | st.text(max_size=12), max_size=6)


BASE = {"layers": 2, "d_model": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "d_ff": 128, "vocab": 9999}


@settings(max_examples=500, deadline=None)
@given(name=st.sampled_from(list(shipped())), overrides=words)
def test_overrides(name: str, overrides: list[str]) -> None:
    with contextlib.suppress(RecipeError, UsageError):
        load(name, overrides)


@settings(max_examples=300, deadline=None)
@given(overrides=st.lists(known, max_size=3), machine=st.sampled_from(MACHINES))
def test_every_recipe_that_loads_can_be_planned(overrides: list[str], machine: Machine) -> None:
    with contextlib.suppress(UserError):
        recipe = load("quickstart", overrides).recipe
        if recipe.model.base is not None:  # the base fills in its shape before a recipe is resolved
            recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=BASE)})
        resolve(recipe, machine, DATA).plan_event()


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab:{}[],-&*!|>'\"\\#%@` \n\t0123.e"), max_size=60) | st.text(max_size=60))
def test_yaml(text: str) -> None:
    with contextlib.suppress(RecipeError):
        parse_yaml(text, "fuzz")


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=80))
def test_files(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)
    with contextlib.suppress(UserError):
        load(str(path))
