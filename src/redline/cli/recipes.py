"""redline recipes"""

from __future__ import annotations

import typer

from redline.cli.options import JsonOption


def recipes(json_: JsonOption = False) -> None:
    """List the recipes that ship with redline.

    Examples:
      redline recipes
      redline recipes --json
    """
    from redline.recipe.load import read_recipe, shipped

    rows = [(name, str(read_recipe(path).get("description", "")), path) for name, path in shipped().items()]
    if json_:
        import json

        typer.echo(json.dumps([{"name": n, "description": d, "path": str(p)} for n, d, p in rows]))
        return
    width = max(len(name) for name, _, _ in rows)
    for name, description, _ in rows:
        typer.echo(f"{name:{width}s}  {description}")
