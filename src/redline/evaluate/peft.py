"""An adapter's folder in PEFT's layout, read and checked: what is in it, and which base it is for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from redline.cache import check_regular, read_text
from redline.errors import UserError
from redline.export.adapter import ADAPTER, ADAPTER_CONFIG
from redline.export.folder import ORIGIN
from redline.plan.adapters import TARGETS

_WEIGHTS = f"{ADAPTER}.safetensors"
_NAME = re.compile(r"base_model\.model\.model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+)\.lora_[AB]\.weight")
# What PEFT can add to plain LoRA, or do to the base itself, and redline does not compute.
_MORE = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "layers_to_transform",
    "fan_in_fan_out",
)
_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")  # the others change the base
_AGAIN = "Export or copy it again."


@dataclass(frozen=True)
class AdapterFolder:
    folder: Path
    bases: tuple[str, ...]  # where its base is said to lie
    fingerprint: str | None  # of the base
    quant: str  # how the base was quantised in training
    quant_double: bool
    lora: dict[str, Any]  # recipe keys
    template: str | None
    tensors: dict[str, Tensor]  # under PEFT's names


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter(folder: Path) -> AdapterFolder:
    config, origin = _json(folder / ADAPTER_CONFIG), _json(folder / ORIGIN) if (folder / ORIGIN).is_file() else {}
    _refuse_more(config, folder / ADAPTER_CONFIG)
    tensors = _tensors(folder)
    recorded, quantised = _section(origin, "base"), _section(origin, "quantisation")
    places = (recorded.get("source"), recorded.get("loads_from"), config.get("base_model_name_or_path"))
    template = folder / "chat_template.jinja"  # the one it was trained with
    return AdapterFolder(
        folder=folder,
        bases=tuple(dict.fromkeys(str(place) for place in places if place)),
        fingerprint=recorded.get("fingerprint"),
        quant=str(quantised.get("type", "none")),
        quant_double=bool(quantised.get("double", True)),
        lora={
            "r": config.get("r", 8),
            "alpha": config.get("lora_alpha", 8),
            "target_modules": _targets(tensors, folder),
            "rslora": config.get("use_rslora", False),
        },
        template=str(template) if template.is_file() else None,
        tensors=tensors,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot be read ({type(error).__name__}).", where=str(path), fix=_AGAIN) from None
    if not isinstance(found, dict):
        raise UserError("holds no keys.", where=str(path), fix=_AGAIN)
    return found


def _section(origin: dict[str, Any], name: str) -> dict[str, Any]:
    found = origin.get(name)
    return found if isinstance(found, dict) else {}


def _refuse_more(config: dict[str, Any], path: Path) -> None:
    fix = "Merge it into its base with `peft`, and give the merged folder."
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise UserError(f"is a {kind} adapter; redline reads LORA.", where=str(path), fix=fix)
    found = [key for key in _MORE if config.get(key)]
    found += ["bias"] if config.get("bias", "none") not in (None, "none") else []
    found += ["init_lora_weights"] if config.get("init_lora_weights", True) not in _BEGINNINGS else []
    if found:
        pairs = ", ".join(f"{key}={config[key]!r}" for key in found)
        raise UserError(f"has {pairs}, which redline does not compute.", where=str(path), fix=fix)


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / _WEIGHTS
    try:
        return load_file(check_regular(path))
    except FileNotFoundError:
        fix = "Save it with safetensors; a .bin file can run any code when it is opened."
        raise UserError(f"has no {_WEIGHTS}.", where=str(folder), fix=fix) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"is damaged ({type(error).__name__}).", where=str(path), fix=_AGAIN) from None


def _targets(tensors: dict[str, Tensor], folder: Path) -> list[str]:
    """By what is there: adapter_config.json may say it as a regular expression."""
    matches = {name: _NAME.fullmatch(name) for name in tensors}
    strange = [name for name, match in matches.items() if match is None or match[1] not in TARGETS]
    if strange or not tensors:
        what = f"holds {strange[0]}, which is no adapter of a block's matrix." if strange else "holds no adapter."
        fix = f"redline reads LoRA on {', '.join(TARGETS)}."
        raise UserError(what, where=str(folder / _WEIGHTS), fix=fix)
    found = {match[1] for match in matches.values() if match is not None}
    return [name for name in TARGETS if name in found]
