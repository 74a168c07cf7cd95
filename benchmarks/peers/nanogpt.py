"""GPT-2 trained in nanoGPT's style: the baseline of `python -m benchmarks time-to-loss`.

    python -m benchmarks.peers.nanogpt < request.json

The request holds `key=value` words, the budget in seconds, and the milliseconds of a step where they are known already;
the answer is one JSON line. Fused AdamW (0.9, 0.95), decay on matrices, gradients clipped at 1, a cosine to a tenth of
the learning rate that is fitted to the budget, bf16 autocast, the whole model compiled, micro-batches accumulated.
Betas and the schedule may be set, as for every other arm.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.peers.gpt2 import Gpt2Job, adamw
from benchmarks.reply import reply
from benchmarks.time_to_loss import EvaluationPlan, Point, figures, fitted_steps, point
from redline.bench.setting import with_defaults
from redline.data.corpus import load_text
from redline.errors import UserError
from redline.fields import none_if_auto
from redline.hardware.probe import detect_machine
from redline.jobs.objective import Batch
from redline.planning.schedule import ONE_CYCLE, lr_factor
from redline.recipe.aliases import canonical_keys
from redline.recipe.load import nest, parse_overrides, validate
from redline.recipe.lock import git_state, versions
from redline.recipe.resolve import DataFacts, Resolved, resolve
from redline.recipe.schema import Recipe
from redline.training.step import BatchLoader, StepBatch, peak_memory_gib, step_batch, to_device

NAME = "nanogpt"
MICRO = 32  # sequences
MIN_MICRO = 8  # choosing a smaller one by itself would make the baseline unfairly slow
WARMUP_SHARE = 0.05
CLIP = 1.0
UNTIMED_STEPS = 4
ANCHOR_STEPS = {"cuda": 20, "cpu": 5}
MAX_LOGITS = 1 << 31  # compiled kernels index in 32 bits
DEFAULTS = (
    "model.layers=24",
    "model.d_model=1024",
    "model.heads=16",
    "model.d_ff=4096",
    "data.tokenizer=gpt2",
    "data.seq_len=1024",
    "train.steps=1",  # until the step time is known
    "train.global_batch=128",
    "train.lr=6e-4",
    "train.weight_decay=0.1",
    "train.min_lr_ratio=0.1",
    "train.grad_checkpointing=none",
)


def recipe_of(words: list[str]) -> Recipe:
    """Return the baseline's recipe. It is not a shipped one, so that changes of those do not change the baseline."""
    flat, _, problems = canonical_keys(parse_overrides(with_defaults(DEFAULTS, words)), "command line")
    batch = flat["train.global_batch"]
    if isinstance(batch, int) and batch > 0 and "train.micro_batch" not in flat:
        flat["train.micro_batch"] = micro = max(n for n in range(1, MICRO + 1) if batch % n == 0)
        if micro < MIN_MICRO <= batch:
            what = (
                f"{batch} has no divisor from {MIN_MICRO} to {MICRO}; its micro-batch would be {micro}, which is slow."
            )
            raise UserError(what, where="train.global_batch", fix="Use a power of two, or set train.micro_batch too.")
    tree, clashes = nest(flat)
    return validate(tree, where=NAME, problems=[*problems, *clashes])


