"""Models of all five jobs, shared by the tests of `redline play`, the API and chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from latents import other_base, write_rows
from playing import HDP, chat_model, latent_model, text_model
from redline.play.models import PlayModel


@pytest.fixture(scope="session")
def models(
    tmp_path_factory: pytest.TempPathFactory, tiny: Any, corpus: Path, tiny_base: Path, answers: Path
) -> dict[str, PlayModel]:
    folder = tmp_path_factory.mktemp("played")
    second = other_base(folder / "second", spread=0.3)
    block = ("objective=block_diffusion", "block_diffusion.block_size=8", "data.pack=false")
    found = [
        text_model(tiny, corpus),
        chat_model(tiny_base, answers, folder),
        text_model(tiny, corpus, *block, name="blocks"),
        text_model(tiny, corpus, *HDP, name="plans"),
        latent_model([tiny_base, second], write_rows(folder / "rows.jsonl"), folder),
    ]
    return {one.name: one for one in found}
