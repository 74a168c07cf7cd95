"""The trial of the fused blocks on this card: before a run relies on them, they must compute what plain blocks compute.

    python -m redline.models.fused_trial blocks < request.json

is the child process in which they are tried, because a kernel that does not fit the card may crash or hang it. A card
that passed is not asked again until its driver, torch, Triton or redline changes; a failure is never stored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata

import torch

from redline import __version__
from redline.hardware.measurements import KERNELS, gpu_key, read_measurement, store_measurement
from redline.hardware.nvml import driver_version
from redline.hardware.trials import answer_trials, run_trials
from redline.kernels.attention import Attention, MaskSpec
from redline.kernels.matmul import DTYPES
from redline.models.decoder import Decoder
from redline.planning.shapes import DecoderShape

TRIAL = "blocks"
_SECONDS = 180  # most of it for Triton, which compiles the kernels
_ROWS, _LENGTH, _VOCAB = 2, 128, 256
# The error of a tensor relative to float32's may be this many times that of plain blocks in the same precision.
_MARGIN, _SLACK = 2.0, 5e-3


def fused_failure(shape: DecoderShape, precision: str) -> str:
    """Return why the fused blocks cannot be used on this card with this model, or "" if they passed their trial."""
    tried = trial_shape(shape)
    request = {"shape": asdict(tried), "precision": precision}
    key = f"{gpu_key(torch.cuda.get_device_properties(0).name, driver_version())}, triton {_triton_version()}, "
    key += f"redline {__version__}: {json.dumps(request)}"
    if read_measurement(KERNELS, key):
        return ""
    answer = run_trials("redline.models.fused_trial", [TRIAL], request=json.dumps(request)).get(TRIAL, {})
    if answer.get("works"):
        store_measurement(KERNELS, key, {"errors": answer["about"]})
        return ""
    return str(answer.get("detail", "no answer"))


def trial_shape(shape: DecoderShape) -> DecoderShape:
    """Return the shape with the widths of the model, which the kernels depend on, but few layers and tokens."""
    layers = 2 + 2 * (shape.value_embeddings > 0 or shape.skips != "none")
    tables = min(shape.value_embeddings, layers // 2)
    return replace(shape, layers=layers, vocab=_VOCAB, tied=True, value_embeddings=tables)


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "missing"


# ----------------------------------------------------------------------------------------------------
# The child.


def compare_blocks(shape: DecoderShape, precision: str, device: str = "cuda") -> dict[str, float]:
    """Compare fused and plain blocks with float32 in output and gradients; raise an ArithmeticError if they differ.

    Return the largest relative error of each.
    """
    exact = _output_and_gradients(shape, "torch", torch.float32, device)
    errors = {
        kernels: {name: _error(found, exact[name]) for name, found in results.items()}
        for kernels in ("torch", "fused")
        for results in (_output_and_gradients(shape, kernels, DTYPES[precision], device),)
    }
    for name, error in errors["fused"].items():
        if not error <= _MARGIN * errors["torch"][name] + _SLACK:
            usual = f"that of plain blocks by {errors['torch'][name]:.2g}"
            raise ArithmeticError(f"{name} is wrong: it differs from float32's by {error:.2g}, {usual}")
    return {kernels: round(max(of_each.values()), 5) for kernels, of_each in errors.items()}


def _output_and_gradients(
    shape: DecoderShape, kernels: str, dtype: torch.dtype, device: str
) -> Mapping[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    model = Decoder(shape, attention=Attention("dense", MaskSpec(), device), kernels=kernels, dtype=dtype)
    model.initialise(generator)
    with torch.no_grad():  # norms of ones and biases of zeros would hide errors
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    model.to(device)
    tokens = torch.randint(0, shape.vocab, (_ROWS, _LENGTH), generator=generator).to(device)
    upstream = torch.randn(_ROWS, _LENGTH, shape.d_model, generator=generator).to(device)
    hidden = model(tokens, model.attention.bind(_LENGTH, None))
    hidden.backward(upstream.to(hidden.dtype))
    gradients = {f"the gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"the output": hidden.detach(), **gradients}


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm().clamp_min(1e-12))


def main(names: list[str]) -> None:
    request = json.load(sys.stdin)
    trial = partial(compare_blocks, DecoderShape(**request["shape"]), request["precision"])
    answer_trials(names, {TRIAL: trial}, {TRIAL: _SECONDS})


if __name__ == "__main__":
    main(sys.argv[1:])
