"""One Muon update of the 350M model on this GPU: whole, by parts, and its symmetric matmuls by how they are cut.

usage: python -m benchmarks.studies.muon OUT.json

Random gradients, medians of CUDA-event times. Rates count all of a product's FLOPs, also of tiles that are mirrored
instead of made: a rate above the card's peak is no mistake.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.studies.rates import seconds
from redline.jobs.decoder_objective import role_groups
from redline.kernels import muon as kernels
from redline.kernels.attention import Attention, MaskSpec
from redline.kernels.muon import descend_, gram, nesterov_, square
from redline.models.decoder import Decoder
from redline.planning.shapes import DecoderShape
from redline.recipe.load import load
from redline.recipe.schema import Train
from redline.training import muon

DEVICE, VOCAB = "cuda", 50_304
SHAPES = {  # batch, rows, columns
    "gram 96×1024×1024": (96, 1024, 1024),
    "gram 72×1024×2688": (72, 1024, 2688),
    "gram 72×2688×1024, tall": (72, 2688, 1024),
    "square 96×1024×1024": (96, 1024, 1024),
    "square 72×1024×1024": (72, 1024, 1024),
}
CUTS: tuple[dict[str, int], ...] = (
    {},
    {"stages": 4},
    {"warps": 4},
    {"warps": 4, "stages": 4},
    {"depth": 32, "stages": 6},
    {"depth": 128},
    {"span": 2},
    {"span": 2, "stages": 4},
)  # what differs from the tile in use


def hidden_matrices() -> muon.Muon:
    """Muon with the matrices of pretrain-350m and a random gradient of each."""
    model = load("pretrain-350m").recipe.model
    layers, d, heads, d_ff = (int(size) for size in (model.layers, model.d_model, model.heads, model.d_ff))
    shape = DecoderShape(layers, d, heads, heads, d // heads, d_ff, VOCAB)
    with torch.device(DEVICE):
        decoder = Decoder(shape, attention=Attention("dense", MaskSpec(), DEVICE))
    groups = [group for group in role_groups(decoder) if group.role == "matrix"]
    for group in groups:
        for parameter in group.parameters.values():
            parameter.grad = torch.randn_like(parameter)
    return muon.Muon(groups, Train(lr=1e-3, optimizer="muon", weight_decay=0.1))


def updates(ours: muon.Muon) -> dict[str, float]:
    """Milliseconds of a whole update, and of its parts; by Triton and by torch."""
    one, good = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    work: dict[str, Callable[[], Any]] = {"update": partial(ours.step, 1.0, (one, good), 1000)}
    for shape, batch in ours.batches.items():
        name = "×".join(str(size) for size in (len(batch), *shape))
        gradients, weights = [m.of(m.parameter.grad) for m in batch], [m.of(m.parameter.detach()) for m in batch]
        total, squares = nesterov_(gradients, ours.first[shape], one, good, 0.95)
        descend = partial(descend_, weights, total, None, good, rate=1e-6, decay=1e-6, cautious=False)
        work[f"nesterov_ {name}"] = partial(nesterov_, gradients, ours.first[shape], one, good, 0.95)
        work[f"orthogonalise {name}"] = partial(muon.orthogonalize, total, squares)
        work[f"descend_ {name}"] = descend
    found: dict[str, float] = {}
    for who, chosen in (("Triton", True), ("torch", False)):
        choose = partial(_chosen, chosen)
        with patch.object(kernels, "by_triton", choose):
            found |= {f"{name}, by {who}": 1e3 * seconds(call, 0.3) for name, call in work.items()}
    for name, ms in found.items():
        print(f"{name:48s} {ms:8.3f} ms", flush=True)
    return found


def _chosen(chosen: bool, device: torch.device) -> bool:
    return chosen


def products() -> list[dict[str, Any]]:
    """Each symmetric product by torch and by every cut, with its error against float64."""
    from redline.kernels.triton import muon as symmetric_triton

    tiles = [replace(symmetric_triton.TILE, **cut) for cut in CUTS]
    rows = []
    for name, (count, high, wide) in SHAPES.items():
        x = torch.randn(count, high, wide, device=DEVICE).div_(max(high, wide) ** 0.5).bfloat16()
        if name.startswith("gram"):
            how: dict[str, Any] = {"tall": high > wide, "diagonal": -2.5}
            whole, made = partial(gram.reference, x, **how), partial(symmetric_triton.gram, x, **how)
        else:
            x, how = symmetric_triton.gram(x, tall=False, diagonal=-0.5), {"factor": 0.5, "diagonal": 1.5}
            whole, made = partial(square.reference, x, **how), partial(symmetric_triton.square, x, **how)
        exact, flops = _exact(x[:2], how), 2.0 * count * high * wide * min(high, wide)
        ways: list[tuple[Any, Callable[[], Tensor]]] = [(None, whole)]
        for tile in tiles:
            ways.append((asdict(tile), partial(made, tile=tile)))
        for tile, call in ways:
            error = ((call()[:2].double() - exact).norm() / exact.norm()).item()
            spent = seconds(call, 0.05)
            row = {"product": name, "tile": tile, "ms": 1e3 * spent, "tflops": flops / spent / 1e12, "error": error}
            rows.append(row)
            said = "torch" if tile is None else " ".join(f"{key} {value}" for key, value in tile.items())
            print(f"{name:24s} {said:48s} {1e3 * spent:7.3f} ms {row['tflops']:5.0f} TFLOP/s {error:.1e}", flush=True)
    return rows


def _exact(x: Tensor, how: dict[str, Any]) -> Tensor:
    wide = x.double()
    result = how["factor"] * wide @ wide if "factor" in how else wide.mT @ wide if how["tall"] else wide @ wide.mT
    result.diagonal(dim1=-2, dim2=-1).add_(how["diagonal"])
    return result


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The tile that needs the least time for all products together, beside torch."""
    times: dict[str, float] = {}
    for row in rows:
        times[json.dumps(row["tile"])] = times.get(json.dumps(row["tile"]), 0.0) + row["ms"]
    tile = min((key for key in times if key != "null"), key=times.__getitem__)
    found = {"tile": json.loads(tile), "ms": times[tile], "torch_ms": times["null"]}
    print("least together:", found)
    return found


def main() -> None:
    if len(sys.argv) != 2 or not torch.cuda.is_available():
        sys.exit("usage: python -m benchmarks.studies.muon OUT.json, on a machine with an NVIDIA GPU")
    torch.manual_seed(0)
    with torch.no_grad():
        rows = products()
        result = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "update_ms": updates(hidden_matrices()),
            "products": rows,
            "best": best(rows),
        }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
