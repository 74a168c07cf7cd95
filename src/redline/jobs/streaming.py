"""The panels of a job, and the events of what its model writes, for chat, `redline play` and the API.

A job says which panels it offers and yields events. Pages and terminals draw events by their kind, so they know no job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from redline.data.chat import Message

CHAT, QUESTION, TEXT = "chat", "question", "text"
STOP, LENGTH, CANCELLED = "stop", "length", "cancelled"
CONTROLS = ("tokens", "temperature", "top_k", "top_p", "seed")


@dataclass(frozen=True)
class Choice:
    """One of a few values that the user picks."""

    name: str
    title: str
    values: tuple[str, ...]
    setting: str = ""  # the KEY of `--set KEY=VALUE` that does the same in `redline sample`


@dataclass(frozen=True)
class Panel:
    """One way to use a model."""

    name: str
    title: str
    # chat: turns with history, and a system prompt; question: one question without history; text: one text
    input: str
    hint: str = ""
    controls: tuple[str, ...] = CONTROLS  # the fields of a Sampling that have an effect
    choices: tuple[Choice, ...] = ()
    fields: tuple[tuple[str, str], ...] = ()  # name and title of further texts
    options: tuple[str, ...] = ()  # of `redline sample`, to do the same
    system: str | None = None  # the system prompt of the training rows, used unless another one is given

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Ask:
    """What a user asks of a panel. Its `Sampling` is passed beside it."""

    panel: str
    messages: tuple[Message, ...]  # for a question or a text: one message
    choices: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    alternatives: int | None = None  # how many likely tokens to report beside each token

    @property
    def text(self) -> str:
        """The text of the last message."""
        return self.messages[-1].content if self.messages else ""


@dataclass(frozen=True)
class Event:
    """Something that happened in a section of the output."""

    kind: ClassVar[str]
    section: str

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Section(Event):
    """A section begins."""

    kind: ClassVar[str] = "section"
    title: str = ""
    note: str = ""
    prompt_tokens: int = 0  # that the model reads before it writes the section


@dataclass(frozen=True)
class Token(Event):
    """A token was appended. Its text may be empty: a character can have several tokens."""

    kind: ClassVar[str] = "token"
    text: str
    logprob: float | None = None  # under the model itself, before temperature and filters
    likeliest: tuple[tuple[str, float], ...] = ()  # tokens and their log-probabilities


@dataclass(frozen=True)
class Cells(Event):
    """The section has this many masked positions, which are denoised block by block."""

    kind: ClassVar[str] = "cells"
    blocks: tuple[int, ...]  # sizes


@dataclass(frozen=True)
class Unmasked(Event):
    """One forward pass replaced masks in some places of the section."""

    kind: ClassVar[str] = "unmasked"
    places: tuple[int, ...]
    texts: tuple[str, ...]
    probabilities: tuple[float | None, ...]  # of the chosen tokens; None: filled after the end, without a pass
    forwards: int  # passes so far


@dataclass(frozen=True)
class HeatMap(Event):
    """A matrix of values, a row each."""

    kind: ClassVar[str] = "heat_map"
    title: str
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Finished(Event):
    """The section is complete."""

    kind: ClassVar[str] = "finished"
    text: str
    reason: str = STOP
    tokens: int = 0
    forwards: int = 0


class Transcript:
    """Joins the texts of sections as `redline sample` does: one below the other."""

    def __init__(self) -> None:
        self.text, self._shown, self._finished, self._separated = "", 0, 0, 0

    def add(self, event: Event) -> str:
        """Return what the event adds to the text."""
        if isinstance(event, Token):
            added, self._shown = event.text, self._shown + len(event.text)
        elif isinstance(event, Finished):
            added = event.text[self._shown :]  # all of it, in sections that are not written token by token
        else:
            return ""
        if self._separated < self._finished:
            added, self._separated = f"\n{added}", self._finished
        if isinstance(event, Finished):
            self._finished, self._shown = self._finished + 1, 0
        self.text += added
        return added
