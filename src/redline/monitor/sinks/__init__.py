"""Trackers: the event stream, told to other programs. TensorBoard always, Weights & Biases when asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from redline.errors import Problem, RecipeError, install_hint
from redline.monitor.monitor import Sink
from redline.recipe.schema import MonitorSection

DEFAULT_PROJECT = "redline"


def require_packages(options: MonitorSection) -> None:
    """Before anything is prepared: what a recipe asks for must be installed."""
    if options.wandb is not False and find_spec("wandb") is None:
        fix = f"Install it: {install_hint('wandb')}; or leave it out with monitor.wandb=false."
        raise RecipeError("recipe", [Problem("monitor.wandb", "needs the package wandb.", fix)])


def sinks_for(
    options: MonitorSection, run: Path, config: dict[str, Any], say: Callable[[str], None] = lambda _: None
) -> list[Sink]:
    """The trackers of a run. None of them does anything before the first event."""
    from redline.monitor.sinks.tensorboard import TensorBoard

    sinks: list[Sink] = [TensorBoard(run / "tensorboard")]
    if options.wandb is not False:
        from redline.monitor.sinks.wandb import WeightsAndBiases

        project = DEFAULT_PROJECT if options.wandb is True else str(options.wandb)
        sinks.append(WeightsAndBiases(project, run, config, say))
    return sinks
