"""The selection of contenders by `--only`."""

from __future__ import annotations

import pytest

from benchmarks.finetune import CONTENDERS
from redline.bench.throughput import select
from redline.errors import UsageError


def names(only: str | None) -> list[str]:
    return [contender.name for contender in select(CONTENDERS, only)]


def test_only_selects_by_name_and_keeps_the_order() -> None:
    assert names(None) == [contender.name for contender in CONTENDERS]
    assert names("nothing recomputed, redline lora") == [
        "redline lora",
        "hf+peft+bitsandbytes+liger, nothing recomputed",
    ]
    assert all("redline" in name for name in names("redline"))
    assert names("redline qlora") == ["redline qlora"], "a whole name means that one"


@pytest.mark.parametrize("only", ["redlime", "", " , ", "redline,nobody"])
def test_an_unknown_name_is_refused_with_the_known_ones(only: str) -> None:
    with pytest.raises(UsageError, match="hf\\+peft\\+bitsandbytes"):
        select(CONTENDERS, only)
