"""The peers of `python -m benchmarks laptop`: what others would train with the same text, cores and minutes.

    python -m benchmarks.peers.laptop < request.json

The request names an arm, its recipe words and the seconds; the answer is one JSON line. All arms read redline's batches
and are scored on redline's held-out windows; scoring takes no time of the budget, compiling does. `nanogpt` is GPT-2
in nanoGPT's loop (see nanogpt.py). `adamw` is redline's architecture, as transformers' Qwen3, in the same plain loop.
`trainer` is that model in transformers' Trainer.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from benchmarks.peers.gpt2 import Gpt2Job
from benchmarks.peers.nanogpt import ANCHOR_STEPS, CLIP, Baseline, recipe_of
from benchmarks.reply import reply
from benchmarks.time_to_loss import Point, fitted_steps, point
from redline.data.corpus import load_text
from redline.fields import none_if_auto
from redline.hardware.host import keep_freed_memory_mapped
from redline.hardware.probe import detect_machine
from redline.jobs.causal_lm.objective import CausalLM
from redline.jobs.objective import Batch, Term, bits_per_byte
from redline.recipe.lock import git_state
from redline.recipe.resolve import Resolved, resolve
from redline.training.step import BatchLoader

CURVE = 12  # evaluations over the budget


class Qwen3Job(CausalLM):
    """redline's data and evaluation with transformers' Qwen3, which has the architecture of `quickstart`."""

    model: Any

    def build(self, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM, Qwen3Config

        shape, self.device = self.resolved.shape, device
        torch.manual_seed(self.recipe.train.seed)
        config = Qwen3Config(
            vocab_size=shape.vocab,
            hidden_size=shape.d_model,
            intermediate_size=shape.d_ff,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            head_dim=shape.head_dim,
            max_position_embeddings=self.seq_len,
            tie_word_embeddings=True,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        self.model = model.float().train().to(device)

    def compile(self) -> None:
        self.model.compile(dynamic=False)

    def loss(self, batch: Batch) -> dict[str, Term]:
        targets = batch["targets"].contiguous()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            logits: Tensor = self.model(input_ids=batch["inputs"], use_cache=False).logits
            total = nn.functional.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
            )
        return {"cross_entropy": Term(total, "tokens")}


class TimedLoop(Baseline):
    """nanoGPT's loop for a time budget on the clock, with a schedule for as many steps as were measured to fit."""

    def train_for(self, seconds: float) -> tuple[list[Point], float]:
        """Return the curve and the seconds of compiling and timing, which the budget includes."""
        begin = time.perf_counter()
        self.warm_up()
        step_ms = self.step_ms(ANCHOR_STEPS["cpu"])
        warmup = time.perf_counter() - begin
        steps = fitted_steps(max(1.0, seconds - warmup), step_ms)
        due = {round(steps * number / CURVE) for number in range(1, CURVE + 1)}
        curve, spent = [point(0, 0, 0.0, self._evaluate())], warmup
        with self._loader() as loader:
            begin = time.perf_counter()
            for step in range(steps):
                self.step(loader.next(step), self._lr_factor(step, steps))
                if step + 1 in due:
                    spent += time.perf_counter() - begin
                    curve.append(point(step + 1, (step + 1) * self.resolved.tokens_per_step, spent, self._evaluate()))
                    begin = time.perf_counter()
        return curve, warmup


class _Stream(IterableDataset[dict[str, Tensor]]):
    """redline's sequences, one at a time, as the Trainer's collator wants them."""

    def __init__(self, job: CausalLM, resolved: Resolved) -> None:
        self.job, self.resolved = job, resolved

    def __iter__(self) -> Any:
        with BatchLoader(self.job, self.resolved.batch, torch.device("cpu"), 1, 0) as loader:
            step = 0
            while True:
                for micro in loader.next(step).micros:
                    targets = micro["targets"].contiguous()
                    for row, labels in zip(micro["inputs"], targets, strict=True):
                        yield {"input_ids": row, "labels": labels, "shift_labels": labels}
                step += 1


def train_by_trainer(job: Qwen3Job, resolved: Resolved, seconds: float, folder: str) -> tuple[list[Point], float]:
    """Train by transformers' Trainer with its defaults, a cosine, and the recipe's learning rate."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    options = resolved.recipe.train
    job.build(torch.device("cpu"))

    def trainer(steps: int, callbacks: list[Any]) -> Any:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=resolved.batch.global_batch,
            learning_rate=float(options.lr),
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            max_grad_norm=CLIP,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 20),
            bf16=options.precision == "bf16",
            use_cpu=True,
            remove_unused_columns=False,  # or it drops the labels that are shifted already, and the model shifts again
            save_strategy="no",
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
            seed=options.seed,
        )
        return Trainer(model=job.model, args=arguments, train_dataset=_Stream(job, resolved), callbacks=callbacks)

    class Clock(TrainerCallback):
        """Count training time without evaluations, and record the curve."""

        def __init__(self, steps: int, spent: float) -> None:
            self.steps, self.spent, self.curve = steps, spent, [point(0, 0, 0.0, None)]

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begin = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            self.spent += time.perf_counter() - self.begin
            if state.global_step % max(1, self.steps // CURVE) == 0 or state.global_step == self.steps:
                loss = job.evaluate(resolved.batch.micro)["loss"]
                tokens = state.global_step * resolved.tokens_per_step
                self.curve.append(point(state.global_step, tokens, self.spent, loss))

    begin = time.perf_counter()
    trial = Clock(10**9, 0.0)
    weights = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    trainer(6, [trial]).train()
    step_ms = 1e3 * trial.spent / 6
    job.model.load_state_dict(weights)
    warmup = time.perf_counter() - begin
    steps = fitted_steps(max(1.0, seconds - warmup), step_ms)
    clock = Clock(steps, warmup)
    trainer(steps, [clock]).train()
    return clock.curve, warmup


def measure(arm: str, words: list[str], seconds: float, folder: str) -> dict[str, Any]:
    keep_freed_memory_mapped()  # as redline does: it would be unfair to measure page faults
    recipe = recipe_of(words)
    data = load_text(recipe)
    resolved = resolve(recipe, detect_machine("cpu"), data.facts)
    job: Any
    if arm == "trainer":
        job = Qwen3Job(resolved, data)
        curve, warmup = train_by_trainer(job, resolved, seconds, folder)
    else:
        job = (Gpt2Job if arm.startswith("nanogpt") else Qwen3Job)(resolved, data)
        curve, warmup = TimedLoop(resolved, job, none_if_auto(recipe.train.warmup_steps)).train_for(seconds)
    last = curve[-1]
    return {
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_s": last["tokens"] / last["seconds"],
        "warmup_s": round(warmup, 2),
        "evaluations": curve,
        **whole_split(job, resolved),
        "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
        "git": git_state(),
    }


def whole_split(job: CausalLM, resolved: Resolved) -> dict[str, Any]:
    """Return the loss and the bits per byte over all held-out text."""
    split = job.data.held_out
    assert split is not None
    recipe = job.recipe
    sequences = -(-(len(split) - 1) // job.seq_len)
    job.recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"sequences": sequences})})
    loss = job.evaluate(resolved.batch.micro)["loss"]
    job.recipe = recipe
    per_byte = None if split.bytes is None or loss is None else bits_per_byte(loss, len(split) - 1, split.bytes)
    return {"final_loss": loss, "bits_per_byte": per_byte}


if __name__ == "__main__":
    reply(lambda request: measure(request["arm"], request["words"], request["seconds"], request["folder"]))
