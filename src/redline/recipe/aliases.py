"""Other spellings of recipe keys: those of the guides and of other trainers.

Each maps to the one name that lock files and docs use. Recipes and overrides may use both; a note tells the user the
canonical key.
"""

from __future__ import annotations

from typing import Any

from redline.errors import Problem

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

# Values that are spelt differently as well, by alias.
_PRECISION = {
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "16-mixed": "fp16",
    "32-true": "fp32",
    "32": "fp32",
    "no": "fp32",
    "False": "fp32",  # YAML reads an unquoted `no` as false
}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_ATTENTION = {"flash_attn": "flash", "flash_attention": "flash", "flash_attention_2": "flash", "sdpa": "auto"}
_VALUES = {
    "trainer.precision": _PRECISION,
    "mixed_precision": _PRECISION,
    "bnb_4bit.compute_dtype": _DTYPES,
    # The diffusion guides write flash_attn here, but flash attention cannot take a block-diffusion mask: use the
    # fastest backend that can.
    "model.attn_backend": {**_ATTENTION, "flash_attn": "auto"},
    "attn_implementation": _ATTENTION,
}
_FLAGS = {
    "train.bf16": {True: "bf16", False: "auto"},
    # The guides' scripts fall back where flash attention is not installed. `auto` does the same: it takes the fastest
    # backend that works.
    "use_flash_attn": {True: "auto", False: "dense"},
    "use_flash_attention": {True: "auto", False: "dense"},
}


def canonical(key: str, value: Any) -> tuple[str, Any]:
    """Return the canonical key and the value as that key spells it."""
    name = ALIASES.get(key, key)
    if key in _FLAGS and isinstance(value, bool):
        return name, _FLAGS[key][value]
    return name, _VALUES.get(key, {}).get(str(value), value)


def canonical_keys(flat: dict[str, Any], origin: str) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """Rename the keys of `flat` to their canonical names.

    Also return a note for every alias, and a problem for every key that is given under two names with different values.
    `origin` says where the keys come from ("file", "command line").
    """
    renamed: dict[str, Any] = {}
    notes, problems = [], []
    for key, value in flat.items():
        name, value = canonical(key, value)
        if name in renamed and renamed[name] != value:
            what = f"and another spelling of {name} are both given in the {origin}, with different values."
            problems.append(Problem(key, what, f"Give {name} only."))
        if name != key:
            notes.append(f"{key} is an alias of {name}")
        renamed[name] = value
    return renamed, notes, problems
