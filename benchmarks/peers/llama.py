"""transformers' Llama in a plain training loop: a peer of `python -m benchmarks throughput`.

    python -m benchmarks.peers.llama < request.json

The request names a recipe and its overrides; the answer is one JSON line. Shape, tokens, batch, clipping and learning
rate are the recipe's. The weights are float32 under bf16 autocast, which is what transformers' own trainer does for
`bf16=True` (plain float32 where the recipe asks for that); AdamW is torch's fused one, the attention SDPA, and the
model is compiled if the recipe is.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.reply import has_room, reply
from redline.bench.throughput import card_figures, data_wait_share, median
from redline.errors import UserError
from redline.hardware.nvml import Nvml
from redline.hardware.probe import detect_machine
from redline.jobs.base import export_problems
from redline.jobs.objective import Batch, Objective, job_runtime
from redline.models.families import to_config
from redline.planning.batch import BatchPlan
from redline.recipe.load import load
from redline.recipe.resolve import Resolved, resolve
from redline.training.step import BatchLoader, Rates, Throughput, peak_memory_gib, to_device
from redline.training.trial import kernel_time

MAX_LOGITS = 1 << 31  # compiled kernels index in 32 bits
PROFILED_STEPS = 3


class Peer:
    """The model and its training loop."""

    def __init__(self, resolved: Resolved, objective: Objective) -> None:
        self.resolved, self.objective, self.train = resolved, objective, resolved.recipe.train
        self.device = torch.device(self.train.device)
        self.model = _model(resolved).to(self.device)
        self.forward = torch.compile(self.model, dynamic=False) if self.train.compile else self.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.train.lr,
            betas=self.train.betas,
            eps=self.train.eps,
            weight_decay=self.train.weight_decay,
            fused=True,
        )

    def step(self, micros: list[Batch]) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for micro in micros:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.train.precision == "bf16"):
                targets = micro["targets"].contiguous()
                answer = self.forward(input_ids=micro["inputs"], labels=targets, shift_labels=targets, use_cache=False)
            loss = answer.loss / len(micros)
            loss.backward()
            total += loss.detach()
        if self.train.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def warm_up(self) -> BatchPlan:
        """Halve the recipe's micro-batch until it fits, and compile on the way."""
        plan: BatchPlan | None = self.resolved.batch
        per_sequence = self.resolved.recipe.data.seq_len * self.resolved.shape.vocab
        while plan is not None:
            if plan.micro * per_sequence < MAX_LOGITS and self._fits(plan):
                return plan
            plan = plan.halved()
        raise UserError("The smallest micro-batch does not fit into memory.")

    def _fits(self, plan: BatchPlan) -> bool:
        worst = to_device(self.objective.worst_batch(plan.micro), self.device)
        return has_room(lambda: self.step([worst]), self.optimizer)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _model(resolved: Resolved) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    recipe = resolved.recipe
    values = to_config(recipe.model, seq_len=recipe.data.seq_len, eot=0, dtype="float32")
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(recipe.train.seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().train()


def measure(name: str, overrides: list[str]) -> dict[str, Any]:
    recipe = load(name, overrides).recipe
    runtime = job_runtime(recipe.objective)
    data = runtime.load_data(recipe)
    resolved = resolve(recipe, detect_machine(recipe.train.device), data.facts)
    _check_supported(resolved)
    objective = runtime.create(resolved, data)
    peer = Peer(resolved, objective)
    begin = time.perf_counter()
    plan = peer.warm_up()
    peer.synchronise()
    warmup = time.perf_counter() - begin
    if peer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    rates, losses, readings = _timed(peer, objective, plan)
    steady = rates[1:] or rates
    figures = {name: median([getattr(rate, name) for rate in steady]) for name in Rates.__dataclass_fields__}
    return {
        **figures,
        **card_figures(readings, resolved.tokens_per_step),
        "data_wait_share": data_wait_share(figures),
        "memory_gib": peak_memory_gib(peer.device),
        **_kernels(peer, objective, plan),
        "micro_batch": plan.micro,
        "steps": resolved.horizon_steps,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "warmup_s": warmup,
        "compiled": resolved.recipe.train.compile,
        "precision": resolved.recipe.train.precision,
    }


def _timed(peer: Peer, objective: Objective, plan: BatchPlan) -> tuple[list[Rates], list[float], list[dict[str, Any]]]:
    resolved, every = peer.resolved, peer.resolved.recipe.monitor.log_every
    throughput = Throughput(resolved.flops, resolved.machine.peak("bf16"))
    card = Nvml() if peer.device.type == "cuda" else None
    rates, losses, readings = [], [], []
    steps = resolved.horizon_steps or 1
    with BatchLoader(objective, plan, peer.device, resolved.recipe.data.workers, 0) as loader:
        throughput.begin()
        for step in range(steps):
            batch = loader.next(step)
            loss = peer.step(batch.micros)
            throughput.add(resolved.tokens_per_step, batch.wait_seconds)
            if (step + 1) % every == 0 or step + 1 == steps:
                losses.append(loss.item())
                rate = throughput.read()
                rates += [rate] if rate else []
                readings += [{"step": step + 1, "time": time.time(), **card.read().fields()}] if card else []
    return rates, losses, readings


def _kernels(peer: Peer, objective: Objective, plan: BatchPlan) -> dict[str, float]:
    """Return the milliseconds of a step in kernels, and their share of the wall time."""
    micro = to_device(objective.worst_batch(plan.micro), peer.device)

    def steps() -> None:
        for _ in range(PROFILED_STEPS):
            peer.step([micro] * plan.accumulation)

    busy = kernel_time(steps, peer.device)
    return {} if busy is None else {"kernel_ms": 1e3 * busy.kernels / PROFILED_STEPS, "kernel_share": busy.share}


def _check_supported(resolved: Resolved) -> None:
    recipe = resolved.recipe
    if problems := export_problems(recipe.model):
        raise UserError(problems[0].line())
    if recipe.data.pack:
        raise UserError("This peer does not support data.pack: it has no attention mask between documents.")
    if recipe.train.precision not in ("bf16", "fp32"):
        raise UserError(f"This peer supports bf16 and fp32, not {recipe.train.precision}.")


if __name__ == "__main__":
    reply(
        lambda request: measure(request["recipe"], request["overrides"]),
        too_large="The weights and the optimizer do not fit into memory.",
    )
