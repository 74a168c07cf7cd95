"""What a published model's config.json means here. What the decoder does not compute exactly is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.cache import read_text
from redline.errors import Problem, UserError
from redline.planning.shapes import ROPE_SCALING, SHAPE_KEYS, DecoderShape, checked_rope_scaling
from redline.recipe.schema import Model

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
THOSE_THAT_WORK = f"Those that work: {', '.join(FAMILIES)} (Llama, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3)."
# what transformers takes for a key that is absent
_CONTEXTS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_WINDOW = 4096
_EPS, _THETA = 1e-6, 10000.0
# More than any model has: beyond them the decoder could not even be described, let alone built.
_MOST_LAYERS, _WIDEST = 10_000, 1 << 24


@dataclass(frozen=True)
class Described:
    """A base by its config alone."""

    architecture: str
    family: str
    model: dict[str, Any]  # recipe keys
    context: int
    window: int | None = None  # attention looked no further back than this, and `context` is no longer


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(read_text(path))
    except FileNotFoundError:
        fix = "Give a folder with config.json and *.safetensors, a .gguf file, or a hub id (owner/name)."
        raise UserError("is no model: it has no config.json.", where=str(folder), fix=fix) from None
    except (OSError, ValueError, RecursionError) as error:
        fix = "Download or copy it again."
        raise UserError(f"cannot be read ({type(error).__name__}).", where=str(path), fix=fix) from None
    if not isinstance(config, dict):
        raise UserError("holds no keys.", where=str(path), fix="Download or copy it again.")
    return config


def describe(config: dict[str, Any], where: str) -> Described:
    """The recipe's model that computes what such a config stands for."""
    architecture = _architecture(config, where)
    family = FAMILIES[architecture]
    if refused := _refused(config):
        raise UserError(" ".join(refused), where=where, fix="Use another base.")
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
    return Described(architecture, family, model, limited or context, limited)


def _architecture(config: dict[str, Any], where: str) -> str:
    named, kind = config.get("architectures"), config.get("model_type")
    names = [str(name) for name in named] if isinstance(named, list) else []
    if not names:  # an old config may say only the type
        names = [name for name, family in FAMILIES.items() if family == kind] or [f"model of type {kind!r}"]
    if names[0] not in FAMILIES:
        what = f"is a {names[0]}, which redline's decoder does not compute."
        raise UserError(what, where=where, fix=THOSE_THAT_WORK)
    return names[0]


def _refused(config: dict[str, Any]) -> list[str]:
    """What these families may have and the decoder has not."""
    found = []
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        found.append(f"Its weights are quantised ({method}); redline quantises by itself and wants them whole.")
    if config.get("attention_bias"):
        found.append("attention_bias is on: it has a bias on attention's output, which redline's decoder has not.")
    if config.get("mlp_bias"):
        found.append("mlp_bias is on: it has biases in its feed-forward layers, which redline's decoder has not.")
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        found.append(f"hidden_act is {act}; redline's gated layers compute silu.")
    kinds = config.get("layer_types")
    strange = {str(kind) for kind in kinds} - {"full_attention", "sliding_attention"} if isinstance(kinds, list) else ()
    if strange:
        found.append(f"layer_types has {', '.join(sorted(strange))}, which redline's decoder does not compute.")
    return found


def _rotary(config: dict[str, Any], context: int, where: str) -> tuple[float, dict[str, Any] | None]:
    """theta and the scaling, from `rope_parameters` or, as older releases wrote them, two keys of their own."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        what = "its rotary positions differ from layer to layer, which redline's decoder does not compute."
        raise UserError(what, where=where, fix="Use another base.")
    kind = given.get("rope_type", given.get("type", "default"))
    theta = _Numbers({**config, **given}, where).real("rope_theta", _THETA)
    if (share := given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) not in (None, 1, 1.0):
        what = f"partial_rotary_factor is {share}: redline's decoder turns whole heads."
        raise UserError(what, where=where, fix="Use another base.")
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in ROPE_SCALING:
        what = f"its rotary positions are scaled by {kind!r}, which redline's decoder does not compute."
        raise UserError(what, where=where, fix=f"Those that work: none, {', '.join(ROPE_SCALING)}.")
    numbers = {"original_max_position_embeddings": context, **given}
    try:
        return theta, checked_rope_scaling(
            {"rope_type": kind, **{name: numbers[name] for name in ROPE_SCALING[kind] if name in numbers}}
        )
    except ValueError as error:
        raise UserError(f"rope_scaling: {error}", where=where, fix="Use the config.json it came with.") from None


def _window(config: dict[str, Any], family: str) -> int | None:
    """How far back its attention looked. Up to that many tokens, looking at all of them is the same."""
    slides = {"llama": False, "mistral": True}.get(family, bool(config.get("use_sliding_window")))
    window = config.get("sliding_window", _WINDOW) if slides else None
    return window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None


@dataclass(frozen=True)
class _Numbers:
    """Numbers of a config; absent and null are the same."""

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
# The decoder under the names that transformers gives it: Llama; Qwen3 with normed queries and keys, Qwen2 with biases.
#
# All are this decoder exactly: pre-norm blocks, rotary pairs (i, i + K/2), SwiGLU. Only the names differ, and what is
# stored merged here (queries, keys and values; gate and up) lies apart there.


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
