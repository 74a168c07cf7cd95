"""Published model families: from config.json to the recipe's model and back, and the names of their tensors.

A model that the decoder does not compute exactly is refused, and the error names the part that differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.cache import read_text
from redline.errors import UserError
from redline.planning.shapes import ROPE_SCALING, SHAPE_KEYS, DecoderShape, checked_rope_scaling
from redline.recipe.schema import Model

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SUPPORTED = f"Use one of {', '.join(FAMILIES)} (Llama, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3)."
# the values that transformers uses when config.json lacks a key
_CONTEXTS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_WINDOW = 4096
_EPS, _THETA = 1e-6, 10000.0
# More than any model has. A damaged or hostile config with larger numbers is refused before anything is allocated.
_MOST_LAYERS, _WIDEST = 10_000, 1 << 24


@dataclass(frozen=True)
class BaseConfig:
    """A base model as its config.json describes it."""

    architecture: str
    family: str
    model: dict[str, Any]  # recipe keys
    context: int
    window: int | None = None  # the sliding window of its attention, if it is shorter than its context


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json from a folder."""
    path = folder / "config.json"
    try:
        config = json.loads(read_text(path))
    except FileNotFoundError:
        fix = "Give a folder with config.json and *.safetensors, a .gguf file, or a hub id (owner/name)."
        raise UserError("is not a model: it has no config.json.", where=str(folder), fix=fix) from None
    except (OSError, ValueError, RecursionError) as error:
        fix = "Download or copy it again."
        raise UserError(f"cannot be read ({type(error).__name__}).", where=str(path), fix=fix) from None
    if not isinstance(config, dict):
        raise UserError("is not a JSON object.", where=str(path), fix="Download or copy it again.")
    return config


def parse_config(config: dict[str, Any], where: str) -> BaseConfig:
    """Return the recipe's model for a config.json; refuse a config that the decoder does not compute exactly."""
    architecture = _architecture(config, where)
    family = FAMILIES[architecture]
    if unsupported := _unsupported(config):
        raise UserError(" ".join(unsupported), where=where, fix="Use another base.")
    numbers = _Numbers(config, where)
    heads, d_model = numbers.whole("num_attention_heads"), numbers.whole("hidden_size")
    kv_heads = numbers.whole("num_key_value_heads", heads)
    context = numbers.whole("max_position_embeddings", _CONTEXTS[family], most=1 << 40)
    if heads % kv_heads:
        raise numbers.wrong("num_key_value_heads", f"{kv_heads} does not divide the {heads} heads")
    theta, scaling = _rotary(config, context, where)
    window = _window(config, family)
    model = {
        "layers": numbers.whole("num_hidden_layers", most=_MOST_LAYERS),
        "d_model": d_model,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": numbers.whole("head_dim", d_model // heads),
        "d_ff": numbers.whole("intermediate_size"),
        "vocab": numbers.whole("vocab_size"),
        "mlp": "swiglu",
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qk_norm": family == "qwen3",
        "qkv_bias": family == "qwen2",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": numbers.real("rms_norm_eps", _EPS),
    }
    limited = window if window is not None and window < context else None
    return BaseConfig(architecture, family, model, limited or context, limited)


def _architecture(config: dict[str, Any], where: str) -> str:
    named, kind = config.get("architectures"), config.get("model_type")
    names = [str(name) for name in named] if isinstance(named, list) else []
    if not names:  # old configs have a model_type only
        names = [name for name, family in FAMILIES.items() if family == kind] or [f"model of type {kind!r}"]
    if names[0] not in FAMILIES:
        what = f"is a {names[0]}, which redline's decoder does not support."
        raise UserError(what, where=where, fix=SUPPORTED)
    return names[0]


def _unsupported(config: dict[str, Any]) -> list[str]:
    """Return a sentence for each option of these families that the decoder does not support."""
    found = []
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        found.append(f"Its weights are quantised ({method}); redline needs them in full precision.")
    if config.get("attention_bias"):
        found.append("attention_bias is on: redline's decoder has no bias on attention's output.")
    if config.get("mlp_bias"):
        found.append("mlp_bias is on: redline's decoder has no biases in its feed-forward layers.")
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        found.append(f"hidden_act is {act}; redline's gated layers use silu.")
    kinds = config.get("layer_types")
    known = {"full_attention", "sliding_attention"}
    others = {str(kind) for kind in kinds} - known if isinstance(kinds, list) else ()
    if others:
        found.append(f"layer_types has {', '.join(sorted(others))}, which redline's decoder does not support.")
    return found


