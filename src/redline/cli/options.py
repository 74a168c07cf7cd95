"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from redline.errors import UsageError


def one_of(option: str, *names: str) -> Callable[[str | None], str | None]:
    """Refuses what is none of the names, in a sentence."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise UsageError(f"{value!r} is not {' or '.join(names)}.", where=option, fix="Use one of those.")
        return value

    return check


def split_words(words: list[str] | None, verb: str | None = None) -> tuple[str | None, list[str]]:
    """Return the recipe's name or path, if there is one, and the overrides beside it.

    With `verb`, data, a model or a run in place of the recipe is answered with the command that was meant.
    """
    names = [word for word in words or [] if "=" not in word]
    if verb is not None and names:
        from redline.cli.suggestions import refuse_no_recipe

        refuse_no_recipe(verb, names)
    if len(names) > 1:
        raise UsageError(f"one recipe at a time, not {' and '.join(names)}.", fix="Overrides are written key=value.")
    return names[0] if names else None, [word for word in words or [] if "=" in word]


MOST_TOKENS = 1_000_000  # of one text; some jobs make room for all of them at once

RunArgument = Annotated[str, typer.Argument(help="A run: path, name or latest.")]
CheckpointArgument = Annotated[
    str, typer.Argument(help="A run: path, name or latest; @STEP or @best picks a checkpoint.")
]
WeightsOption = Annotated[
    str | None, typer.Option(callback=one_of("--weights", "ema", "raw"), help="ema or raw; ema if there is one.")
]
DeviceOption = Annotated[
    str, typer.Option(callback=one_of("--device", "auto", "cuda", "cpu"), help="auto, cuda or cpu.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="How a run that denoises writes: sampler, sampler_steps."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


# ----------------------------------------------------------------------------------------------------
# Where runs live.


# ----------------------------------------------------------------------------------------------------
# Tables on a terminal.
