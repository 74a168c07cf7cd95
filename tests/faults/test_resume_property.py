"""R7, R8: random runs with random stops and bad steps resume to the same bits as without the stops."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from finetuning import Tuning
from latents import Latents, other_base, write_rows
from redline.training.checkpoint import newest_valid, step_name
from redline.training.control import RunDirectory

STEPS = 7
OF_ALL = {
    "train.accumulation": (1, 2, 4),
    "train.optimizer": ("adamw", "muon", "normuon"),
    "train.ema": ("null", 0.9),
    "train.schedule": ("cosine", "wsd", "constant"),
    "data.workers": (0, 1, 3),
    "train.seed": (1, 2, 3),
    "eval.every": (2, 1000),
    "checkpoint.every": (2, 3, 1000),
}
OF_TEXT = {"model.dropout": (0, 0.1), "data.pack": ("true", "false"), "model.qk_norm": ("true", "false")}
OF_OWN_MODELS = {
    "model.mlp": ("swiglu", "relu2"),
    "model.tied": ("true", "false"),
    "model.softcap": ("null", 15),
    "model.skips": ("none", "x0", "unet"),
    "model.value_embeddings": (0, 1),
    "model.init": ("gpt2", "zero"),
}
JOBS: dict[str, tuple[str, ...]] = {
    "text": (),
    "blocks": ("objective=block_diffusion", "block_diffusion.block_size=8", "data.pack=false"),
    "searched": (
        *("objective=block_diffusion", "block_diffusion.block_size=4", "block_diffusion.clip_search=true"),
        *("data.pack=false", "eval.every=2"),
    ),
    "plans": (
        *("objective=hierarchical_diffusion", "hierarchical_diffusion.question=160", "hierarchical_diffusion.plan=96"),
        *(
            "hierarchical_diffusion.execution=128",
            "data.seq_len=384",
            "data.source=problems:easy:30",
            "data.pack=false",
        ),
    ),
    "tuned": (),
    "latent": ("latent_prefix.fade_steps=5", "latent_prefix.private_slots=1"),
}


def made_up(chance: random.Random, job: str) -> tuple[str, ...]:
    """Draw a recipe of this job with random options."""
    drawn = OF_ALL | (OF_TEXT if job == "text" else {}) | ({} if job in ("tuned", "latent") else OF_OWN_MODELS)
    options = {key: chance.choice(values) for key, values in drawn.items()}
    if job == "tuned":
        options |= {"train.global_batch": 4, "train.optimizer": "adamw", "model.lora.dropout": chance.choice((0, 0.1))}
    else:
        options |= {"train.global_batch": 8}
    options["train.micro_batch"] = options["train.global_batch"] // options["train.accumulation"]
    words = [f"{key}={value}" for key, value in options.items()]
    return (*words, *JOBS[job], f"train.steps={STEPS}")


def poison(trainer: Any, at: set[int], value: float) -> None:
    """Make the loss of these steps not finite."""
    plain = trainer.objective.loss

    def loss(batch: Any) -> Any:
        terms = plain(batch)
        if trainer.state.step not in at or not torch.is_grad_enabled():
            return terms
        first = next(iter(trainer.parameters.values()))
        return {n: type(t)(t.sum + value * first.sum(), t.weight, t.coefficient) for n, t in terms.items()}

    trainer.objective.loss = loss


class Trials:
    def __init__(self, world: Any, worlds: dict[str, Any], tensors_of: Any, folder: Path) -> None:
        self.worlds, self.tensors_of, self.folder = worlds, tensors_of, folder
        self.world = world

    def run(self, name: str, job: str, options: tuple[str, ...], bad: set[int], value: float, stops: list[int]) -> Any:
        """Train with an interruption after each of `stops`; return the final tensors."""
        world, path = self.worlds.get(job, self.world), self.folder / name
        for stop in [*stops, None]:
            with RunDirectory(path) as run:
                trainer = world.trainer(run, *options, checkpoint=newest_valid(run.checkpoints))
                poison(trainer, bad, value)
                if stop is not None:
                    _stop_after(world, trainer, stop)
                trainer.run()
                trainer.monitor.log.close()
        found = self.tensors_of(path / "checkpoints" / step_name(STEPS))
        shutil.rmtree(path)
        return found


def _stop_after(world: Any, trainer: Any, step: int) -> None:
    world.around(trainer, before=lambda number: number == step - 1 and os.kill(os.getpid(), signal.SIGTERM))


@pytest.fixture
def trials(world: Any, corpus: Path, tiny_base: Path, answers: Path, tensors_of: Any, tmp_path: Path) -> Trials:
    tuned, latent = type(world)(corpus), type(world)(corpus)
    Tuning(tuned, tiny_base, answers, tmp_path)  # its recipes are of fine-tuning
    Latents(latent, [tiny_base, other_base(tmp_path / "second")], write_rows(tmp_path / "rows.jsonl"), tmp_path)
    return Trials(world, {"tuned": tuned, "latent": latent}, tensors_of, tmp_path)


@pytest.mark.parametrize("cases", [24, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])])
def test_a_stopped_run_resumes_bit_for_bit(trials: Trials, say: Any, cases: int) -> None:
    chance, differing, stopped, poisoned = random.Random(cases), [], 0, 0
    for case in range(cases):
        job = list(JOBS)[case % len(JOBS)]
        options = made_up(chance, job)
        stops = sorted(chance.sample(range(1, STEPS), chance.randint(1, 2)))
        bad = set(chance.sample(range(STEPS - 1), chance.choice((0, 1, 2, 3, 3))))
        value = chance.choice((float("nan"), float("inf"), float("-inf")))
        whole = trials.run("whole", job, options, bad, value, [])
        parts = trials.run("parts", job, options, bad, value, stops)
        stopped, poisoned = stopped + len(stops), poisoned + len(bad)
        same = whole.keys() == parts.keys() and all(torch.equal(t, parts[name]) for name, t in whole.items())
        finite = all(t.isfinite().all() for t in whole.values() if t.is_floating_point())
        if not (same and finite):
            differing.append((job, options, stops, bad, value))
    say(f"R7: {cases} recipes of {len(JOBS)} jobs, stopped {stopped} times, {len(differing)} differ in a bit")
    say(f"R8: {poisoned} steps that were not finite, in {cases} runs; none reached a tensor")
    assert not differing, differing[0]


def test_a_seed_without_the_step_is_noticed(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropout seed that counts from the start of the process and not by the step."""
    from redline.training import step as steps

    plain = steps.Step.backward
    drawn = {"count": 0}

    def forgetful(self: Any, step: int, batch: Any) -> Any:
        drawn["count"] += 1
        return plain(self, drawn["count"], batch)

    monkeypatch.setattr(steps.Step, "backward", forgetful)
    options = (*made_up(random.Random(1), "text"), "model.dropout=0.2")
    whole = trials.run("whole", "text", options, set(), 0.0, [])
    parts = trials.run("parts", "text", options, set(), 0.0, [3])
    assert any(not torch.equal(tensor, parts[name]) for name, tensor in whole.items())
