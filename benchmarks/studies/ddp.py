"""Measure redline's DDP beside torch's on gloo: `python -m benchmarks.studies.ddp OUT.json`

Each of two ranks runs the backward passes of a step with both in turn, over the same model and batch. torch's
`DistributedDataParallel` wraps a module whose forward is the objective's loss, so that it works for objectives that
call their model in other ways than `forward`. Both sum; neither sends anything before the last micro-batch.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from redline.hardware.machine import Machine
from redline.jobs.objective import job_runtime
from redline.recipe.load import load
from redline.recipe.lock import git_state, versions
from redline.recipe.resolve import DataFacts, resolve
from redline.training.distributed import Ranks
from redline.training.parallel import DDP

RANKS, ROUNDS, STEPS = 2, 7, 4
FACTS = DataFacts(4096, 10**6, 10**4, "", "bytes", "")
CPU = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)
MODEL = (
    "model.layers=6",
    "model.d_model=256",
    "model.heads=4",
    "model.d_ff=704",
    "model.vocab=4096",
    "data.seq_len=128",
    "train.device=cpu",
    "train.precision=fp32",
)
REST = ("train.compile=false", "train.tokens=1M", "train.micro_batch=2", "parallel.mode=ddp")


class Loss(nn.Module):
    """The objective's loss as a module's forward."""

    def __init__(self, objective: Any) -> None:
        super().__init__()
        self.objective, self.model = objective, objective.model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.stack([term.sum for term in self.objective.loss(batch).values()]).sum()


# torch inspects the annotations of a hook, so this module does not make them strings.
def summed(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum the gradients of a bucket over the ranks; by default torch takes their mean."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def objective_of() -> Any:
    recipe = load("pretrain-350m", [*MODEL, *REST, "train.global_batch=16"]).recipe
    runtime = job_runtime("causal_lm")
    objective = runtime.create(resolve(recipe, CPU, FACTS, gpus=RANKS), runtime.random_data(FACTS))
    objective.build(torch.device("cpu"))
    return objective


def measure(rank: int) -> list[dict[str, Any]]:
    ours, theirs = objective_of(), objective_of()
    strategy = DDP(Ranks(rank, RANKS, rank, joined=True), ours)
    plain = Loss(theirs)
    wrapped = {
        "torch": DistributedDataParallel(plain, gradient_as_bucket_view=True),
        "torch, unused parameters": DistributedDataParallel(
            Loss(objective_of()), gradient_as_bucket_view=True, find_unused_parameters=True
        ),
    }
    for module in wrapped.values():
        module.register_comm_hook(None, summed)
    batch, loss = ours.worst_batch(2), Loss(ours)

    def of_redline(micros: int) -> None:
        strategy.clear()
        for micro in range(micros):
            strategy.begin_micro_batch(last=micro == micros - 1)
            loss(batch).backward()
        strategy.end_backward()

    def of_torch(module: DistributedDataParallel) -> Callable[[int], None]:
        def step(micros: int) -> None:
            module.zero_grad(set_to_none=True)
            for micro in range(micros):
                with module.no_sync() if micro < micros - 1 else nullcontext():
                    module(batch).backward()

        return step

    steps = {"redline": of_redline, **{name: of_torch(module) for name, module in wrapped.items()}}
    found = []
    for micros in (1, 4):
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for round_ in range(ROUNDS + 1):
            for name, step in steps.items():
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(STEPS):
                    step(micros)
                if round_:  # the first round allocates
                    seconds[name].append((time.perf_counter() - begin) / STEPS)
        first = next(strategy.model.parameters()).grad
        other = next(plain.model.parameters()).grad
        assert first is not None
        assert other is not None
        apart = float((first - other).abs().max() / first.abs().max())
        each = {name: round(1e3 * statistics.median(values), 2) for name, values in seconds.items()}
        found.append({"name": f"{micros} micro-batches", "milliseconds": each, "gradients_apart": apart})
    return found


def main() -> None:
    folder, children = Path(tempfile.mkdtemp()), []
    for rank in range(RANKS):
        if (child := os.fork()) == 0:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
            found = measure(rank)
            if rank == 0:
                (folder / "found").write_text(json.dumps(found), encoding="utf-8")
            dist.barrier()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    rows = json.loads((folder / "found").read_text(encoding="utf-8"))
    about = {"what": __doc__.splitlines()[0], "ranks": RANKS, "git": git_state(), "versions": versions()}
    result = {**about, "rows": rows}
    text = json.dumps(result, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
