"""Other spellings of recipe keys, each mapped to the one name that locks and docs use."""

from __future__ import annotations

from typing import Any

ALIASES: dict[str, str] = {
    "train.micro_batch_size": "train.micro_batch",
    "train.gradient_accumulation": "train.accumulation",
    "train.gradient_accumulation_steps": "train.accumulation",
    "train.learning_rate": "train.lr",
    "train.max_hours": "train.hours",
    "model.attn_backend": "model.attention",
    "model.gradient_checkpointing": "train.grad_checkpointing",
    "trainer.compile": "train.compile",
    "trainer.precision": "train.precision",
    "train.bf16": "train.precision",
    "loader.num_workers": "data.workers",
    "data.num_workers": "data.workers",
    "max_seq_len": "data.seq_len",
    "pack": "data.pack",
}
_PRECISION = {"bf16-mixed": "bf16", "16-mixed": "fp16", "32-true": "fp32", "32": "fp32", "bf16-true": "bf16"}
_ATTENTION = {"flash_attn": "flash", "flash_attention": "flash", "sdpa": "auto"}


def canonical(key: str, value: Any) -> tuple[str, Any]:
    """The canonical key, and the value in its language."""
    name = ALIASES.get(key, key)
    if key == "train.bf16":
        return name, "bf16" if value is True else "auto" if value is False else value
    if key == "trainer.precision":
        return name, _PRECISION.get(str(value), value)
    if key == "model.attn_backend":
        return name, _ATTENTION.get(str(value), value)
    return name, value
