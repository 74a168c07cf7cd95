"""Fine-tuning recipes: invalid combinations are refused, valid ones accepted."""

from __future__ import annotations

import pytest

from redline.errors import RecipeError
from redline.recipe.load import load, validate


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["model.base=null"], "model.base", "is missing"),
        (["model.quant=none"], "model.quant", "does not go with finetune.method=qlora"),
        (["finetune.method=lora", "model.quant=nf4"], "model.quant", "does not go with finetune.method=lora"),
        (["data.tokenizer=gpt2"], "data.tokenizer", "tokenizer of its base"),
        (["finetune.method=full", "model.lora.r=4"], "model.lora", "does nothing with finetune.method=full"),
        (["data.stream=true"], "data.stream", "objective=finetune"),
        (["model.mlp=relu2"], "model.mlp", "no base has relu2"),
        *(
            ([f"train.{rate}=3e-3"], f"train.{rate}", "finetune.method")
            for rate in ("embedding_lr", "head_lr", "scalar_lr")
        ),
    ],
)
def test_invalid_combinations_are_refused(overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load("qlora-smollm2", ["model.base=there", *overrides])
    assert [problem.key for problem in refused.value.problems] == [key]
    assert said in refused.value.problems[0].what


@pytest.mark.parametrize("overrides", [["train.lr=3e-3"], ["finetune.method=full", "model.lora=null"]])
def test_a_learning_rate_with_an_effect_is_accepted(overrides: list[str]) -> None:
    """One that says what holds anyway is in every lock; where all of a model learns, so do its embeddings."""
    recipe = load("qlora-smollm2", ["model.base=there", "train.embedding_lr=3e-3", *overrides]).recipe
    assert recipe.train.embedding_lr == 3e-3


def test_a_lock_of_an_older_version_may_say_stream() -> None:
    """Older versions accepted the key without using it; such a run still resumes."""
    recipe = load("qlora-smollm2", ["model.base=there"]).recipe
    tree = recipe.model_dump(mode="json")
    tree["data"]["stream"] = True
    assert validate(tree, where="lock").data.stream
