"""Tiny runs as `redline train` leaves them, and helpers that load their exports with transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# what transformers is to make of them; every part matters in one of them
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_theta": 500000.0}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "rms_norm_eps": 1e-6}),
    "qwen2": ("Qwen2", {"rope_theta": 1000000.0}),
    "qwen3": ("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
}
SIZES = {
    "vocab_size": 330,  # more than the tokenizer has
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}


@pytest.fixture
def trained(world: Any, tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Return a function that trains for two steps, and gives the run's directory and the trainer."""
    from redline.recipe.lock import make_lock, write_lock

    def train(*overrides: str, name: str = "run") -> tuple[Path, Any]:
        run = tmp_path / name
        trainer = world.run(run, "train.steps=2", *overrides)
        trainer.objective.save_tokenizer(run)
        write_lock(run, make_lock("tiny", "0123", trainer.resolved, trainer.objective.data.facts))
        return run, trainer

    return train


@pytest.fixture
def base_of(tiny_base: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write a random base of a model family, with a tokenizer."""

    def make(family: str, name: str = "base", dtype: torch.dtype = torch.float32, seed: int = 1) -> Path:
        import transformers

        kind, options = FAMILIES[family]
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        folder = tmp_path / name
        model.to(dtype).save_pretrained(folder)
        for file in tiny_base.iterdir():
            if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
                shutil.copy(file, folder)
        return folder

    return make


@pytest.fixture
def tuned(world: Any, answers: Path, tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Return a function that fine-tunes a base for a few steps, and gives the directory and the trainer."""
    from finetuning import Tuning
    from redline.recipe.lock import make_lock, write_lock

    def tune(base: Path, *overrides: str, name: str = "run") -> tuple[Path, Any]:
        trainer = Tuning(world, base, answers, tmp_path).run(tmp_path / name, "train.steps=3", *overrides)
        write_lock(tmp_path / name, make_lock("tune", "0123", trainer.resolved, trainer.objective.data.facts))
        return tmp_path / name, trainer

    return tune


@pytest.fixture
def logits() -> Callable[..., torch.Tensor]:
    """Return the logits of a trainer's model or of a transformers model for the same tokens."""
    from redline.kernels.attention import Bound

    def compute(model: Any) -> torch.Tensor:
        tokens = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(2))
        ours = hasattr(model, "objective")
        decoder = (model.objective.model if ours else model).eval()
        with torch.no_grad():
            if not ours:
                logits: torch.Tensor = decoder(tokens).logits
                return logits
            return decoder.logits(decoder(tokens, Bound()))  # type: ignore[no-any-return]

    return compute
