"""Rows with questions and answers as conversations, and rows of plain text.

A row is used if it has one of the known sets of fields and all of its turns are text. It is counted as bad if

- it has none of the sets of fields, or a value is not text (numbers, pictures, tool calls);
- a prompt or an answer is empty or white space;
- it has no assistant turn, begins with one, or has a turn of an unknown role.

A row of plain text is a conversation of one answer without a question: the model learns all of it.

Nothing is stripped or rewritten: the model learns an answer exactly as the row has it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from redline.data.sources import Fields, ReadStats, UnusableRowError, parse_rows, source_rows, text_field
from redline.data.splits import key_of

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"

# The first set of fields that a row has is used. Chats come first, because some datasets repeat a chat's first question
# in a field of its own.
_CHATS = (("messages", "role", "content"), ("conversations", "from", "value"))
_PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
_INPUT = "input"  # belongs to an instruction
_TEXT = "text"  # last, because some datasets repeat a chat in a field of its own, in the template of another model
_FIELDS = ("messages", "conversations", *(name for pair in _PAIRS for name in pair), _INPUT, _TEXT)
_ROLES = {
    "system": SYSTEM,
    "developer": "developer",
    "tool": "tool",
    "user": USER,
    "human": USER,
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
}
_FORMS = "prompt and completion, question and answer, instruction and output, messages, conversations, or text"
_FIX = f"Give rows with {_FORMS}, all of them text."
_INSTEAD = "Use a JSONL or Parquet file."


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    place: str  # file:line
    messages: tuple[Message, ...]
    is_pair: bool  # a prompt and its completion, which can be written without a chat template
    is_text: bool = False  # plain text, as the one message of an assistant

    def key(self) -> int:
        """Return 64 bits that stand for the roles and contents of the messages, wherever the row was found."""
        return key_of(json.dumps([[m.role, m.content] for m in self.messages], ensure_ascii=True))

    def as_dicts(self, count: int | None = None) -> list[dict[str, str]]:
        """Return the first `count` messages in the form that chat templates take."""
        return [{"role": m.role, "content": m.content} for m in self.messages[:count]]


def read_conversations(source: str, stats: ReadStats) -> Iterator[Conversation]:
    """Yield every usable row in a fixed order; raise UserError if more than half of the rows are unusable."""
    rows = source_rows(source, stats, _FIELDS, fix=_FIX, instead=_INSTEAD)
    return parse_rows(rows, parse_conversation, stats, _FIX)


def parse_conversation(place: str, row: Fields) -> Conversation:
    """Return the row as a conversation; raise UnusableRowError if it is not one.

    A field with null counts as absent, because Parquet files and hub datasets give every column to every row.
    """
    for name, role, content in _CHATS:
        if row.get(name) is not None:
            return Conversation(place, _parse_messages(row[name], name, role, content), is_pair=False)
    for prompt, completion in _PAIRS:
        if row.get(prompt) is not None and row.get(completion) is not None:
            question, answer = text_field(row[prompt], prompt), text_field(row[completion], completion)
            question = _with_input(question, row) if prompt == "instruction" else question
            return Conversation(place, (Message(USER, question), Message(ASSISTANT, answer)), is_pair=True)
    if row.get(_TEXT) is not None:
        message = Message(ASSISTANT, text_field(row[_TEXT], _TEXT))
        return Conversation(place, (message,), is_pair=False, is_text=True)
    raise UnusableRowError("none of the known fields (" + ", ".join(str(key) for key in list(row)[:8]) + ")")


def _with_input(instruction: str, row: Fields) -> str:
    value = row.get(_INPUT)
    if value is None or value == "":
        return instruction
    return f"{instruction}\n\n{text_field(value, _INPUT)}"


def _parse_messages(turns: Any, name: str, role: str, content: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise UnusableRowError(f"{name!r} is not a list of messages")
    messages = tuple(_parse_message(turn, role, content) for turn in turns)
    if not any(message.role == ASSISTANT for message in messages):
        raise UnusableRowError("no assistant turn")
    if messages[0].role == ASSISTANT:
        raise UnusableRowError("begins with an assistant turn, which has nothing to answer")
    return messages


def _parse_message(turn: dict[str, Any], role: str, content: str) -> Message:
    value = turn.get(role)
    name = _ROLES.get(value) if isinstance(value, str) else None
    if name is None:
        raise UnusableRowError(f"the role {reprlib.repr(value)} is unknown")
    if turn.get("tool_calls"):
        raise UnusableRowError("a tool call, which is not text")
    text = turn.get(content)
    if name == SYSTEM and text == "":
        return Message(name, "")
    return Message(name, text_field(text, f"{name} turn"))
