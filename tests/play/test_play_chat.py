"""`redline chat`: histories, commands, stopping, and two models side by side."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from redline.cli.main import app
from redline.data.chat import ASSISTANT, SYSTEM, USER
from redline.errors import UsageError, UserError
from redline.jobs.objective import Sampling
from redline.jobs.streaming import LENGTH, Ask, Event, Finished, Section, Token
from redline.play.conversation import Conversation, Side, converse, printable
from redline.play.models import PlayModel, base_of

HOW = Sampling(1, 6, 3, 0.9)


class Typed:
    """Lines that a user types; an exception among them is raised in place of a line."""

    def __init__(self, *lines: str | BaseException) -> None:
        self.lines = list(lines)

    def __call__(self, prompt: str) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


def talk(sides: list[Side], *lines: str | BaseException, how: Sampling = HOW) -> tuple[str, Conversation]:
    out = io.StringIO()
    conversation = Conversation(sides, how, out)
    assert converse(conversation, read=Typed(*lines)) == ("redline: " not in out.getvalue())
    return out.getvalue(), conversation


def roles(side: Side) -> list[str]:
    return [turn.role for turn in side.messages()]


def test_a_conversation_has_a_history(models: dict[str, PlayModel]) -> None:
    side = Side(models["chat"], "chat", "Be brief.")
    text, _ = talk([side], "What is it?", "", "And now?")
    assert roles(side) == [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]
    assert all(printable(turn.content) in text for turn in side.turns if turn.role == ASSISTANT)
    sampled = models["chat"].stream(Ask("chat", side.messages()[:2]), HOW)
    assert [event.text for event in sampled if isinstance(event, Finished)] == [side.turns[1].content]


def test_a_question_without_a_template_stands_alone(models: dict[str, PlayModel]) -> None:
    side = Side(models["plans"], "plans")
    talk([side], "How many?", "How many now?")
    assert len(side.turns) == 4
    assert [turn.content for turn in side.messages()] == [side.turns[-1].content]
    with pytest.raises(UsageError, match="system prompt"):
        Side(models["plans"], "plans", "Be brief.")


def test_commands(models: dict[str, PlayModel], tmp_path: Path) -> None:
    side, file = Side(models["chat"], "chat"), tmp_path / "chat.jsonl"
    lines = (
        "One?",
        f"/save {file}",
        "/reset",
        "/system Be long.",
        "Two?",
        f"/save {file}",
        "/help",
        "/nonsense",
        "/save",
    )
    text, _ = talk([side], *lines, "/exit", "Three?")
    assert "/nonsense is no command" in text
    assert "/save needs a file" in text
    assert "Ctrl-C stops an answer" in text
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert [[turn["role"] for turn in row] for row in rows] == [[USER, ASSISTANT], [SYSTEM, USER, ASSISTANT]]
    assert [turn.content for turn in side.turns if turn.role == USER] == ["Two?"], "/exit leaves"
    from redline.data.chat import parse_conversation

    assert len(parse_conversation("here", {"messages": rows[1]}).messages) == 3, "it can be trained on"


def test_ctrl_c_stops_the_answer_and_not_the_program(
    models: dict[str, PlayModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    def interrupted(self: Any, ask: Ask, how: Sampling) -> Iterator[Event]:
        try:
            yield Section("x")
            yield Token("x", "half an")
            if ask.text == "First?":
                raise KeyboardInterrupt
            yield Finished("x", "half an answer")
        finally:
            closed.append(ask.text)

    monkeypatch.setattr(PlayModel, "stream", interrupted)
    side = Side(models["chat"], "chat")
    text, _ = talk([side], KeyboardInterrupt(), "First?", "Second?")
    assert "Ctrl-D leaves" in text
    assert "half an (stopped)" in text
    assert [turn.content for turn in side.turns] == ["First?", "half an", "Second?", "half an answer"]
    assert closed == ["First?", "Second?"]


def test_ctrl_c_ends_a_conversation_that_is_read_from_a_file(
    models: dict[str, PlayModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def interrupted(self: Any, ask: Ask, how: Sampling) -> Iterator[Event]:
        asked.append(ask.text)
        yield Token("x", "half an")
        raise KeyboardInterrupt

    monkeypatch.setattr(PlayModel, "stream", interrupted)
    for lines in (("First?", "Second?"), (KeyboardInterrupt(), "Second?")):
        out = io.StringIO()
        conversation = Conversation([Side(models["chat"], "chat")], HOW, out)
        with pytest.raises(KeyboardInterrupt):
            converse(conversation, interactive=False, read=Typed(*lines))
    assert asked == ["First?"]


def test_a_conversation_is_saved_without_harm(models: dict[str, PlayModel], tmp_path: Path) -> None:
    """A last row without its line break stays a row of its own; what is no text is not touched."""
    rows, other = tmp_path / "rows.jsonl", tmp_path / "model.bin"
    rows.write_text('{"messages": []}')
    other.write_bytes(b"\xff\xfe")
    text, _ = talk([Side(models["chat"], "chat")], "One?", f"/save {rows}", f"/save {other}", f"/save {tmp_path}")
    assert [len(json.loads(line)["messages"]) for line in rows.read_text().splitlines()] == [0, 2]
    assert other.read_bytes() == b"\xff\xfe"
    assert text.count("Name another file after /save") == 2


def test_a_line_may_go_on_and_an_error_ends_only_its_answer(models: dict[str, PlayModel]) -> None:
    side = Side(models["chat"], "chat")
    text, _ = talk([side], "stone " * 400, "one\\", "two")
    assert "redline: the prompt has" in text
    assert side.turns[0].content == "one\ntwo"
    talk([side], "\udcff\\")
    assert side.turns[2].content == "?", "the file's last line goes on, and is no UTF-8"
    text, _ = talk([Side(models["chat"], "chat")], "x", how=Sampling(1, 1, 1, 1.0))
    assert "(cut at 1 tokens)" in text


def test_two_models_side_by_side(models: dict[str, PlayModel]) -> None:
    sides = [Side(models["chat"], "tuned"), Side(models["plans"], "other")]
    text, _ = talk(sides, "What is it?", "And now?")
    head = next(line for line in text.splitlines() if "tuned" in line)
    assert head.index("tuned") < head.index("other")
    assert [len(side.turns) for side in sides] == [4, 4]
    assert sides[0].turns[1] != sides[1].turns[1], "each has its own answers"


def test_what_a_model_writes_cannot_move_the_cursor(
    models: dict[str, PlayModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printable("a\x1b[2Jb\n\tc\x07\x9b é🙂") == "a\ufffd[2Jb\n\tc\ufffd\ufffd é🙂"

    def hostile(self: Any, ask: Ask, how: Sampling) -> Iterator[Event]:
        yield Section("x")
        yield Token("x", "\x1b]0;title\x07")
        yield Finished("x", "\x1b]0;title\x07", LENGTH)

    monkeypatch.setattr(PlayModel, "stream", hostile)
    for sides in ([Side(models["chat"], "a")], [Side(models["chat"], "a"), Side(models["chat"], "b")]):
        assert "\x1b]0" not in talk(sides, "x")[0]


def test_models_that_answer_nothing_are_refused(models: dict[str, PlayModel]) -> None:
    with pytest.raises(UsageError, match=r"continues texts.*redline sample"):
        Side(models["text"], "text")
    with pytest.raises(UserError, match="no base"):
        base_of(models["text"])
    assert base_of(models["chat"]).endswith("base0")


def test_the_command_reads_lines(models: dict[str, PlayModel], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_it(typed: str, name: str, **options: Any) -> PlayModel:
        opened.append(typed)
        return models["chat"]

    monkeypatch.setattr("redline.play.models.open_play_model", open_it)
    words = ["chat", "runs/chat", "--beside", "base", "--tokens", "3", "--system", "Be brief."]
    done = CliRunner().invoke(app, words, input="What?\n/help\n")
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(app, words, input="stone " * 400).exit_code == 1
    assert opened[:2] == ["runs/chat", base_of(models["chat"])]
    assert "/reset" in done.output
