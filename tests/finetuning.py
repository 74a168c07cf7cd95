"""Fine-tuning runs within a test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from redline.hardware.machine import Machine
from redline.jobs.objective import job_runtime
from redline.recipe.load import load
from redline.recipe.resolve import resolve

CPU = Machine("cpu", "a CPU", 8 << 30, 2, cpu_flops=1e11)


class Tuning:
    """The fixture `world` for fine-tuning: a pretrained base and rows of conversations in place of text."""

    def __init__(self, world: Any, base: Path, rows: Path, folder: Path) -> None:
        self.world, self.base, self.file = world, base, folder / "tune.yaml"
        recipe = {
            "objective": "finetune",
            "model": {"base": str(base), "lora": {"r": 4, "alpha": 8}},
            "data": {"source": str(rows), "seq_len": 96, "val_fraction": 0.1},
            "train": {"device": "cpu", "precision": "fp32", "compile": False, "lr": 1e-2, "global_batch": 4},
            "eval": {"every": 1000, "samples": 0},
            "checkpoint": {"every": 1000},
            "monitor": {"log_every": 1},
        }
        self.file.write_text(yaml.safe_dump(recipe))
        world.recipe = self.recipe

    def recipe(self, *overrides: str) -> Any:
        steps = () if any(word.startswith("train.steps") for word in overrides) else ("train.steps=6",)
        # The recipe sets model.lora, which finetune.method=full refuses: put its defaults back.
        no_lora = ("model.lora.r=16", "model.lora.alpha=16") if "finetune.method=full" in overrides else ()
        return load(str(self.file), [*steps, *no_lora, *overrides]).recipe

    def run(self, path: Path, *overrides: str, **options: Any) -> Any:
        return self.world.run(path, *overrides, **options)

    def objective(self, *overrides: str, machine: Machine = CPU) -> Any:
        runtime = job_runtime("finetune")
        recipe = runtime.complete(self.recipe(*overrides), lambda text: None)
        data = runtime.load_data(recipe)
        resolved = resolve(recipe, machine, data.facts)
        objective = runtime.create(resolved, data)
        objective.build(torch.device(machine.device))
        return objective
