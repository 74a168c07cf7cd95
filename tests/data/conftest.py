"""Each test of the data has a cache of its own, and no tokenizer from the machine it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from redline.data.sources import Document
from redline.data.tokenizer import Tokenizer, load_tokenizer

# A busy machine makes single examples slow; that is no failure.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

PROSE = (
    "The loader reads windows of tokens.\nA window begins where the index says.\n\n"
    "    indented, with  spaces,\ttabs and naïve café – 日本語 🙂\n"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("REDLINE_CACHE", str(folder))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.delenv("REDLINE_GPT2", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # no test looks for anything on the net
    return folder


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    return [Document(f"part-{i:03d}", f"Document number {i}.\n" + PROSE * (1 + i % 7)) for i in range(150)]


@pytest.fixture(scope="session")
def trained(documents: list[Document]) -> Tokenizer:
    return load_tokenizer("train:300", lambda: (document.text for document in documents))
