"""Time of one Muon update of the 350M model on this GPU: in total, by part, and its symmetric matmuls by tile size.

usage: python -m benchmarks.studies.muon OUT.json

Random gradients, medians of CUDA-event times. Rates count all FLOPs of a product, including tiles that are mirrored
instead of computed, so a rate may exceed the card's peak.
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
from redline.jobs.objective import role_groups
from redline.kernels import muon as kernels
from redline.kernels.attention import Attention, MaskSpec
from redline.kernels.muon import descend_, gram, nesterov_, square
from redline.models.decoder import Decoder
from redline.planning.shapes import DecoderShape
from redline.recipe.load import load
from redline.recipe.schema import Train
from redline.training import optim

DEVICE, VOCAB = "cuda", 50_304
SHAPES = {  # batch, rows, columns
    "gram 96×1024×1024": (96, 1024, 1024),
    "gram 72×1024×2688": (72, 1024, 2688),
    "gram 72×2688×1024, tall": (72, 2688, 1024),
    "square 96×1024×1024": (96, 1024, 1024),
    "square 72×1024×1024": (72, 1024, 1024),
}
# Differences from the tile that redline uses.
TILE_CHANGES: tuple[dict[str, int], ...] = (
    {},
    {"stages": 4},
    {"warps": 4},
    {"warps": 4, "stages": 4},
    {"depth": 32, "stages": 6},
    {"depth": 128},
    {"span": 2},
    {"span": 2, "stages": 4},
)


def hidden_matrices() -> optim.Muon:
    """Return Muon over the matrices of pretrain-350m, each with a random gradient."""
    model = load("pretrain-350m").recipe.model
    layers, d, heads, d_ff = (int(size) for size in (model.layers, model.d_model, model.heads, model.d_ff))
    shape = DecoderShape(layers, d, heads, heads, d // heads, d_ff, VOCAB)
    with torch.device(DEVICE):
        decoder = Decoder(shape, attention=Attention("dense", MaskSpec(), DEVICE))
    groups = [group for group in role_groups(decoder) if group.role == "matrix"]
    for group in groups:
        for parameter in group.parameters.values():
            parameter.grad = torch.randn_like(parameter)
    return optim.Muon(groups, Train(lr=1e-3, optimizer="muon", weight_decay=0.1))


def time_updates(optimizer: optim.Muon) -> dict[str, float]:
    """Return the milliseconds of an update and of its parts, with Triton and with torch."""
    one, skip = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    work: dict[str, Callable[[], Any]] = {"update": partial(optimizer.step, 1.0, (one, skip), 1000)}
    for shape, batch in optimizer.batches.items():
        name = "×".join(str(size) for size in (len(batch), *shape))
        gradients, weights = (
            [m.rows_of(m.parameter.grad) for m in batch],
            [m.rows_of(m.parameter.detach()) for m in batch],
        )
        total, squares = nesterov_(gradients, optimizer.first[shape], one, skip, 0.95)
        descend = partial(descend_, weights, total, None, skip, rate=1e-6, decay=1e-6, cautious=False)
        work[f"nesterov_ {name}"] = partial(nesterov_, gradients, optimizer.first[shape], one, skip, 0.95)
        work[f"orthogonalise {name}"] = partial(optim.orthogonalize, total, squares)
        work[f"descend_ {name}"] = descend
    times: dict[str, float] = {}
    for library, use_triton in (("Triton", True), ("torch", False)):
        with patch.object(kernels, "by_triton", partial(_constant, use_triton)):
            times |= {f"{name}, by {library}": 1e3 * seconds(call, 0.3) for name, call in work.items()}
    for name, ms in times.items():
        print(f"{name:48s} {ms:8.3f} ms", flush=True)
    return times


def _constant(use_triton: bool, device: torch.device) -> bool:
    return use_triton


def time_products() -> list[dict[str, Any]]:
    """Time each symmetric product by torch and with every tile, with its error against float64."""
    from redline.kernels.triton import muon as symmetric_triton

    tiles = [replace(symmetric_triton.TILE, **cut) for cut in TILE_CHANGES]
    rows = []
    for name, (count, rows_of_x, columns) in SHAPES.items():
        x = torch.randn(count, rows_of_x, columns, device=DEVICE).div_(max(rows_of_x, columns) ** 0.5).bfloat16()
        if name.startswith("gram"):
            how: dict[str, Any] = {"tall": rows_of_x > columns, "diagonal": -2.5}
            by_torch, by_triton = partial(gram.reference, x, **how), partial(symmetric_triton.gram, x, **how)
        else:
            x, how = symmetric_triton.gram(x, tall=False, diagonal=-0.5), {"factor": 0.5, "diagonal": 1.5}
            by_torch, by_triton = partial(square.reference, x, **how), partial(symmetric_triton.square, x, **how)
        exact, flops = _exact(x[:2], how), 2.0 * count * rows_of_x * columns * min(rows_of_x, columns)
        ways: list[tuple[Any, Callable[[], Tensor]]] = [(None, by_torch)]
        for tile in tiles:
            ways.append((asdict(tile), partial(by_triton, tile=tile)))
        for tile, call in ways:
            error = ((call()[:2].double() - exact).norm() / exact.norm()).item()
            spent = seconds(call, 0.05)
            row = {"product": name, "tile": tile, "ms": 1e3 * spent, "tflops": flops / spent / 1e12, "error": error}
            rows.append(row)
            label = "torch" if tile is None else " ".join(f"{key} {value}" for key, value in tile.items())
            print(f"{name:24s} {label:48s} {1e3 * spent:7.3f} ms {row['tflops']:5.0f} TFLOP/s {error:.1e}", flush=True)
    return rows


def _exact(x: Tensor, how: dict[str, Any]) -> Tensor:
    x = x.double()
    result = how["factor"] * x @ x if "factor" in how else x.mT @ x if how["tall"] else x @ x.mT
    result.diagonal(dim1=-2, dim2=-1).add_(how["diagonal"])
    return result


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tile with the least total time over all products, and the times of it and of torch."""
    times: dict[str, float] = {}
    for row in rows:
        times[json.dumps(row["tile"])] = times.get(json.dumps(row["tile"]), 0.0) + row["ms"]
    tile = min((key for key in times if key != "null"), key=times.__getitem__)
    result = {"tile": json.loads(tile), "ms": times[tile], "torch_ms": times["null"]}
    print("fastest tile over all products:", result)
    return result


def main() -> None:
    if len(sys.argv) != 2 or not torch.cuda.is_available():
        sys.exit("usage: python -m benchmarks.studies.muon OUT.json, on a machine with an NVIDIA GPU")
    torch.manual_seed(0)
    with torch.no_grad():
        rows = time_products()
        result = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "update_ms": time_updates(hidden_matrices()),
            "products": rows,
            "best": best(rows),
        }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
