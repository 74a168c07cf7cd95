"""What a run shows of itself while it trains: metrics on what is held out, and texts it writes.

Every rank computes the same sequences: what a job decides by them, all decide, and a model that is shared by rows takes
all of them for a forward. The first rank's numbers count, and it alone writes them down.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redline.monitor.monitor import Monitor
from redline.monitor.throughput import Throughput
from redline.objectives.base import Sampling
from redline.recipe.schema import Eval
from redline.train.optim import Ema
from redline.train.pace import Pace
from redline.train.parallel import Parallel
from redline.train.pulse import PULSE
from redline.train.state import TrainState


class Looking:
    def __init__(
        self, parallel: Parallel, ema: Ema | None, monitor: Monitor, throughput: Throughput, pace: Pace, seed: int
    ) -> None:
        self.parallel, self.ema, self.monitor = parallel, ema, monitor
        self.throughput, self.pace, self.seed = throughput, pace, seed
        self.evaluated_at: int | None = None

    def evaluate(self, state: TrainState, micro: int) -> TrainState:
        PULSE.at("evaluating", state.step)
        metrics: dict[str, Any] = {}
        with self.throughput.paused(), self._weights():
            self.pace.timed("evaluation", lambda: metrics.update(self._metrics(micro)))
        self.evaluated_at = state.step
        self.monitor.emit("eval", step=state.step, tokens=state.tokens, **metrics)
        return state.evaluated(metrics.get("loss"))

    def _metrics(self, micro: int) -> dict[str, Any]:
        objective, ranks = self.parallel.objective, self.parallel.ranks
        metrics, decided = ranks.from_first([objective.evaluate(micro), objective.state()])
        if not ranks.first:
            objective.load_state(decided)
        return dict(metrics)

    def sample(self, state: TrainState, label: str, options: Eval) -> None:
        if options.samples:
            PULSE.at("sampling", state.step)
            with self.throughput.paused(), self._weights():
                self.pace.timed("samples", lambda: self._write(state, label, options))

    def _write(self, state: TrainState, label: str, options: Eval) -> None:
        count = 1 if label == "before" else options.samples  # noise is the same everywhere
        how = Sampling(count=count, tokens=options.sample_tokens, seed=self.seed)
        objective = self.parallel.objective
        prompt = objective.first_prompt() if options.prompt is None else options.prompt
        for sample in objective.sample(prompt, how):
            self.monitor.emit("sample", step=state.step, label=label, prompt=sample.prompt, text=sample.text)

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """The average of the weights, if one is kept."""
        if self.ema is not None:
            self.ema.swap()
        try:
            yield
        finally:
            self.parallel.rest()
            if self.ema is not None:
                self.ema.swap()
