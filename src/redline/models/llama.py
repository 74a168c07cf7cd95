"""The decoder under the names that transformers gives it: Llama; Qwen3 with normed queries and keys, Qwen2 with biases.

All are this decoder exactly: pre-norm blocks, rotary pairs (i, i + K/2), SwiGLU. Only the names differ, and what is
stored merged here (queries, keys and values; gate and up) lies apart there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from redline.errors import Problem
from redline.plan.shapes import SHAPE_KEYS, DecoderShape
from redline.recipe.schema import Model

LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
_TYPES = {LLAMA: "llama", QWEN2: "qwen2", QWEN3: "qwen3"}


def shape_of(model: Model) -> DecoderShape:
    """The shape of a resolved recipe's model."""
    return DecoderShape(**{key: getattr(model, key) for key in SHAPE_KEYS})


def inexact(model: Model) -> list[Problem]:
    """What no class computes."""
    problems = []
    if model.mlp != "swiglu":
        fix = "Only model.mlp=swiglu can be exported."
        problems.append(Problem("model.mlp", f"{model.mlp} has no place in transformers' Llama, which is gated.", fix))
    if model.softcap is not None:
        what = f"{model.softcap:g} has no place in transformers' Llama, which leaves its logits as they are."
        problems.append(Problem("model.softcap", what, "Only model.softcap=null can be exported."))
    for key, idle in {"value_embeddings": 0, "skips": "none"}.items():
        if (value := getattr(model, key)) != idle:
            what = f"{value} has no place in transformers' Llama, which knows no such part."
            problems.append(Problem(f"model.{key}", what, f"Only model.{key}={idle} can be exported."))
    if model.qkv_bias and model.qk_norm:
        what = "true has no place beside model.qk_norm: Qwen2 has biases, Qwen3 has norms."
        problems.append(Problem("model.qkv_bias", what, "Only one of the two can be exported."))
    if not model.qk_norm and model.d_model % model.heads:
        what = f"{model.heads} does not divide model.d_model {model.d_model}, which transformers' Llama demands."
        problems.append(Problem("model.heads", what, "Only a width that is a multiple of the heads can be exported."))
    return problems


def architecture(model: Model) -> str:
    return QWEN3 if model.qk_norm else QWEN2 if model.qkv_bias else LLAMA


def to_config(model: Model, *, seq_len: int, eot: int, dtype: str) -> dict[str, Any]:
    """config.json. `rope_theta` and `torch_dtype` are what every release of transformers from 4 on reads."""
    return {
        "architectures": [architecture(model)],
        "model_type": _TYPES[architecture(model)],
        "vocab_size": model.vocab,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": seq_len,
        "rope_theta": model.rope_theta,
        **({"rope_scaling": model.rope_scaling} if model.rope_scaling else {}),
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def to_generation(model: Model, *, eot: int, vocab_size: int) -> dict[str, Any]:
    """generation_config.json: as `redline sample` writes, and never an entry that only pads the vocabulary."""
    padding = list(range(vocab_size, model.vocab))
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
    tokens = {"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}
    return {**sampling, **tokens, **({"suppress_tokens": padding} if padding else {})}


def names(shape: DecoderShape) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """Each tensor here, those it is there, and how many rows each of them has."""
    kv, whole = shape.d_kv, ()
    yield "embedding.weight", ("model.embed_tokens.weight",), whole
    for layer in range(shape.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        heads, rows = tuple(f"{theirs}.self_attn.{name}_proj" for name in "qkv"), (shape.d_attention, kv, kv)
        yield f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",), whole
        yield f"{ours}.attention.qkv.weight", tuple(f"{head}.weight" for head in heads), rows
        if shape.qkv_bias:
            yield f"{ours}.attention.qkv.bias", tuple(f"{head}.bias" for head in heads), rows
        yield f"{ours}.attention.out.weight", (f"{theirs}.self_attn.o_proj.weight",), whole
        for norm in ("q_norm", "k_norm") if shape.qk_norm else ():
            yield f"{ours}.attention.{norm}.weight", (f"{theirs}.self_attn.{norm}.weight",), whole
        up = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        yield f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",), whole
        yield f"{ours}.mlp.up.weight", up, (shape.d_ff, shape.d_ff)
        yield f"{ours}.mlp.down.weight", (f"{theirs}.mlp.down_proj.weight",), whole
    yield "norm.weight", ("model.norm.weight",), whole
    if not shape.tied:
        yield "head.weight", ("lm_head.weight",), whole


def to_llama(tensors: dict[str, Tensor], shape: DecoderShape) -> dict[str, Tensor]:
    """Our tensors, apart and renamed."""
    found: dict[str, Tensor] = {}
    for ours, theirs, rows in names(shape):
        parts = tensors[ours].split(rows) if rows else (tensors[ours],)
        found |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    return found


def from_llama(tensors: dict[str, Tensor], shape: DecoderShape) -> dict[str, Tensor]:
    """The way back; a KeyError names what is missing."""
    return {
        ours: torch.cat([tensors[name] for name in theirs]) if len(theirs) > 1 else tensors[theirs[0]]
        for ours, theirs, _ in names(shape)
    }
