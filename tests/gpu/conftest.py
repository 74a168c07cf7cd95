"""What a run switches on for its whole process, a test must not leave to the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_left_on() -> Iterator[None]:
    """`train.deterministic` is other kernels for all that follow."""
    yield
    torch.use_deterministic_algorithms(False)
