"""The models of a page or a conversation, opened once, and what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.errors import UsageError, UserError
from redline.evaluate.named_model import open_model
from redline.jobs.streaming import CHAT, QUESTION, TEXT, Ask, Event, Panel

if TYPE_CHECKING:
    from redline.evaluate.opened_run import OpenedModel
    from redline.jobs.objective import Sampling

Log = Callable[[str], None]
_NO_TOKENIZER = "Set REDLINE_GPT2 to the path of a tokenizer.json, or put one beside the token files."


@dataclass(frozen=True)
class PlayModel:
    name: str  # of the API and the page: the last part of what the user typed, with its checkpoint
    typed: str  # as in `redline sample TYPED`
    opened: OpenedModel
    panels: Sequence[Panel]

    def panel(self, name: str) -> Panel | None:
        return next((panel for panel in self.panels if panel.name == name), None)

    def panel_for(self, *inputs: str) -> Panel | None:
        """Return the first panel that takes one of these kinds of input."""
        return next((panel for panel in self.panels if panel.input in inputs), None)

    @property
    def chat_panel(self) -> Panel | None:
        return self.panel_for(CHAT, QUESTION)

    @property
    def text_panel(self) -> Panel | None:
        return self.panel_for(TEXT)

    def stream(self, ask: Ask, how: Sampling) -> Iterator[Event]:
        self.opened.objective.model.eval()
        return self.opened.objective.stream(ask, how)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "typed": self.typed,
            "title": self.opened.title,
            "weights": self.opened.weights,
            "panels": [panel.as_dict() for panel in self.panels],
        }


def open_models(names: Sequence[str], *, log: Log, **options: Any) -> list[PlayModel]:
    """Open each model; names that end alike are told apart by their whole path."""
    short = [Path(name).name or name for name in names]
    return [
        open_play_model(typed, typed if short.count(name) > 1 else name, log=log, **options)
        for typed, name in zip(names, short, strict=True)
    ]


def open_play_model(typed: str, name: str, *, log: Log, **options: Any) -> PlayModel:
    opened = open_model(typed, log=log, writes_only=True, **options)
    opened.objective.log = log
    panels = opened.objective.panels()
    if not panels:
        what = "the tokenizer's files are missing, so tokens cannot be turned into text."
        raise UserError(what, where=typed, fix=_NO_TOKENIZER)
    return PlayModel(name, typed, opened, panels)


def base_of(model: PlayModel) -> str:
    """Return the name of the base that a run was trained on."""
    base = model.opened.objective.recipe.model.base
    if base is None or model.opened.weights == "base":
        fix = "Name another model: --beside RUN."
        raise UsageError("the model has no base to compare it with.", where=f"{model.typed}: --beside base", fix=fix)
    return str(base)
