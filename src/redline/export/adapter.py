"""Adapters in PEFT's layout, and merged into their base one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.cache import cache_dir
from redline.hardware.device import sum_dtype
from redline.hub import parse_address
from redline.jobs.objective import FinetunedModel
from redline.models.adapters import FrozenMatrix, LoraLinear
from redline.models.families import tensor_names
from redline.models.pretrained import Base
from redline.planning.shapes import TARGETS, Adapter, DecoderShape, matrix_sides
from redline.recipe.schema import Lora

ADAPTER, ADAPTER_CONFIG = "adapter_model", "adapter_config.json"
_PREFIX = "base_model.model"
_HELD = {held for held, _ in TARGETS.values()}


def adapter_config(model: FinetunedModel, base: Base) -> dict[str, Any]:
    """Return adapter_config.json. PEFT has defaults for keys that are not in it."""
    assert model.adapter is not None
    lora = model.lora
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name(base),
        "revision": revision(base),
        "r": lora.r,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(model.adapter.targets),
        "use_rslora": lora.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def address(base: Base) -> str:
    """Return what loads the same weights again on this machine: the hub id, or the folder the weights are in."""
    is_path = Path(base.source).expanduser().exists()
    return str(base.folder) if is_path or is_unpacked(base) else base.source


def is_unpacked(base: Base) -> bool:
    """Whether the weights were unpacked from a .gguf file, for example from a packaged copy of a hub model."""
    return base.folder.parent == cache_dir() / "bases"


def hub_id(base: Base) -> str | None:
    """Return the base's id on the Hugging Face hub; None for a base that is known only as local files."""
    if not Path(base.source).expanduser().exists():
        # open_base() accepts paths, hub ids and hf://… addresses, and this is no path
        return found.name if (found := parse_address(base.source)) else base.source
    # A snapshot of the hub's cache, given by its path: models--OWNER--NAME/snapshots/COMMIT.
    kind, *parts = base.folder.parent.parent.name.split("--")
    is_snapshot = kind == "models" and len(parts) == 2 and revision(base) is not None
    return "/".join(parts) if is_snapshot else None


def base_name(base: Base) -> str:
    """Return the base's name for adapter_config.json, which has to mean something on other machines too.

    A local base is named `./FOLDER`: peft looks for it in the working directory. Unlike a bare `FOLDER`, this cannot
    be read as the id of some unrelated model on the hub.
    """
    if (known := hub_id(base)) is not None:
        return known
    path = Path(base.source).expanduser().resolve()
    return f"./{path.stem if path.is_file() else path.name}"


def revision(base: Base) -> str | None:
    """Return the commit on the hub; None for a base that does not come from its cache."""
    return base.folder.name if base.folder.parent.name == "snapshots" else None


# --- without the base


def to_peft(tensors: Mapping[str, Tensor], shape: DecoderShape, adapter: Adapter, lora: Lora) -> dict[str, Tensor]:
    """Rename a checkpoint's adapters to PEFT's names."""
    renamed: dict[str, Tensor] = {}
    for path, prefix in _paths(shape):
        renamed |= _linear(path, _empty_matrix(path, shape), tensors, shape, adapter, lora).adapter_tensors(prefix)
    return renamed


def from_peft(tensors: Mapping[str, Tensor], shape: DecoderShape, adapter: Adapter, lora: Lora) -> dict[str, Tensor]:
    """Rename PEFT's tensors to the checkpoint's names; a UserError names tensors that are missing."""
    renamed: dict[str, Tensor] = {}
    for path, prefix in _paths(shape):
        linear = _linear(path, _empty_matrix(path, shape), None, shape, adapter, lora)
        linear.load_adapter_tensors(prefix, tensors)
        renamed |= {f"{path}.{name}": tensor for name, tensor in linear.state_dict().items()}
    return renamed


def _paths(shape: DecoderShape) -> Iterator[tuple[str, str]]:
    """Return (path, prefix) of each linear of the blocks: its path in the decoder, and the prefix of PEFT's names."""
    for ours, theirs, _ in tensor_names(shape):
        if _is_matrix(ours):
            yield ours.removesuffix(".weight"), f"{_PREFIX}.{theirs[0].rsplit('.', 2)[0]}"


