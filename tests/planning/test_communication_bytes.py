"""The bytes that ranks exchange in a real step equal the plan's prediction."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from redline.hardware.machine import Machine
from redline.jobs.objective import job_runtime
from redline.planning.communication import Volume
from redline.planning.shards import block_tensors, root_tensors
from redline.recipe.forecast import forecast
from redline.recipe.load import load
from redline.recipe.resolve import DataFacts, Resolved, resolve
from redline.training.distributed import Ranks
from redline.training.fsdp import FSDP
from redline.training.optim import Optimizer
from redline.training.parallel import parallelize

FACTS = DataFacts(320, 10**6, 10**4, "", "bytes", "")
CPU = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
COMMON = ("train.tokens=10000", "train.device=cpu", "train.precision=fp32", "train.compile=false", "data.seq_len=16")
PLAIN = ("model.size=null", "model.layers=3", "model.d_model=64", "model.heads=4", "model.d_ff=176", "model.vocab=512")
RICH = (  # neither 3 nor 4 divides all of its widths
    *("model.size=null", "model.layers=4", "model.d_model=42", "model.heads=3", "model.kv_heads=1", "model.d_ff=102"),
    *("model.head_dim=14", "model.vocab=330", "model.mlp=relu2", "model.tied=false", "model.qk_norm=true"),
    *("model.qkv_bias=true", "model.value_embeddings=1", "model.skips=unet"),
)
# what it is, its overrides, micro-batches of a step
KINDS = {
    "plain": (PLAIN, 1),
    "rich, three micro-batches": (RICH, 3),
    "muon": ((*PLAIN, "train.optimizer=muon"), 2),
}


class Counted(TorchDispatchMode):
    """Count bytes by collective: of an all-reduce its tensor, of a gather or scatter the whole tensor, of an exchange
    the part that this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            sent = args[1:2] if name == "alltoall_base" else args
            self.bytes[name] += max(_sizes(sent), default=0)
        return func(*args, **(kwargs or {}))


def _sizes(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        return [value.nbytes]
    return [size for item in value for size in _sizes(item)] if isinstance(value, list | tuple) else []


def written() -> int:
    """Return the bytes that this process has written, sockets included."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def in_ranks(world: int, action: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return what `action` returns on each gloo rank; ranks are forks of this process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    children = []
    for rank in range(world):
        if (child := os.fork()) == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                limit = timedelta(seconds=60)
                dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=limit)
                (folder / str(rank)).write_text(json.dumps(action(rank)), encoding="utf-8")
                dist.barrier()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * world
    return [json.loads((folder / str(rank)).read_text(encoding="utf-8")) for rank in range(world)]


def planned(kind: str, mode: str, world: int) -> Resolved:
    overrides, micros = KINDS[kind]
    batch = (f"train.global_batch={world * micros}", "train.micro_batch=1", f"parallel.mode={mode}")
    recipe = load("pretrain-350m", [*COMMON, *overrides, *batch]).recipe
    return resolve(recipe, CPU, FACTS, gpus=world)


def built(resolved: Resolved) -> Any:
    runtime = job_runtime("causal_lm")
    objective = runtime.create(resolved, runtime.random_data(FACTS))
    objective.build(torch.device("cpu"))
    return objective


def counted_step(resolved: Resolved) -> Callable[[int], dict[str, int]]:
    """Count the second step of the trainer's parallel strategy; the first allocates buffers."""

    def action(rank: int) -> dict[str, int]:
        objective = built(resolved)
        ranks = Ranks(rank, resolved.batch.world, rank, joined=True)
        parallel = parallelize(resolved.recipe.parallel, ranks, objective)
        assert isinstance(parallel, FSDP) == (resolved.recipe.parallel.mode == "fsdp")
        optimizer = Optimizer(parallel.groups(), resolved.recipe.train, parallel.make_muon)
        for _ in range(2):
            with Counted() as counted:
                parallel.clear()
                for micro in range(resolved.batch.accumulation):
                    parallel.begin_micro_batch(last=micro == resolved.batch.accumulation - 1)
                    sum(term.sum for term in objective.loss(objective.worst_batch(1)).values()).backward()
                parallel.end_backward()
                optimizer.step(1.0, (torch.ones(()), torch.zeros(())), 0)
        return dict(counted.bytes)

    return action


@pytest.mark.parametrize("kind", ["plain", "rich, three micro-batches"])
def test_counted_tensors_are_those_of_the_built_model(kind: str) -> None:
    resolved = planned(kind, "ddp", 1)
    model = built(resolved).model
    sizes = [(p.shape[0], p.numel() // p.shape[0]) for p in model.blocks[0].parameters()]
    assert sorted(sizes) == sorted(block_tensors(resolved.shape))
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks.")]
    assert sorted((p.shape[0], p.numel() // p.shape[0]) for p in rest) == sorted(root_tensors(resolved.shape))


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("kind", "world"),
    [("plain", 2), ("plain", 4), ("rich, three micro-batches", 3), ("rich, three micro-batches", 4), ("muon", 3)],
)
def test_sent_bytes_equal_the_predicted_ones(kind: str, mode: str, world: int, tmp_path: Path) -> None:
    resolved = planned(kind, mode, world)
    volume = forecast(resolved).volume
    each = in_ranks(world, counted_step(resolved), tmp_path)
    together = sum((Counter(rank) for rank in each), Counter[str]())
    assert together.pop("alltoall_base", 0) == volume.exchanged
    names = {"allreduce": volume.reduced, "allgather_base": volume.gathered, "reduce_scatter_base": volume.scattered}
    assert together == {name: world * size for name, size in names.items() if size}
    assert len({json.dumps({k: v for k, v in rank.items() if k in names}, sort_keys=True) for rank in each}) == 1


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what the kernel says was written")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_socket_bytes_follow_the_ring_formula(world: int, tmp_path: Path) -> None:
    size = 3 * 4 << 18

    def action(rank: int) -> list[int]:
        tensor, share = torch.ones(size // 4), torch.ones(size // 4 // world)
        sent = []
        for collective in (dist.all_reduce, lambda tensor: dist.all_gather_into_tensor(tensor, share)):
            collective(tensor)
            begin = written()
            collective(tensor)
            sent.append(written() - begin)
        return sent

    for reduced, gathered in in_ranks(world, action, tmp_path):
        assert reduced == pytest.approx(Volume(reduced=size).sent(world), rel=0.01)
        assert gathered == pytest.approx(Volume(gathered=size).sent(world), rel=0.01)
