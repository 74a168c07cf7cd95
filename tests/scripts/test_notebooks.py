"""The notebooks in examples/ run from top to bottom, here with settings that take seconds, and show their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

SMALL = {"model.layers": 1, "model.d_model": 32, "model.heads": 2, "model.d_ff": 64, "train.device": "cpu"}
SMALL |= {"train.precision": "fp32", "train.compile": False, "eval.sequences": 4, "eval.sample_tokens": 8}
QUICK = {**SMALL, "model.size": None, "data.seq_len": 32, "data.tokenizer": "bytes", "train.global_batch": 4}
QUICK |= {"train.steps": 60, "monitor.log_every": 5}
BASE = {"model.layers": 2, "model.d_model": 64, "model.heads": 4, "model.kv_heads": 2, "model.d_ff": 128}
BASE |= {"model.vocab": 320, "model.rope_theta": 10000.0, "model.tied": False}
MOST_KIB = 120  # of a committed notebook


@pytest.fixture
def notebooks(module: Callable[[str], ModuleType]) -> Any:
    return module("notebooks")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """One kernel for all notebooks: each start imports torch again."""
    from jupyter_client.manager import KernelManager

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path), extra_arguments=["--IPKernelApp.log_level=40"])
    yield manager
    manager.shutdown_kernel(now=True)


def outputs(cell: Any) -> list[Any]:
    return list(cell.get("outputs", ()))


def shown(notebook: Any) -> str:
    """Return everything that the cells show, as HTML where they have it."""
    parts = []
    for output in (output for cell in notebook.cells for output in outputs(cell)):
        data = output.get("data", {})
        parts.append(output.get("text", "") + data.get("text/html", data.get("text/plain", "")))
    return "\n".join("".join(part) for part in parts)


def test_the_notebooks_run_from_top_to_bottom(
    notebooks: Any, kernel: Any, tmp_path: Path, corpus: Path, tiny_base: Path
) -> None:
    small = {
        "first_model": f"SOURCE, BUDGET, CHANGES = {str(corpus)!r}, '60s', {QUICK!r}",
        "chat_model": f"BASE, STEPS, QUESTIONS, CHANGES = {str(tiny_base)!r}, 4, 4, {SMALL | BASE!r}",
        "plan_a_week": "",  # nothing is trained: it runs with its own settings
    }
    assert sorted(small) == notebooks.names()
    seen = {}
    for name, settings in small.items():
        notebook = notebooks.read(name)
        cell = notebooks.settings_cell(notebook)
        assert settings == "" or {line.split(" = ")[0] for line in cell.source.splitlines()} == {
            *settings.split(" = ")[0].split(", ")
        }, "the test sets every setting"
        cell.source = settings or cell.source
        notebooks.execute(notebook, tmp_path, kernel)  # raises if a cell does
        seen[name] = shown(notebook)
    for name in ("first_model", "chat_model"):
        assert '<svg viewBox="' in seen[name], "the live chart"
        assert "finished: reached the last step" in seen[name]
        assert seen[name].count("<svg") == 1, "which was updated in place"
    assert "polyline" in seen["first_model"]
    assert "parameters" in seen["first_model"].partition("<svg")[0], "the plan"
    assert "of 4 right" in seen["chat_model"]
    assert "adapter_model.safetensors" in seen["chat_model"]
    assert "plans on GSM8K, 50k steps on rtx4090" in seen["plan_a_week"], "what does not fit is named"
    assert seen["plan_a_week"].count("H200 kernel rates, scaled to this card") > 10
    assert (tmp_path / "runs/first/report.html").is_file()


@pytest.mark.parametrize("name", ["chat_model", "first_model", "plan_a_week"])
def test_the_stored_outputs_are_those_of_a_run_without_errors(notebooks: Any, name: str) -> None:
    path = notebooks.EXAMPLES / f"{name}.ipynb"
    notebook, text = notebooks.read(name), path.read_text(encoding="utf-8")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    found = [output for cell in cells for output in outputs(cell)]
    assert found
    assert {output.output_type for output in found} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name") != "stderr" for output in found)
    assert len(text) <= MOST_KIB << 10
    assert "/tmp/" not in text
    assert "/home/" not in text
    if name == "plan_a_week":
        assert any("image/png" in output.get("data", {}) for output in found)
    else:
        assert "<svg viewBox=" in json.loads(json.dumps(shown(notebook)))
