"""Arguments and options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from redline.cli.completion import complete_recipes, complete_runs, complete_words
from redline.errors import UsageError

MOST_TOKENS = 1_000_000  # of one generated text; some jobs allocate memory for all of them at once


def one_of(option: str, *names: str) -> Callable[[str | None], str | None]:
    """Return a callback for `option` that refuses any value but `names`."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise UsageError(f"{value!r} is not {' or '.join(names)}.", where=option, fix="Use one of those.")
        return value

    return check


def split_words(words: list[str] | None, verb: str | None = None) -> tuple[str | None, list[str]]:
    """Split the words after a verb into the recipe's name or path (None if there is none) and the overrides.

    With `verb`, refuse data, a model or a run in place of the recipe, and name the command that was probably meant.
    """
    names = [word for word in words or [] if "=" not in word]
    if verb is not None and names:
        from redline.cli.suggestions import refuse_non_recipes

        refuse_non_recipes(verb, names)
    if len(names) > 1:
        what = f"expected one recipe, got {len(names)}: {', '.join(names)}."
        raise UsageError(what, fix="Write overrides as key=value.")
    return names[0] if names else None, [word for word in words or [] if "=" in word]


RecipeArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [key=value ...]",
        autocompletion=complete_recipes,
        help="RECIPE: A shipped recipe (see `redline recipes`) or a YAML file. Default: quickstart.\n"
        "key=value: Recipe keys to change, for example train.steps=100.",
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", autocompletion=complete_runs, help="The path or name of a run, or latest."),
]
RunsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN ...]", autocompletion=complete_runs, help="Paths or names of runs, or latest."),
]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        autocompletion=complete_runs,
        help="The path or name of a run, or latest. Add @STEP or @best to choose a checkpoint.",
    ),
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        autocompletion=complete_runs,
        help="The path or name of a run, or latest; add @STEP or @best to choose a checkpoint. Or a model: a folder "
        "with a model or an adapter, a .gguf file or a hub id.",
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="The base model of the run or adapter, if it has moved."),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        metavar="ema|raw",
        callback=one_of("--weights", "ema", "raw"),
        autocompletion=complete_words("ema", "raw"),
        help="Averaged or raw weights. Default: ema if the run has them.",
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        metavar="auto|cuda|mps|cpu",
        callback=one_of("--device", "auto", "cuda", "mps", "cpu"),
        autocompletion=complete_words("auto", "cuda", "mps", "cpu"),
        help="The device to compute on.",
    ),
]
# How tokens are drawn.
TemperatureOption = Annotated[float, typer.Option(min=0.0, metavar="T", help="Sampling temperature; 0 is greedy.")]
TopKOption = Annotated[int | None, typer.Option(min=1, metavar="K", help="Sample only from the K most likely tokens.")]
TopPOption = Annotated[
    float,
    typer.Option(
        min=0.01, max=1.0, metavar="P", help="Sample only from the most likely tokens whose probabilities sum to P."
    ),
]
# Of a local page.
PortOption = Annotated[
    int | None,
    typer.Option(min=0, max=65535, metavar="PORT", help="The port of the page. Default: the first free one from 8770."),
]
HostOption = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="The address to listen on. Any other than loopback requires the token in the printed URL.",
    ),
]
TokenOption = Annotated[
    bool, typer.Option("--token", help="Require the token on loopback too, on a machine that others use.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a sampling setting of a diffusion run: sampler or sampler_steps."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
