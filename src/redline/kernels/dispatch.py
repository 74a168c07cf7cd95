"""Dispatch between the two implementations of a kernel operation: Triton on a GPU, plain torch everywhere else.

Each operation is written once in this folder, as a function whose body is the torch reference:

    @op(triton="activations:swiglu")
    def swiglu(h_N2F: Tensor) -> Tensor:
        '''Return silu(gate)·up …'''
        gate, up = h_N2F.float().chunk(2, -1)
        return (F.silu(gate) * up).to(h_N2F.dtype)

`swiglu(h)` then runs the function of the same signature in kernels/triton/activations.py for a CUDA tensor, and the
body above for any other. Tests call the two as `swiglu.triton` (by the Triton interpreter where there is no GPU) and
`swiglu.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from importlib import import_module  # noqa: TID251 - the module names are the `triton=` literals in this folder
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from redline.hardware.compiled_kernels import objection

P = ParamSpec("P")
R = TypeVar("R")


def first_is_cuda(first: Any, *_: Any, **__: Any) -> bool:
    """Return whether the first argument (a tensor, or an object with `is_cuda` such as Float8 or NF4) is on a GPU."""
    return bool(first.is_cuda)


class Op(Generic[P, R]):
    """An operation that picks its implementation by the device of its arguments at each call."""

    def __init__(self, reference: Callable[P, R], triton: str, uses_triton: Callable[..., bool]) -> None:
        self.reference, self.uses_triton = reference, uses_triton
        self._module, self._function = triton.split(":")
        update_wrapper(self, reference)

    @cached_property
    def triton(self) -> Callable[P, R]:
        """Import the Triton implementation. Lazily, because machines without a GPU need not have triton installed."""
        module = import_module(f"redline.kernels.triton.{self._module}")
        function: Callable[P, R] = getattr(module, self._function)
        return function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.uses_triton(*args, **kwargs):
            return self.triton(*args, **kwargs)
        return self.reference(*args, **kwargs)


def op(*, triton: str, uses_triton: Callable[..., bool] = first_is_cuda) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Turn a torch reference into an operation that `triton` ("module:function" in kernels/triton) serves on a GPU.

    `uses_triton` receives the call's arguments. The default looks at the first one, which must therefore be passed by
    position.
    """

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        return Op(reference, triton, uses_triton)

    return decorate


@cache
def triton_serves(device: torch.device, *kernels: str) -> bool:
    """Return whether Triton is installed and all these kernels may run on the device, a GPU that they compile for."""
    if device.type != "cuda" or objection(torch.cuda.get_device_capability(device), kernels):
        return False
    return find_spec("triton") is not None


def sm_count(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors; 1 where Triton is interpreted, which runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
