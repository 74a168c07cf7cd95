"""Tiny untrained models of all five jobs, opened as `redline play` opens them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from finetuning import CPU
from redline.data.chat import USER, Message
from redline.evaluate.opened_run import OpenedModel
from redline.jobs.objective import Sampling, job_runtime
from redline.jobs.streaming import Ask, Event
from redline.play.models import PlayModel
from redline.recipe.load import load
from redline.recipe.resolve import resolve

HDP = (
    "objective=hierarchical_diffusion",
    "hierarchical_diffusion.question=64",
    "hierarchical_diffusion.plan=32",
    "hierarchical_diffusion.plan_block=32",
    "hierarchical_diffusion.execution=64",
    "hierarchical_diffusion.execution_block=16",
    "data.seq_len=160",
    "data.source=problems:easy:60",
    "data.pack=false",
    "data.val_fraction=0.2",
    "train.global_batch=4",
)


def built(recipe: Any, spread: float = 0.1) -> Any:
    """Return the objective of a recipe, with weights that are large enough for texts to differ."""
    runtime = job_runtime(recipe.objective)
    recipe = runtime.complete(recipe, lambda text: None)
    data = runtime.load_data(recipe)
    objective = runtime.create(resolve(recipe, CPU, data.facts), data)
    objective.build(torch.device("cpu"))
    torch.manual_seed(7)
    for parameter in objective.model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter.data, 0.0, spread)
    objective.model.eval()
    return objective


def model(name: str, objective: Any) -> PlayModel:
    opened = OpenedModel(f"runs/{name}", f"runs/{name} at step 3 (raw weights)", objective, 3, "raw", 1)
    return PlayModel(name, f"runs/{name}", opened, objective.panels())


def text_model(tiny: Sequence[str], corpus: Path, *overrides: str, name: str = "text") -> PlayModel:
    words = [*tiny, f"data.source={corpus}", "train.steps=1", *overrides]
    return model(name, built(load("quickstart", words).recipe))


def chat_model(base: Path, rows: Path, folder: Path, name: str = "chat") -> PlayModel:
    recipe = {
        "objective": "finetune",
        "finetune": {"method": "lora"},
        "model": {"base": str(base), "lora": {"r": 4, "alpha": 8}},
        "data": {"source": str(rows), "seq_len": 96, "val_fraction": 0.1},
        "train": {"device": "cpu", "precision": "fp32", "compile": False, "lr": 1e-2, "global_batch": 4, "steps": 1},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return model(name, built(load(str(file), []).recipe))


def latent_model(bases: Sequence[Path], rows: Path, folder: Path, name: str = "latents") -> PlayModel:
    first, *others = map(str, bases)
    size = {"d_z": 16, "slots": 4, "layers": 1, "heads": 2, "bytes": 64}
    recipe = {
        "objective": "latent_prefix",
        "model": {"base": first},
        "latent_prefix": {"others": others, **size},
        "data": {"source": str(rows), "val_fraction": 0.2},
        "train": {"device": "cpu", "precision": "fp32", "compile": False, "global_batch": 8, "steps": 1},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return model(name, built(load(str(file), []).recipe))


def ask(text: str, panel: str = "", **options: Any) -> Ask:
    return Ask(panel, (Message(USER, text),), **options)


def events_of(one: PlayModel, question: Ask, **sampling: Any) -> list[Event]:
    return list(one.stream(question, Sampling(**sampling)))


def served(app_server: Any) -> Iterator[str]:
    """Serve from a thread while a test runs."""
    import threading

    server, address = app_server
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield address
    server.shutdown()
    thread.join()
    server.server_close()
