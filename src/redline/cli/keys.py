"""redline keys"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from redline.cli.completion import complete_keys
from redline.cli.options import JsonOption

if TYPE_CHECKING:
    from redline.recipe.explain import Key

_WIDEST = 120  # columns; longer lines are hard to read


def keys(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY or SECTION]",
            autocompletion=complete_keys,
            help="A recipe key such as train.lr, another spelling of one, or a section. Default: list the sections.",
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Explain a recipe key: meaning, type, default, aliases, and the shipped recipes that set it.

    Examples:
      redline keys
      redline keys train
      redline keys train.lr
    """
    from redline.recipe.explain import explain, keys_by_section, keys_in, sections

    about = sections()
    if name is None:
        if json_:
            rows = [{"section": s, "text": about[s], "keys": found} for s, found in keys_by_section().items()]
            typer.echo(json.dumps(rows, ensure_ascii=False))
        else:
            _print_sections(about)
    elif name in about and name:
        if json_:
            typer.echo(json.dumps([_fields(key) for key in keys_in(name)], ensure_ascii=False))
        else:
            inner = [part for part in about if part.startswith(f"{name}.")]
            _print_section(name, about[name], keys_in(name), inner)
    else:
        key = explain(name)
        if json_:
            typer.echo(json.dumps(_fields(key), ensure_ascii=False))
        else:
            _print_key(key, name)


def _fields(key: Key) -> dict[str, Any]:
    from redline.recipe.explain import plain, set_by_recipes

    texts = {field: plain(text) for field, text in asdict(key).items() if isinstance(text, str)}
    return asdict(key) | texts | {"recipes": set_by_recipes(key.name)}


def _table(heading: str, rows: list[tuple[str, str]]) -> None:
    """Print a heading and rows of two columns, of which the second is wrapped."""
    from click import HelpFormatter

    formatter = HelpFormatter(width=min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns))
    with formatter.section(heading):
        formatter.write_dl(rows, col_max=36)
    typer.echo(formatter.getvalue().rstrip("\n"))


def _print_sections(about: dict[str, str]) -> None:
    from redline.recipe.explain import key_texts, keys_by_section, plain

    found = keys_by_section()
    _table("Top-level keys", [(key, plain(key_texts()[key])) for key in found.pop("")])
    typer.echo()
    rows = [(section, f"{plain(about[section])} ({len(names)} keys)") for section, names in found.items()]
    _table("Sections", rows)
    typer.echo("\n`redline keys SECTION` lists the keys of a section, `redline keys KEY` explains one.")


def _print_section(name: str, text: str, found: list[Key], inner: list[str]) -> None:
    from redline.recipe.explain import plain

    rows = [(f"{key.word} = {key.default if len(key.default) <= 20 else '…'}", plain(key.text)) for key in found]
    _table(f"{name} ({plain(text)})", rows)
    if inner:
        typer.echo(f"\nA section of its own: {', '.join(inner)}.")


def _print_key(key: Key, asked: str) -> None:
    from redline.recipe.explain import as_yaml, plain, set_by_recipes

    if asked != key.name:
        typer.echo(f"{asked} is an alias of {key.name}.\n")
    rows = [("meaning", plain(key.text)), ("type", plain(key.type)), ("default", plain(key.default))]
    rows = [row for row in rows if row[1]]
    if key.auto:
        rows.append(("auto becomes", plain(key.auto)))
    if key.aliases:
        rows.append(("aliases", ", ".join(key.aliases)))
    rows.append(("on resume", "may change" if key.resumable else "cannot change"))
    _table(key.name, rows)
    values = set_by_recipes(key.name)
    if values:
        typer.echo()
        _table("Set by shipped recipes", [(name, as_yaml(value)) for name, value in values.items()])
