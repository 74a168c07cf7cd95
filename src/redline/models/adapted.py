"""A decoder on a frozen base: every matrix of its blocks as it came, or in NF4, with adapters where they are wanted.

The decoder arrives without memory (on torch's meta device) and gets its weights one by one, so that a large base is
never there twice, and what is quantised never wholly in its own precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from redline.models.frozen import FrozenMatrix
from redline.models.layers import Linear
from redline.models.lora import LoraLinear
from redline.models.transformer import Decoder
from redline.plan.adapters import TARGETS, Adapter
from redline.recipe.schema import Lora

PARTS = {"qkv": ("q", "k", "v"), "out": ("out",), "up": ("gate", "up"), "down": ("down",)}


def fill_frozen(
    model: Decoder,
    tensors: Iterable[tuple[str, Tensor]],
    adapter: Adapter,
    *,
    lora: Lora,
    device: torch.device,
    generator: torch.Generator,
) -> None:
    """The base's tensors into the decoder, frozen, and the adapters beside them."""
    biases: dict[str, Tensor] = {}
    for name, tensor in tensors:
        path, _, kind = name.rpartition(".")
        owner = model.get_submodule(path)
        if not path.startswith("blocks.") or not isinstance(owner, Linear):
            wide = torch.float32 if tensor.dim() == 1 else model.dtype
            setattr(owner, kind, nn.Parameter(tensor.to(device, wide), requires_grad=False))
        elif kind == "bias":
            biases[path] = tensor.to(device, torch.float32)
        else:
            model.set_submodule(path, _adapted(owner, path, tensor.to(device), adapter, model.dtype, lora))
    for path, bias in biases.items():
        linear = model.get_submodule(path)
        assert isinstance(linear, LoraLinear)
        linear.bias = bias
    for linear in adapted_linears(model).values():
        linear.initialise(generator)


def _adapted(linear: Linear, path: str, weight: Tensor, adapter: Adapter, dtype: torch.dtype, lora: Lora) -> LoraLinear:
    held = path.rpartition(".")[2]
    names = PARTS[held] if len(linear.splits) == len(PARTS[held]) else PARTS[held][-1:]
    parts = dict(zip(names, linear.splits, strict=True))
    wanted = [part for where, part in (TARGETS[name] for name in adapter.targets) if where == held and part in parts]
    base = FrozenMatrix(weight, tuple(parts.values()), quantise=adapter.quantised, double=adapter.double, dtype=dtype)
    return LoraLinear(base, parts, wanted, lora.r, lora.alpha, lora.dropout, rslora=lora.rslora)


def adapted_linears(model: Decoder) -> dict[str, LoraLinear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLinear)}


def random_tensors(model: Decoder, device: torch.device, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """As if there were a base of this shape: for steps that are only timed."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if parameter.dim() == 1:
            yield name, torch.ones(shape, device=device)
        else:
            yield name, torch.randn(shape, device=device, dtype=model.dtype, generator=generator) * 0.02
