"""Options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from redline.errors import UsageError


def _one_of(option: str, *names: str) -> Callable[[str | None], str | None]:
    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise UsageError(f"{value!r} is not {' or '.join(names)}.", where=option, fix="Use one of those.")
        return value

    return check


RunArgument = Annotated[str, typer.Argument(help="A run: path, name or latest.")]
CheckpointArgument = Annotated[
    str, typer.Argument(help="A run: path, name or latest; @STEP or @best picks a checkpoint.")
]
WeightsOption = Annotated[
    str | None, typer.Option(callback=_one_of("--weights", "ema", "raw"), help="ema or raw; ema if there is one.")
]
DeviceOption = Annotated[
    str, typer.Option(callback=_one_of("--device", "auto", "cuda", "cpu"), help="auto, cuda or cpu.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
