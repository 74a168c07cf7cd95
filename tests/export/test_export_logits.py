"""transformers computes from an exported folder what the run's own model computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import UserError
from redline.export.folder import export_run
from redline.jobs.causal_lm.objective import CausalLMRuntime
from redline.models.families import from_llama, shape_of, to_llama

transformers = pytest.importorskip("transformers")

SHAPES = {
    "plain": ("model.qk_norm=false",),
    "grouped queries": ("model.qk_norm=false", "model.heads=4", "model.kv_heads=2"),
    "untied, another theta and eps": (
        "model.qk_norm=false",
        "model.tied=false",
        "model.rope_theta=500000",
        "model.norm_eps=1e-6",
    ),
    "wide heads": ("model.qk_norm=false", "model.heads=2", "model.head_dim=24", "model.kv_heads=1"),
    "normed queries and keys": ("model.qk_norm=true", "model.heads=4", "model.kv_heads=2", "model.tied=false"),
    "normed, heads that do not divide": ("model.qk_norm=true", "model.heads=3", "model.head_dim=10"),
}


def stir(trainer: Any) -> None:
    """Perturb all weights: norms are still one after two steps, and a missing norm would not show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.objective.model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES.keys())
def test_logits_are_equal(
    trained: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    from redline.kernels.attention import Bound
    from redline.training import trainer as training

    plain = training.Trainer.finish

    def finish(self: Any, reason: str) -> Any:
        stir(self)
        return plain(self, reason)

    monkeypatch.setattr(training.Trainer, "finish", finish)
    run, trainer = trained(*options)
    done = export_run(run, None, tmp_path / "out")
    assert done.architecture == ("Qwen3ForCausalLM" if "model.qk_norm=true" in options else "LlamaForCausalLM")

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == done.architecture
    assert model.dtype == torch.float32
    tokens = torch.randint(0, 257, (3, 32), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = trainer.objective.model.eval()
        expected = ours.logits(ours(tokens, Bound()))
        got = model(tokens).logits
    assert expected.std() > 0.5, "logits that are nearly alike would prove nothing"
    assert (got - expected).abs().max() < 1e-4


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_there_and_back(data: Any) -> None:
    from redline.kernels.attention import Attention, MaskSpec
    from redline.models.decoder import Decoder
    from redline.recipe.schema import Model

    kv_heads = data.draw(st.integers(1, 3))
    model = Model(
        layers=data.draw(st.integers(1, 3)),
        d_model=data.draw(st.integers(1, 9)),
        heads=kv_heads * data.draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * data.draw(st.integers(1, 4)),
        d_ff=data.draw(st.integers(1, 9)),
        vocab=data.draw(st.integers(1, 9)),
        tied=data.draw(st.booleans()),
        qk_norm=data.draw(st.booleans()),
    )
    shape = shape_of(model)
    decoder = Decoder(shape, attention=Attention("flash", MaskSpec(causal=True), "cpu"))
    ours = {name: torch.rand_like(parameter) for name, parameter in decoder.named_parameters()}
    theirs = to_llama(ours, shape)
    assert sum(tensor.numel() for tensor in theirs.values()) == shape.parameters
    back = from_llama(theirs, shape)
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.items())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("model.mlp=relu2",), "model.mlp: relu2 does not exist in transformers' Llama"),
        (("model.softcap=20",), "model.softcap: 20 does not exist in transformers' Llama"),
        (("model.value_embeddings=1",), "model.value_embeddings: 1 does not exist in transformers' Llama"),
        (("model.skips=unet",), "model.skips: unet does not exist in transformers' Llama"),
        (("model.qk_norm=false", "model.heads=3", "model.head_dim=10"), "model.heads: 3 does not divide"),
        (("model.mlp=relu2", "model.softcap=20"), "model.mlp=swiglu can be exported. model.softcap: 20"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_not_exact_is_refused_by_name(
    trained: Callable[..., Any], tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    run, _ = trained("train.steps=1", *options)
    with pytest.raises(UserError) as caught:
        export_run(run, None, tmp_path / "out")
    assert says in caught.value.message()
    assert caught.value.message().startswith(str(run))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["another shape", "one missing"])
def test_tensors_that_are_not_the_recipes_are_refused(trained: Callable[..., tuple[Path, Any]], change: str) -> None:
    _, trainer = trained(*SHAPES["plain"])
    tensors = dict(trainer.tensors()["model"])
    tensor = tensors.pop("blocks.1.mlp.up.weight")
    if change == "another shape":
        tensors["blocks.1.mlp.up.weight"] = tensor[1:]
    with pytest.raises(UserError, match=r"blocks.1.mlp.up.weight (is missing|has shape)"):
        CausalLMRuntime().export(trainer.resolved.recipe, tensors, eot=lambda: 256, vocab_size=257, dtype="fp32")