def _is_matrix(ours: str) -> bool:
    path, _, kind = ours.rpartition(".")
    return ours.startswith("blocks.") and kind == "weight" and _held(path) in _HELD


def _held(path: str) -> str:
    return path.rpartition(".")[2]


def _parts(path: str, shape: DecoderShape) -> dict[str, int]:
    """Return part → rows of a linear that stores several matrices merged, such as q, k and v."""
    sides = matrix_sides(shape)
    return {part: sides[name][1] for name, (held, part) in TARGETS.items() if held == _held(path)}


def _empty_matrix(path: str, shape: DecoderShape) -> FrozenMatrix:
    """Return a matrix of the right shape that takes no memory: one zero, expanded."""
    inputs = next(matrix_sides(shape)[name][0] for name, (held, _) in TARGETS.items() if held == _held(path))
    return FrozenMatrix(torch.zeros(()).expand(sum(_parts(path, shape).values()), inputs))


def _linear(
    path: str,
    base: FrozenMatrix,
    tensors: Mapping[str, Tensor] | None,
    shape: DecoderShape,
    adapter: Adapter,
    lora: Lora,
) -> LoraLinear:
    """Return one linear as it was trained, with its adapters loaded if `tensors` has them."""
    wanted = [part for held, part in (TARGETS[name] for name in adapter.targets) if held == _held(path)]
    linear = LoraLinear(base, _parts(path, shape), wanted, lora.r, lora.alpha, lora.dropout, rslora=lora.rslora)
    if tensors is not None:
        linear.load_state_dict({name: tensors[f"{path}.{name}"] for name in linear.state_dict()})
    return linear


# --- merged


@dataclass
class Drift:
    """How far the quantised base is from the original: ‖difference‖ / ‖original‖ over all quantised matrices."""

    difference: float = 0.0  # sum of squares
    original: float = 0.0  # sum of squares

    def add(self, original: Tensor, quantised: Tensor) -> None:
        wide = original.float()
        kind = sum_dtype(wide.device)
        self.difference += float((quantised - wide).square().sum(dtype=kind))
        self.original += float(wide.square().sum(dtype=kind))

    @property
    def relative(self) -> float:
        return (self.difference / self.original) ** 0.5 if self.original else 0.0


def merged_tensors(
    model: FinetunedModel, base: Base, device: torch.device, drift: Drift | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Return the base with the adapters added, under the base's published names.

    Without `drift`, adapters are added to the matrices that they were trained beside: dequantised if these were
    quantised. With `drift` they are added to the original matrices, and `drift` measures the difference of the two.
    """
    for (ours, theirs, rows), (name, tensor) in zip(tensor_names(base.shape), base.tensors(), strict=True):
        assert name == ours
        merged = _merged(ours, tensor.to(device), model, base.shape, drift) if _is_matrix(ours) else tensor
        yield from _split(theirs, merged, rows)


def _merged(ours: str, weight: Tensor, model: FinetunedModel, shape: DecoderShape, drift: Drift | None) -> Tensor:
    path, adapter = ours.removesuffix(".weight"), model.adapter
    assert adapter is not None
    rows = tuple(_parts(path, shape).values())
    base = FrozenMatrix(weight, rows, quantise=adapter.quantised, double=adapter.double)
    if drift is not None and adapter.quantised:
        drift.add(weight, base.dense(torch.float32))
        base = FrozenMatrix(weight)
    return _linear(path, base, model.tensors, shape, adapter, model.lora).merged_weight()


def whole_tensors(model: FinetunedModel, base: Base) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of a run that trained all of them, under the base's published names."""
    for ours, theirs, rows in tensor_names(base.shape):
        yield from _split(theirs, model.tensors[ours], rows)


def _split(theirs: tuple[str, ...], merged: Tensor, rows: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Split matrices that redline stores merged, such as q, k and v."""
    yield from zip(theirs, merged.split(rows) if rows else (merged,), strict=True)
