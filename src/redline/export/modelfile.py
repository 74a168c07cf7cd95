"""Ollama's Modelfile for a GGUF file: its chat template in Go's language, the default system prompt, the stop tokens.

Ollama does not run the Jinja template in the file. So the texts between the turns are found by rendering conversations
with the model's own template, and put together again for Ollama. A template that does more than write fixed texts
between turns gets none, and the Modelfile says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Messages = list[dict[str, str]]
Render = Callable[[Messages], str]  # with the beginning of an answer at the end; raises what the template raises

_SYSTEM, _FIRST, _ANSWER, _SECOND = "SYSTEM-TEXT", "FIRST-QUESTION", "AN-ANSWER", "SECOND-QUESTION"
_CONVERSATION: Messages = [
    {"role": "system", "content": _SYSTEM},
    {"role": "user", "content": _FIRST},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _SECOND},
]
_UNQUOTABLE = ('"""', "{{", "}}")


@dataclass(frozen=True)
class Turns:
    """The fixed texts of a chat template."""

    lead: str  # before everything
    system: tuple[str, str] | None  # around a system prompt; None: the template takes none
    user: tuple[str, str]  # the second text also begins the answer
    answer_end: str
    default_system: str | None = None

    def render(self, messages: Messages) -> str:
        around = {"system": self.system or ("", ""), "user": self.user, "assistant": ("", self.answer_end)}
        if self.default_system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default_system}, *messages]
        return self.lead + "".join(
            around[turn["role"]][0] + turn["content"] + around[turn["role"]][1] for turn in messages
        )

    def go_template(self) -> str:
        texts = {"user": self.user, "assistant": ("", self.answer_end)}
        if self.system is not None:
            texts = {"system": self.system, **texts}
        branches = [
            f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}' for role, (before, after) in texts.items()
        ]
        inner = "{{ else ".join(branches)
        return f"{self.lead}{{{{ range .Messages }}}}{{{{ {inner}{{{{ end }}}}{{{{ end }}}}"


def find_turns(render: Render, bos: str) -> Turns | None:
    """Return the fixed texts of a template; None if they do not reproduce what it writes."""
    full = _rendered(render, _CONVERSATION)
    plain = _rendered(render, _CONVERSATION[1:])
    short = _rendered(render, _CONVERSATION[1:2])
    if plain is None or short is None:
        return None
    between = _split(plain, (_FIRST, _ANSWER, _SECOND))
    if between is None or between[1] != between[3]:
        return None
    lead = bos if bos and plain.startswith(bos) else ""
    start, begins_answer, ends_answer = between[0].removeprefix(lead), between[1], between[2]
    with_system = None if full is None else _split(full, (_SYSTEM, _FIRST, _ANSWER, _SECOND))
    user = _common_end(start, ends_answer)
    turns = Turns(lead, None, (user, begins_answer), ends_answer.removesuffix(user))
    if with_system is not None:
        user = _common_end(with_system[1], user)
        system = (with_system[0].removeprefix(lead), with_system[1].removesuffix(user))
        own = start.removesuffix(user)
        is_default = bool(own) and own.startswith(system[0]) and own.endswith(system[1])
        default = own[len(system[0]) : len(own) - len(system[1])] if is_default else None
        turns = Turns(lead, system, (user, begins_answer), ends_answer.removesuffix(user), default)
    probes = [(plain, _CONVERSATION[1:]), (short, _CONVERSATION[1:2])]
    probes += [(full, _CONVERSATION)] if full is not None and with_system is not None else []
    return turns if all(turns.render(messages) == text for text, messages in probes) else None


def _common_end(first: str, second: str) -> str:
    length = 0
    while length < min(len(first), len(second)) and first[-1 - length] == second[-1 - length]:
        length += 1
    return first[len(first) - length :]


def _rendered(render: Render, messages: Messages) -> str | None:
    try:
        return render(messages)
    except Exception:  # a template may raise anything, for example at a system prompt
        return None


def _split(text: str, marks: tuple[str, ...]) -> list[str] | None:
    """Return the texts around the marks, each of which has to occur once and in this order."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        parts.append(before)
    return [*parts, text]


def modelfile(
    file: str, *, turns: Turns | None, chats: bool, stops: list[str], bos: str, begins: bool, context: int
) -> str:
    """Return the Modelfile. llama.cpp writes bos itself if the vocabulary `begins` with it."""
    lines = [f"FROM ./{file}"]
    if not chats:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    elif turns is None or any(mark in text for text in _texts(turns) for mark in _UNQUOTABLE):
        lines.append("# The chat template cannot be written in Ollama's language; Ollama guesses from the GGUF file.")
    else:
        kept = Turns("", turns.system, turns.user, turns.answer_end) if begins and turns.lead == bos else turns
        lines.append(f'TEMPLATE """{kept.go_template()}"""')
        if turns.default_system is not None:
            lines.append(f'SYSTEM """{turns.default_system}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if not {'"', "\n"} & {*stop}]
    lines.append(f"PARAMETER num_ctx {context}")
    return "\n".join(lines) + "\n"


def _texts(turns: Turns) -> list[str]:
    return [turns.lead, *(turns.system or ()), *turns.user, turns.answer_end, turns.default_system or ""]
