"""What each parameter of a decoder is to the optimizer."""

from __future__ import annotations

from torch import nn

from redline.models.layers import Linear
from redline.models.lora import LoraLinear
from redline.objectives.base import ParamGroup


def role_groups(model: nn.Module) -> list[ParamGroup]:
    """Hidden matrices, embeddings, the head, and everything with one dimension."""
    found: dict[str, dict[str, nn.Parameter]] = {}
    splits: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                full = f"{path}.{name}" if path else name
                found.setdefault(_role(path, module, parameter), {})[full] = parameter
                splits[full] = _splits(module, parameter)
    return [ParamGroup(role, members, {n: splits[n] for n in members}) for role, members in found.items()]


def _splits(module: nn.Module, parameter: nn.Parameter) -> tuple[int, ...]:
    """Rows of each of the matrices that lie one below the other in it."""
    if isinstance(module, LoraLinear):
        return (module.r,) * len(module.adapters)
    return module.splits if isinstance(module, Linear) else (parameter.shape[0],)


def _role(path: str, module: nn.Module, parameter: nn.Parameter) -> str:
    if parameter.dim() < 2:
        return "scalar"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "head" if path == "head" else "matrix"
