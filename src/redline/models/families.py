"""What a published model's config.json means here. What the decoder does not compute exactly is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.cache import read_text
from redline.errors import UserError
from redline.plan.shapes import ROPE_SCALING, checked_rope_scaling

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
