"""redline recipes"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from redline.cli.completion import complete_recipe_names
from redline.cli.options import JsonOption


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            autocompletion=complete_recipe_names,
            help="A shipped recipe or a YAML file to show, with its comments. Default: list the shipped recipes.",
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """List the recipes that ship with redline, or show one.

    With --json a recipe is shown with every key, the defaults included; `redline plan` says what `auto` becomes.

    Examples:
      redline recipes
      redline recipes quickstart
      redline recipes qlora-8b > my-recipe.yaml
    """
    if name is None:
        _list(json_)
        return
    from redline.recipe.load import find_recipe, load

    loaded, path = load(name), find_recipe(name)
    if json_:
        recipe = loaded.recipe.model_dump(mode="json")
        typer.echo(json.dumps({"name": loaded.name, "path": str(path), "recipe": recipe}, ensure_ascii=False))
    else:
        typer.echo(path.read_text(encoding="utf-8"), nl=False)


def _list(json_: bool) -> None:
    from redline.recipe.load import read_recipe, shipped

    rows = [(name, str(read_recipe(path).get("description", "")), path) for name, path in shipped().items()]
    if json_:
        typer.echo(json.dumps([{"name": n, "description": d, "path": str(p)} for n, d, p in rows]))
        return
    width = max(len(name) for name, _, _ in rows)
    for name, description, _ in rows:
        typer.echo(f"{name:{width}s}  {description}")
