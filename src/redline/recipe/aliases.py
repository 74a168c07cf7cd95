"""Other spellings of recipe keys, each mapped to the one name that locks and docs use."""

from __future__ import annotations

from typing import Any

ALIASES: dict[str, str] = {
    "train.micro_batch_size": "train.micro_batch",
    "batch_size": "train.micro_batch",
    "train.gradient_accumulation": "train.accumulation",
    "train.gradient_accumulation_steps": "train.accumulation",
    "gradient_accumulation": "train.accumulation",
    "gradient_accumulation_steps": "train.accumulation",
    "early_stopping_patience": "eval.patience",
    "max_batch_memory_gb": "train.memory_gb",
    "train.learning_rate": "train.lr",
    "learning_rate": "train.lr",
    "train.max_hours": "train.hours",
    "max_hours": "train.hours",
    "model.attn_backend": "model.attention",
    "attn_implementation": "model.attention",
    "use_flash_attn": "model.attention",
    "use_flash_attention": "model.attention",
    "model.gradient_checkpointing": "train.grad_checkpointing",
    "trainer.compile": "train.compile",
    "compile_model": "train.compile",
    "trainer.precision": "train.precision",
    "mixed_precision": "train.precision",
    "train.bf16": "train.precision",
    "loader.num_workers": "data.workers",
    "data.num_workers": "data.workers",
    "num_workers": "data.workers",
    "max_seq_len": "data.seq_len",
    "pack": "data.pack",
    **{f"lora.{key}": f"model.lora.{key}" for key in ("r", "alpha", "dropout", "target_modules", "rslora")},
    "bnb_4bit.quant_type": "model.quant",
    "bnb_4bit.use_double_quant": "model.quant_double",
    "bnb_4bit.compute_dtype": "train.precision",
}
_PRECISION = {
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "32-true": "fp32",
    "32": "fp32",
    "no": "fp32",
    "False": "fp32",  # how YAML reads `no`
}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ATTENTION = {"flash_attn": "flash", "flash_attention": "flash", "flash_attention_2": "flash", "sdpa": "auto"}
# the key of the diffusion jobs, whose mask no flash attention takes: the fastest that does is meant
_BLOCK_ATTENTION = {**_ATTENTION, "flash_attn": "auto"}
_SWITCHES = {
    "train.bf16": {True: "bf16", False: "auto"},
    # the guides fall back where flash attention is missing: that is auto, which takes the fastest that is there
    "use_flash_attn": {True: "auto", False: "dense"},
    "use_flash_attention": {True: "auto", False: "dense"},
}
_WORDS = {
    "trainer.precision": _PRECISION,
    "mixed_precision": _PRECISION,
    "bnb_4bit.compute_dtype": _DTYPES,
    "model.attn_backend": _BLOCK_ATTENTION,
    "attn_implementation": _ATTENTION,
}


def canonical(key: str, value: Any) -> tuple[str, Any]:
    """The canonical key, and the value in its language."""
    name = ALIASES.get(key, key)
    if key in _SWITCHES and isinstance(value, bool):
        return name, _SWITCHES[key][value]
    return name, _WORDS.get(key, {}).get(str(value), value)
