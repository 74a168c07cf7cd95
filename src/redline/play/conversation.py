"""A conversation in the terminal with one model, or with two side by side."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from redline.cache import read_text, write_atomically
from redline.data.chat import ASSISTANT, SYSTEM, USER, Message
from redline.errors import UsageError, UserError
from redline.jobs.objective import Sampling
from redline.jobs.streaming import CHAT, LENGTH, Ask, Event, Finished, Transcript
from redline.play.models import PlayModel

HELP = """/reset        begin again
/system TEXT  begin again under another system prompt
/save FILE    append the conversation to a .jsonl file, as a row that redline can train on
/help         show this
/exit         leave, as Ctrl-D does
Ctrl-C stops an answer. A line that ends with \\ continues on the next one."""


def printable(text: str) -> str:
    """Replace control characters, with which a model could move the cursor or recolour the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


@dataclass
class Side:
    """One model's half of a conversation: the questions are shared, the answers are its own."""

    model: PlayModel
    title: str
    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        panel = self.model.chat_panel
        if panel is None:
            fix = f"Use `redline sample {self.model.typed} --prompt TEXT` or `redline play {self.model.typed}`."
            raise UsageError("the model continues texts, and answers no messages.", where=self.model.typed, fix=fix)
        self.panel = panel
        if self.system is not None and panel.input != CHAT:
            fix = "Leave out --system and /system."
            raise UsageError("the model has no chat template for a system prompt.", where=self.model.typed, fix=fix)

    def messages(self) -> tuple[Message, ...]:
        system = () if self.system is None else (Message(SYSTEM, self.system),)
        # A model without a chat template answers each question by itself.
        return (*system, *self.turns) if self.panel.input == CHAT else tuple(self.turns[-1:])

    def answer(self, how: Sampling) -> Iterator[Event]:
        return self.model.stream(Ask(self.panel.name, self.messages()), how)


class Answer(Transcript):
    """The text of an answer so far."""

    cut = False  # at the most tokens of an answer

    def add(self, event: Event) -> str:
        self.cut = self.cut or (isinstance(event, Finished) and event.reason == LENGTH)
        return super().add(event)


