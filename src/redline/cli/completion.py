"""redline completion, and the words that it offers for recipes, keys, runs and cards.

Click completes verbs and options by itself: the shell runs `redline` with `_REDLINE_COMPLETE` set, and click answers
from the declared parameters. The functions here complete the values that click cannot know. None imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from redline.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
COMPLETE_VARIABLE = "_REDLINE_COMPLETE"  # click derives this name from the program's


def completion(
    context: typer.Context,
    shell: Annotated[
        str,
        typer.Argument(
            metavar="bash|zsh|fish", autocompletion=lambda incomplete: _starting(incomplete, SHELLS), help="The shell."
        ),
    ],
    install: Annotated[
        bool, typer.Option("--install", help="Install the script for the current user instead of printing it.")
    ] = False,
) -> None:
    """Print or install the script for shell completion.

    It completes verbs, options, recipes, recipe keys and runs.

    Examples:
      redline completion bash >> ~/.bashrc
      redline completion zsh --install
      redline completion fish > ~/.config/fish/completions/redline.fish
    """
    if shell not in SHELLS:
        raise UsageError(f"{shell!r} is not {' or '.join(SHELLS)}.", where="SHELL", fix="Use one of those.")
    from typer.completion import install as install_script
    from typer.completion import shell_complete

    if install:
        _, path = install_script(shell, "redline", COMPLETE_VARIABLE)
        typer.echo(f"installed in {path}; open a new terminal to use it")
    else:
        enable()
        shell_complete(context.find_root().command, {}, "redline", COMPLETE_VARIABLE, f"source_{shell}")


def enable() -> None:
    """Register the shells with click, so that this process answers the shell's request for completions."""
    from typer.completion import completion_init

    completion_init()


def complete_recipes(ctx: Any, incomplete: str) -> list[str]:
    """Return recipe names, and keys as `key=` once a recipe is named or a key is begun."""
    from redline.recipe.load import current_name, known_keys, read_recipe, shipped
    from redline.recipe.schema import recipe_class

    recipes = shipped()
    typed = ctx.params.get("recipe") or ctx.params.get("words") or ()
    chosen = next((current_name(word) for word in typed if "=" not in word), None)
    objective = read_recipe(recipes[chosen]).get("objective") if chosen in recipes else None
    keys = [f"{key}=" for key in known_keys(recipe_class(objective))] if incomplete or chosen else []
    return _starting(incomplete, keys if chosen else [*recipes, *keys])


def complete_recipe_names(incomplete: str) -> list[str]:
    from redline.recipe.load import shipped

    return _starting(incomplete, shipped())


def complete_keys(incomplete: str) -> list[str]:
    """Return sections until one is typed, then its keys."""
    from redline.recipe.explain import every_key, sections

    names = [name for name in sections() if name]
    return _starting(incomplete, [*names, *every_key()] if "." in incomplete else names)


def complete_runs(incomplete: str) -> list[str]:
    from redline.runs.summary import run_paths
    from redline.vocabulary import RUNS

    names = [path.relative_to(RUNS).as_posix() for path in run_paths(RUNS)]
    return _starting(incomplete, ["latest", *names] if names else [])


def complete_cards(incomplete: str) -> list[str]:
    from redline.hardware.specs import SPECS

    return _starting(incomplete, ["auto", "cpu", *SPECS])


def complete_words(*words: str) -> Callable[[str], list[str]]:
    """Return a completion function for an option that takes one of a few fixed words."""
    return lambda incomplete: _starting(incomplete, words)


def _starting(incomplete: str, words: Iterable[str]) -> list[str]:
    return sorted({word for word in words if word.startswith(incomplete)})