def _rotary(config: dict[str, Any], context: int, where: str) -> tuple[float, dict[str, Any] | None]:
    """Return theta and the scaling of rotary positions, from `rope_parameters` or the two keys of older releases."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        what = "its rotary positions differ from layer to layer, which redline's decoder does not support."
        raise UserError(what, where=where, fix="Use another base.")
    kind = given.get("rope_type", given.get("type", "default"))
    theta = _Numbers({**config, **given}, where).real("rope_theta", _THETA)
    if (share := given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) not in (None, 1, 1.0):
        what = f"partial_rotary_factor is {share}: redline's decoder rotates whole heads."
        raise UserError(what, where=where, fix="Use another base.")
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in ROPE_SCALING:
        what = f"its rotary positions are scaled by {kind!r}, which redline's decoder does not support."
        raise UserError(what, where=where, fix=f"Use a model without scaling, or with {' or '.join(ROPE_SCALING)}.")
    numbers = {"original_max_position_embeddings": context, **given}
    try:
        return theta, checked_rope_scaling(
            {"rope_type": kind, **{name: numbers[name] for name in ROPE_SCALING[kind] if name in numbers}}
        )
    except ValueError as error:
        raise UserError(f"rope_scaling: {error}", where=where, fix="Use the config.json it came with.") from None


def _window(config: dict[str, Any], family: str) -> int | None:
    """Return the sliding window of its attention, if any. Up to that many tokens full attention computes the same."""
    slides = {"llama": False, "mistral": True}.get(family, bool(config.get("use_sliding_window")))
    window = config.get("sliding_window", _WINDOW) if slides else None
    return window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None


@dataclass(frozen=True)
class _Numbers:
    """Checked access to the numbers of a config; null counts as absent."""

    config: dict[str, Any]
    where: str

    def whole(self, key: str, default: int | None = None, most: int = _WIDEST) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, f"{value!r} is not a whole number above 0")
        if value > most:
            raise self.wrong(key, f"is more than {most:,}")
        return value

    def real(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, f"{value!r} is not a number above 0")
        return float(value)

    def wrong(self, key: str, what: str) -> UserError:
        return UserError(f"{key}: {what}.", where=self.where, fix="Use the config.json it came with.")

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is None and default is None:
            raise self.wrong(key, "is missing")
        return default if value is None else value


# ----------------------------------------------------------------------------------------------------
# The decoder as transformers names it: Llama; with QK norm Qwen3; with biases on queries, keys and values Qwen2.
#
# All of them compute exactly what this decoder computes: pre-norm blocks, rotary pairs (i, i + K/2), SwiGLU. Only the
# names differ, and the matrices that are merged here (queries, keys and values; gate and up) are separate there.


LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
_TYPES = {LLAMA: "llama", QWEN2: "qwen2", QWEN3: "qwen3"}


def shape_of(model: Model) -> DecoderShape:
    """Return the shape of a resolved recipe's model."""
    return DecoderShape(**{key: getattr(model, key) for key in SHAPE_KEYS})


def architecture(model: Model) -> str:
    """Return the name of the transformers class that computes this model."""
    return QWEN3 if model.qk_norm else QWEN2 if model.qkv_bias else LLAMA


def to_config(model: Model, *, seq_len: int, eot: int, dtype: str) -> dict[str, Any]:
    """Return the content of config.json. Every release of transformers since 4 reads `rope_theta` and `torch_dtype`."""
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
    """Return the content of generation_config.json: the defaults of `redline sample`, and no padding tokens."""
    padding = list(range(vocab_size, model.vocab))
    sampling = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
    tokens = {"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}
    return {**sampling, **tokens, **({"suppress_tokens": padding} if padding else {})}


def tensor_names(shape: DecoderShape) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """Yield for each tensor of the decoder its name, the names of the published tensors that it merges, and their rows
    (empty if it is a single tensor).
    """
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
    """Return the decoder's tensors split and renamed as transformers has them."""
    found: dict[str, Tensor] = {}
    for ours, theirs, rows in tensor_names(shape):
        parts = tensors[ours].split(rows) if rows else (tensors[ours],)
        found |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    return found


def from_llama(tensors: dict[str, Tensor], shape: DecoderShape) -> dict[str, Tensor]:
    """Return transformers' tensors merged and renamed for the decoder. A KeyError names a missing tensor."""
    return {
        ours: torch.cat([tensors[name] for name in theirs]) if len(theirs) > 1 else tensors[theirs[0]]
        for ours, theirs, _ in tensor_names(shape)
    }
