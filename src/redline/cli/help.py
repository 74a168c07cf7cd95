"""The page that `redline VERB --help` prints.

Typer's own pages show the Python type of every option (`--json <bool>`) and draw boxes that wrap badly in a narrow
terminal. These pages are plain text, and printing them does not import rich, which takes as long as all other imports
of the command line together.
"""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperCommand, TyperGroup

_EXAMPLES = "Examples:\n"


class VerbCommand(TyperCommand):
    """A verb: usage, description, arguments, options and examples."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.command_path, " ".join(_usage(self, ctx)))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        _write_description(self, formatter)
        _write_parameters(self, ctx, formatter)
        _write_examples(self, formatter)


class VerbGroup(TyperGroup):
    """A verb with verbs of its own, listed under the headings that `rich_help_panel` gives them."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        verb = "[VERB]" if self.invoke_without_command else "VERB"
        formatter.write_usage(ctx.command_path, f"{verb} [ARGUMENTS] [OPTIONS]")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        _write_description(self, formatter)
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "Verbs"
                groups.setdefault(str(heading), []).append((name, _description(command).partition("\n")[0]))
        # The same width in every group, so that the columns of all groups line up.
        width = max(len(name) for rows in groups.values() for name, _ in rows)
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])
        _write_parameters(self, ctx, formatter)
        _write_examples(self, formatter)


def _usage(command: Any, ctx: Any) -> list[str]:
    """Return what follows the command in its usage line: arguments, required options, [OPTIONS]."""
    parameters = [param for param in command.get_params(ctx) if not param.hidden]
    arguments = [_in_usage(param) for param in parameters if not _is_option(param)]
    required = [f"{param.opts[0]} {_metavar(param)}" for param in parameters if param.required and _is_option(param)]
    return [*arguments, *required, "[OPTIONS]"]


def _in_usage(argument: Any) -> str:
    metavar = _metavar(argument)
    return metavar if argument.required or metavar.startswith("[") else f"[{metavar}]"


def _is_option(param: Any) -> bool:
    return bool(param.param_type_name == "option")


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _description(command: Any) -> str:
    """Return the help text before its examples, with each paragraph on one line."""
    text = inspect.cleandoc(command.help or "").partition(_EXAMPLES)[0]
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def _write_description(command: Any, formatter: Any) -> None:
    formatter.write_paragraph()
    formatter.write_text(_description(command))


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    parameters = [param for param in command.get_params(ctx) if not param.hidden]
    arguments = [row for param in parameters if not _is_option(param) for row in _argument_rows(param)]
    options = [_option_row(param) for param in parameters if _is_option(param)]
    for heading, rows in (("Arguments", arguments), ("Options", options)):
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)


def _argument_rows(param: Any) -> list[tuple[str, str]]:
    """Return a row for an argument, or for each kind of word it takes if its help has lines of `NAME: text`."""
    lines = (param.help or "").splitlines()
    if len(lines) == 1:
        return [(_metavar(param).strip("[]"), f"{lines[0]}{_default(param)}")]
    return [(name, text) for name, _, text in (line.partition(": ") for line in lines)]


def _option_row(param: Any) -> tuple[str, str]:
    names = ", ".join(sorted(param.opts, key=len))
    term = names if param.is_flag else f"{names} {_metavar(param)}"
    repeated = " Can be repeated." if param.multiple else ""
    return term, f"{param.help or ''}{repeated}{_default(param)}"


def _default(param: Any) -> str:
    default = param.default
    shown = default not in (None, False, "") and not callable(default) and not param.required
    return f" Default: {default}." if shown else ""


def _write_examples(command: Any, formatter: Any) -> None:
    """Write the examples line by line: wrapped, they could not be copied into a shell."""
    lines = inspect.cleandoc(command.help or "").partition(_EXAMPLES)[2].splitlines()
    if lines:
        with formatter.section("Examples"):
            for line in lines:
                formatter.write(f"{'':{formatter.current_indent}}{line.strip()}\n")
