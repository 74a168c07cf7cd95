"""redline completion: the script for a shell, and the words that it asks for while one types.

The scripts only ask `redline completion words -- …`, so that every shell is told the same: verbs, options, recipes,
keys and runs, as they are at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from redline.cli.options import one_of
from redline.runs.summary import RUNS

_BASH = """_redline() {
    local word
    COMPREPLY=()
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(
        "$1" completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null
    )
    if [[ ${COMPREPLY[0]-} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}
complete -o default -F _redline redline"""

_ZSH = """#compdef redline
_redline() {
    local -a found
    found=("${(@f)$("${words[1]}" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -z ${found[1]} ]]; then
        _files
    elif [[ ${found[1]} == *= ]]; then
        compadd -S '' -- "${found[@]}"
    else
        compadd -- "${found[@]}"
    fi
}
compdef _redline redline"""

_FISH = """function __redline_words
    set -l words (commandline -opc) (commandline -ct)
    redline completion words -- $words[2..-1] 2>/dev/null
end
complete -c redline -a '(__redline_words)'"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
_WORDS = "words"


def completion(
    shell: Annotated[
        str,
        typer.Argument(metavar="bash|zsh|fish", callback=one_of("SHELL", *_SCRIPTS, _WORDS), help="Whose script."),
    ],
    typed: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Print the script that lets a shell complete verbs, options, recipes, keys and runs.

    Examples:
      redline completion bash >> ~/.bashrc
      redline completion zsh >> ~/.zshrc
      redline completion fish > ~/.config/fish/completions/redline.fish
    """
    if shell == _WORDS:
        for word in candidates(typed or [""]):  # an empty line would be one
            typer.echo(word)
    else:
        typer.echo(_SCRIPTS[shell])


def candidates(typed: list[str]) -> list[str]:
    """What the last word may become, given those before it."""
    *before, part = typed
    command, rest = _command(before)
    found = _for_option(command, rest[-1]) if rest else None
    if found is None:
        found = _options(command) if part.startswith("-") else _positional(command, rest, part)
    return sorted({word for word in found if word.startswith(part)})


def _command(before: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and those beyond its name."""
    from typer.main import get_command

    from redline.cli.main import app

    command: Any = get_command(app)
    for place, word in enumerate(before):
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            return command, before[place:]
        command = inner
    return command, []


def _options(command: Any) -> list[str]:
    return ["--help", *(name for param in command.params for name in param.opts if name.startswith("--"))]


def _for_option(command: Any, option: str) -> Iterable[str] | None:
    """The values of an option that waits for one; None where nothing waits, and nothing where files do."""
    waiting = any(option in param.opts and not getattr(param, "is_flag", False) for param in command.params)
    return _VALUES.get(option, list)() if option.startswith("-") and waiting else None


def _positional(command: Any, rest: list[str], part: str) -> Iterable[str]:
    if getattr(command, "commands", None):
        return list(command.commands)
    names = {param.name for param in command.params if param.param_type_name == "argument"}
    if names & {"recipe", "words"}:
        return _recipes_and_keys(rest, part)
    if names & {"run", "runs"}:
        return _runs()
    return list(_SCRIPTS) if "shell" in names else []


def _recipes_and_keys(rest: list[str], part: str) -> list[str]:
    """One recipe comes first; keys belong to its objective, and come with the sign that a value follows."""
    from redline.recipe.load import known_keys, read_recipe, shipped
    from redline.recipe.schema import recipe_class

    known = shipped()
    chosen = next((word for word in rest if "=" not in word and not word.startswith("-")), None)
    objective = read_recipe(known[chosen]).get("objective") if chosen in known else None
    keys = [f"{key}=" for key in known_keys(recipe_class(objective))] if part or chosen else []
    return keys if chosen else [*known, *keys]


def _runs() -> list[str]:
    from redline.runs.summary import run_paths

    found = [path.relative_to(RUNS).as_posix() for path in run_paths(RUNS)]
    return ["latest", *found] if found else []


def _cards() -> list[str]:
    from redline.hardware.specs import SPECS

    return ["auto", "cpu", *SPECS]


_VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "--resume": _runs,
    "--gpu": _cards,
    "--weights": lambda: ["ema", "raw"],
    "--device": lambda: ["auto", "cuda", "cpu"],
    "--keep": lambda: ["best", "last"],
}