class Baseline:
    """The model and its loop."""

    def __init__(self, resolved: Resolved, job: Gpt2Job, warmup_steps: int | None) -> None:
        self.resolved, self.job, self.options = resolved, job, resolved.recipe.train
        self.warmup_steps = warmup_steps  # None: WARMUP_SHARE of the steps
        self.device = torch.device(self.options.device)
        torch.set_float32_matmul_precision("high")
        job.build(self.device)
        if self.options.compile:
            job.compile()
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.AdamW:
        options = self.options
        return adamw(self.job.model, lr=float(options.lr), weight_decay=options.weight_decay, betas=options.betas)

    def warm_up(self) -> None:
        """Compile and allocate without changing a weight."""
        micro: Batch = to_device(self.job.worst_batch(self.resolved.batch.micro), self.device)
        self.step(step_batch(self.job, [micro]), 0.0)
        self.optimizer = self._optimizer()
        self.synchronise()

    def step(self, batch: StepBatch, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.options.lr) * factor
        for micro in batch.micros:
            (self.job.loss(micro)["cross_entropy"].sum / batch.weights["tokens"]).backward()
        torch.nn.utils.clip_grad_norm_(self.job.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step_ms(self, steps: int) -> float:
        """Time a few steps on real data at a learning rate of zero, and restore the optimizer."""
        with self._loader() as loader:
            for step in range(UNTIMED_STEPS):
                self.step(loader.next(step), 0.0)
            self.synchronise()
            begin = time.perf_counter()
            for step in range(UNTIMED_STEPS, UNTIMED_STEPS + steps):
                self.step(loader.next(step), 0.0)
            self.synchronise()
            seconds = time.perf_counter() - begin
        self.optimizer = self._optimizer()
        return 1e3 * seconds / steps

    def train(self, steps: int) -> list[Point]:
        """Train and return the curve; evaluations do not count as training time."""
        plan, per_step, seconds = EvaluationPlan.over(steps), self.resolved.tokens_per_step, 0.0
        curve = [point(0, 0, 0.0, self._evaluate())]
        with self._loader() as loader:
            begin = time.perf_counter()
            for step in range(steps):
                self.step(loader.next(step), self._lr_factor(step, steps))
                if plan.at(step + 1):
                    self.synchronise()
                    seconds += time.perf_counter() - begin
                    curve.append(point(step + 1, (step + 1) * per_step, seconds, self._evaluate()))
                    begin = time.perf_counter()
        return curve

    def _loader(self) -> BatchLoader:
        return BatchLoader(self.job, self.resolved.batch, self.device, self.resolved.recipe.data.workers, 0)

    def _evaluate(self) -> float | None:
        return self.job.evaluate(self.resolved.batch.micro)["loss"]

    def _lr_factor(self, step: int, steps: int) -> float:
        return lr_factor(
            self.options.schedule,
            step=step,
            warmup=self.warmup(steps),
            progress=step / steps,
            floor=self.options.min_lr_ratio,
            decay_fraction=self.options.decay_fraction,
        )

    def warmup(self, steps: int) -> int:
        return max(1, round(WARMUP_SHARE * steps)) if self.warmup_steps is None else self.warmup_steps

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(words: list[str], budget_s: float, known_step_ms: float | None = None) -> dict[str, Any]:
    recipe = recipe_of(words)
    data = load_text(recipe)
    resolved = resolve(recipe, detect_machine(recipe.train.device), data.facts)
    _check_supported(resolved)
    baseline = Baseline(resolved, Gpt2Job(resolved, data), none_if_auto(recipe.train.warmup_steps))
    begin = time.perf_counter()
    baseline.warm_up()
    warmup_s = time.perf_counter() - begin
    step_ms = known_step_ms or baseline.step_ms(ANCHOR_STEPS[baseline.device.type])
    if baseline.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = fitted_steps(budget_s, step_ms)
    return {
        **figures(baseline.train(steps), data.facts.train_tokens),
        "anchor_step_ms": step_ms,
        "warmup_s": warmup_s,
        "memory_gib": peak_memory_gib(baseline.device),
        "lock": _lock(baseline, data.facts, steps),
        "warnings": [],
    }


def _lock(baseline: Baseline, facts: DataFacts, steps: int) -> dict[str, Any]:
    """Return the lock of a run: the part of the recipe that this loop reads, and the machine.

    A recipe describes redline's decoder. So its model is replaced by GPT-2's true shape, and its optimizer's keys by
    what the loop uses.
    """
    resolved = baseline.resolved
    chosen = {"steps": steps, "warmup_steps": baseline.warmup(steps), "optimizer": "adamw", "clip": CLIP}
    recipe = resolved.recipe.model_copy(update={"train": resolved.recipe.train.model_copy(update=chosen)})
    return {
        "recipe": {**recipe.model_dump(mode="json"), "model": baseline.job.model.description()},
        "parameters": baseline.job.model.counts(),
        "batch": {"micro": resolved.batch.micro, "global": resolved.batch.global_batch},
        "data": vars(facts),
        "machine": resolved.machine.facts(),
        "versions": versions(),
        "git": git_state(),
    }


def _check_supported(resolved: Resolved) -> None:
    recipe = resolved.recipe
    if resolved.batch.micro * recipe.data.seq_len * resolved.shape.vocab >= MAX_LOGITS:
        fix = f"Use train.micro_batch={MICRO} or less."
        raise UserError("makes more logits than compiled kernels can index.", where="train.micro_batch", fix=fix)
    if recipe.train.schedule == ONE_CYCLE:
        fix = "Use cosine, linear, wsd or constant."
        raise UserError("supports no schedule that also changes the momentum.", where="train.schedule", fix=fix)
    if recipe.train.precision not in ("bf16", "fp32"):
        raise UserError(f"supports bf16 and fp32, not {recipe.train.precision}.", where=NAME)


if __name__ == "__main__":
    reply(
        lambda request: measure(request["words"], request["budget_s"], request.get("step_ms")),
        too_large=f"{NAME}: the micro-batch does not fit into memory. Use a smaller train.micro_batch.",
    )