class Conversation:
    def __init__(self, sides: Sequence[Side], how: Sampling, out: IO[str] = sys.stdout) -> None:
        self.sides, self.how, self.out, self._number = sides, how, out, 0

    def reset(self, system: str | None = None) -> None:
        for side in self.sides:
            side.turns.clear()
            if system is not None:
                side.system = system
                side.__post_init__()

    def ask(self, text: str) -> bool:
        """Let each side answer; return whether the answers were stopped by Ctrl-C. What was written is kept."""
        how = replace(self.how, seed=self.how.seed + self._number)
        for side in self.sides:
            side.turns.append(Message(USER, text))
        answers = [Answer() for _ in self.sides]
        stopped = False
        try:
            (self._write if len(self.sides) == 1 else self._write_beside)(answers, how)
        except KeyboardInterrupt:
            stopped = True
        except UserError:
            for side in self.sides:
                side.turns.pop()
            raise
        for side, answer in zip(self.sides, answers, strict=True):
            side.turns.append(Message(ASSISTANT, answer.text))
        self._number += 1
        return stopped

    def _write(self, answers: Sequence[Answer], how: Sampling) -> None:
        answer = answers[0]
        for event in self.sides[0].answer(how):
            self.out.write(printable(answer.add(event)))
            self.out.flush()
        if answer.cut:
            self.out.write(f"\n(cut at {how.tokens:,} tokens)" if "tokens" in self.sides[0].panel.controls else "")

    def _write_beside(self, answers: Sequence[Answer], how: Sampling) -> None:
        """Let the models write in turns, a token each; the screen shows a column for each."""
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self.out)
        events = [side.answer(how) for side in self.sides]
        with Live(console=console, transient=True, auto_refresh=False) as live:
            try:
                for _ in _in_turns(events, answers):
                    if console.is_terminal:
                        live.update(self._columns(answers, console.height - 2), refresh=True)
            finally:
                live.update("")
                console.print(self._columns(answers))

    def _columns(self, answers: Sequence[Answer], height: int | None = None) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=True, box=None, padding=(0, 2, 0, 0))
        for side in self.sides:
            table.add_column(Text(side.title), ratio=1, overflow="fold")
        shown = [printable(answer.text) for answer in answers]
        if height is not None:  # the end of each text: a table taller than the screen could not be redrawn
            shown = ["\n".join(text.splitlines()[-max(1, height // 2) :]) for text in shown]
        table.add_row(*(Text(text) for text in shown))
        return table

    def save(self, path: Path) -> None:
        """Append one row for each side that has answered."""
        rows = [[*side.messages()] for side in self.sides if side.turns]
        lines = [json.dumps({"messages": [vars(turn) for turn in row]}, ensure_ascii=False) + "\n" for row in rows]
        try:
            before = read_text(path) if path.exists() else ""
            if before and not before.endswith("\n"):
                before += "\n"  # the last row of another program may lack it
            write_atomically(path, before + "".join(lines))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "the file holds something else than text"
            what = f"the conversation cannot be saved there ({reason})."
            raise UserError(what, where=str(path), fix="Name another file after /save.") from None


def _in_turns(events: Sequence[Iterator[Event]], answers: Sequence[Answer]) -> Iterator[None]:
    unfinished = list(range(len(events)))
    while unfinished:
        for number in list(unfinished):
            event = next(events[number], None)
            if event is None:
                unfinished.remove(number)
            else:
                answers[number].add(event)
        yield


def read_line(prompt: str, read: Callable[[str], str] = input) -> str | None:
    """Return what the user typed, continued after each line that ends with a backslash; None at the end of input."""
    lines: list[str] = []
    try:
        while (line := read(prompt if not lines else "… ")).endswith("\\"):
            lines.append(line[:-1])
        lines.append(line)
    except EOFError:
        if not lines:
            return None
    # Bytes that are not UTF-8 arrive as lone surrogates, which no tokenizer accepts.
    return "\n".join(lines).encode("utf-8", "replace").decode("utf-8")


def converse(conversation: Conversation, *, interactive: bool = True, read: Callable[[str], str] = input) -> bool:
    """Read messages and commands until the user leaves; return whether none of them failed.

    Ctrl-C stops an answer. If no user types, but a file is read, it raises KeyboardInterrupt.
    """
    out, fine = conversation.out, True
    while True:
        try:
            line = read_line("> " if interactive else "", read)
        except KeyboardInterrupt:
            if not interactive:
                raise
            out.write("\n(/exit or Ctrl-D leaves)\n")
            continue
        if line is None or line.strip() in ("/exit", "/quit"):
            return fine
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                _command(conversation, line)
                continue
            stopped = conversation.ask(line)
        except UserError as error:
            out.write(f"redline: {error.message()}\n")
            fine = False
            continue
        out.write(" (stopped)\n\n" if stopped else "\n\n")
        out.flush()
        if stopped and not interactive:
            raise KeyboardInterrupt


def _command(conversation: Conversation, line: str) -> None:
    out = conversation.out
    name, _, rest = line.strip().partition(" ")
    if name == "/help":
        out.write(f"{HELP}\n")
    elif name == "/reset":
        conversation.reset()
        out.write("The conversation begins again.\n")
    elif name == "/system":
        conversation.reset(rest.strip())
        out.write("The conversation begins again under this system prompt.\n")
    elif name == "/save":
        if not rest.strip():
            raise UsageError("/save needs a file.", fix="Type, for example, /save chat.jsonl.")
        path = Path(rest.strip()).expanduser()
        conversation.save(path)
        out.write(f"saved     {path}\n")
    else:
        raise UsageError(f"{name} is no command.", fix="/help lists them.")
