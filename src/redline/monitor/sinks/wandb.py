"""Weights & Biases, an extra of the set-up, then `monitor.wandb=PROJECT`."""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.monitor.events import Event
from redline.monitor.sinks.names import scalars, step_of, texts


class WeightsAndBiases:
    """One W&B run per run_id: a resumed run goes on with it, and W&B keeps the first value of a repeated step.

    W&B's own variables (WANDB_MODE, WANDB_ENTITY, …) hold. Who is not logged in is never asked for a key in the middle
    of a run: it is then recorded offline. What redline hands over is the recipe, the numbers and the texts; host,
    command and packages W&B adds by itself.
    """

    def __init__(
        self, project: str, run: Path, config: dict[str, Any], say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.project, self.run, self.config, self._say = project, run, config, say
        self._told: Counter[tuple[str, int]] = Counter()
        self._wandb: Any = None
        self._run: Any = None

    def event(self, event: Event) -> None:
        if event["type"] == "start":
            self._open(event)
        if self._run is None:
            return
        values: dict[str, Any] = dict(scalars(event))
        for tag, text in texts(event).items():
            values[self._own(tag, step_of(event))] = self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        if values:
            self._run.log(values, step=step_of(event))
        if event["type"] == "stop":
            self._run.summary["stop"] = event.get("reason")

    def _own(self, tag: str, step: int) -> str:
        """W&B keeps one value per name and step, and a run may write several samples."""
        self._told[tag, step] += 1
        return tag if self._told[tag, step] == 1 else f"{tag} {self._told[tag, step]}"

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def _open(self, event: Event) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=self.project,
            id=str(event["run_id"]),
            resume="allow",
            name=self.run.resolve().name,
            dir=str(self.run),
            config=self.config,
            mode=self._mode(wandb),
            save_code=False,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def _mode(self, wandb: Any) -> str | None:
        """None leaves it to W&B."""
        if os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False):
            return None
        self._say(f"not logged in to W&B: recorded offline, for `wandb sync {self.run}/wandb/offline-run-*` later")
        return "offline"
