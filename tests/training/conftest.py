"""Fixture for runs of several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from several import Several


@pytest.fixture
def several(world: Any, tmp_path: Path) -> Several:
    world.run(tmp_path / "first-run", "train.steps=1")  # what torch imports late, forks have
    return Several(world, tmp_path)
