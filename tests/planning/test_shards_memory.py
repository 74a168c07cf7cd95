"""The memory of a rank that the plan predicts equals the tensors that live on it, at shapes without activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_communication_bytes import CPU, FACTS, in_ranks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from redline.jobs.objective import job_runtime
from redline.planning.memory import Kernels, workspace
from redline.recipe.load import load
from redline.recipe.resolve import Resolved, resolve
from redline.training.distributed import Ranks
from redline.training.optim import Optimizer
from redline.training.parallel import parallelize

# Weights are large beside activations: rows of 8 tokens.
SHAPE = (
    *("model.size=null", "model.layers=6", "model.d_model=256", "model.heads=4", "model.d_ff=704", "model.vocab=512"),
    *("data.seq_len=8", "train.tokens=10000", "train.device=cpu", "train.compile=false", "train.micro_batch=1"),
)
METHODS = {
    "full": (),
    "lora": ("causal_lm.method=lora", "model.lora.dropout=0"),
    "qlora": ("causal_lm.method=qlora", "model.lora.dropout=0"),
}


class Live(TorchDispatchMode):
    """Count the bytes of all tensors that are alive, after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def add(self, tensors: Any) -> None:
        for tensor in tree_iter(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                self.refs.setdefault(storage._cdata, StorageWeakRef(storage))

    def now(self) -> int:
        total = 0
        for key, ref in list(self.refs.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self.refs[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add((args, out))
        self.peak = max(self.peak, self.now())
        return out


def planned(world: int, mode: str, method: str, precision: str, *more: str) -> Resolved:
    how = {
        "ddp": ("parallel.mode=ddp",),
        "rows": ("parallel.mode=fsdp", "parallel.accumulate=sharded"),
        "whole": ("parallel.mode=fsdp", "parallel.accumulate=whole"),
        "groups": ("parallel.mode=hsdp", "parallel.shard_size=2", "parallel.accumulate=sharded"),
    }[mode]
    words = (*SHAPE, *METHODS[method], *how, f"train.precision={precision}", f"train.global_batch={2 * world}", *more)
    recipe = load("pretrain-350m", [*words, *(() if method == "full" else ("model.base=unused",))]).recipe
    return resolve(recipe, CPU, FACTS, gpus=world)


def counted(resolved: Resolved) -> Any:
    def action(rank: int) -> dict[str, int]:
        runtime = job_runtime("causal_lm")
        objective = runtime.create(resolved, runtime.random_data(FACTS))
        objective.build(torch.device("cpu"))
        ranks = Ranks(rank, resolved.batch.world, rank, joined=True)
        parallel = parallelize(resolved.recipe.parallel, ranks, objective)
        optimizer = Optimizer(parallel.groups(), resolved.recipe.train, parallel.make_muon)
        batch = objective.worst_batch(1)

        def step() -> None:
            parallel.clear()
            for micro in range(2):
                parallel.begin_micro_batch(last=micro == 1)
                sum(term.sum for term in objective.loss(batch).values()).backward()
            parallel.end_backward()
            optimizer.step(1.0, (torch.ones(()), torch.zeros(())), 0)

        step()
        parallel.clear()
        live = Live()
        live.add([*objective.model.parameters(), *objective.model.buffers(), optimizer.tensors()])
        for module in objective.model.modules():
            live.add([value for value in vars(module).values() if isinstance(value, torch.Tensor)])
            live.add([vars(part) for part in getattr(module, "_quantised", ())])
        for unit in getattr(parallel, "_units", lambda: ())():
            state = unit._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.13, and before
            live.add([p._sharded_param_data for group in groups for p in group.fsdp_params])
        held = live.now()
        with live:
            step()
        return {"held": held, "peak": live.peak}

    return action


@pytest.mark.parametrize(
    ("world", "mode", "method", "precision"),
    [
        (1, "rows", "full", "fp32"),
        (2, "ddp", "full", "fp32"),
        (2, "rows", "full", "fp32"),
        (4, "rows", "full", "fp32"),
        (2, "whole", "full", "fp32"),
        (4, "groups", "full", "fp32"),
        (2, "rows", "full", "bf16"),
        (2, "whole", "full", "bf16"),
        (2, "rows", "lora", "fp32"),
        (2, "rows", "qlora", "bf16"),
        (4, "rows", "qlora", "bf16"),
    ],
)
def test_planned_memory_is_that_of_the_tensors(
    world: int, mode: str, method: str, precision: str, tmp_path: Path
) -> None:
    resolved = planned(world, mode, method, precision)
    found = in_ranks(world, counted(resolved), tmp_path)
    parts, process = resolved.memory, workspace(Kernels(gpu=False, compiled=False), imported=method != "full")
    assert max(one["peak"] for one in found) == pytest.approx(parts.peak - process, rel=0.05)
    assert {one["held"] for one in found} == {found[0]["held"]}, "all ranks hold equally much"


@pytest.mark.parametrize("layers", [6, pytest.param(48, marks=pytest.mark.soak)])
def test_what_a_rank_holds_shrinks_with_the_ranks(layers: int, tmp_path: Path, say: Any) -> None:
    """Weights, moments and gradients of N ranks are 1/N each; the blocks in progress are whole, whatever N is."""
    peaks = {}
    for world in (1, 2, 4):
        (tmp_path / str(world)).mkdir()
        resolved = planned(world, "rows", "full", "fp32", f"model.layers={layers}")
        peaks[world] = in_ranks(world, counted(resolved), tmp_path / str(world))[0]
    held = [peaks[world]["held"] * world for world in (1, 2, 4)]
    assert held == pytest.approx([held[0]] * 3, rel=0.001)
    rows = {world: peaks[world]["held"] / 3 for world in peaks}  # gradients, beside weights and two moments
    in_progress = {world: peaks[world]["peak"] - 4 * rows[world] for world in peaks}
    assert in_progress[2] == pytest.approx(in_progress[4], rel=0.02)
    assert in_progress[1] < in_progress[2], "one rank sends nothing"
    for world, found in peaks.items():
        beside = (found["peak"] - found["held"]) / 1e6
        say(f"{layers} layers, {world} ranks: {found['held'] / 1e6:.1f} MB held, {beside:.1f} MB beside at the peak")
