"""Fixtures of the jobs' tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

from redline.data.tokenizer import Tokenizer, load_tokenizer

# An example may be slow on a busy machine; that is not a failure.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

PROSE = "The loader reads windows of tokens.\n    indented, with  spaces,\ttabs and naïve café – 日本語 🙂\n"


@pytest.fixture(scope="session")
def trained() -> Tokenizer:
    """A small BPE tokenizer, trained on the spot."""
    return load_tokenizer("train:300", lambda: (f"Document number {i}.\n" + PROSE * (1 + i % 7) for i in range(150)))
