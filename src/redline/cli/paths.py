"""Where runs live."""

from pathlib import Path

RUNS = Path("runs")
