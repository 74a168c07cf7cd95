"""Reset process-wide torch settings after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def reset_determinism() -> Iterator[None]:
    """`train.deterministic` switches the kernels of the whole process, which would change the tests that follow."""
    yield
    torch.use_deterministic_algorithms(False)
