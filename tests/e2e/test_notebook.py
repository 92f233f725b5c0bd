"""The notebook of the Python API runs in a real kernel, and is stored as it ran."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tools.notebook import NOTEBOOK, build_notebook, execute_notebook


def outputs_of(notebook: nbformat.NotebookNode) -> list[str]:
    """Returns the text of the last output of each cell of code."""
    return [
        cell.outputs[-1]["data"]["text/plain"] if cell.outputs else ""
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(NOTEBOOK.parents[1])
    executed = execute_notebook(steps=3)
    _, _, training, shown, metrics, prompts, group, why = outputs_of(executed)
    assert "step 3/3" in training
    assert "\u2501" in training, "a bar"
    (cell,) = [cell for cell in executed.cells if "bapo.train(config" in cell.source]
    texts = [output.data["text/plain"] for output in cell.outputs if "data" in output]
    assert sum("step 3/3" in text or "left ?" in text for text in texts) == 1
    assert any("/docs" in text and "stack.json" in text for text in texts), "its addresses"
    assert "#token=" not in str(executed), "outputs are stored"
    assert "Run(name='notebook" in shown
    (cell,) = [cell for cell in executed.cells if cell.source == "run"]
    page = cell.outputs[-1]["data"]["text/html"]
    assert "finished, step 3 of 3" in page
    assert "<svg" in page
    assert metrics.splitlines()[0].split() == ["reward", "entropy", "response_length"]
    assert [line.split()[0] for line in metrics.splitlines()[2:]] == ["1", "2", "3"]
    assert "function:" in prompts
    assert len(group.splitlines()) == 2 + 8
    assert "used" in why


def test_the_stored_notebook_is_the_one_of_the_tool_with_its_outputs() -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell.source for cell in stored.cells] == [
        cell.source for cell in build_notebook(steps=40).cells
    ]
    assert "step 40/40" in outputs_of(stored)[2]
    kinds = {output.output_type for cell in stored.cells for output in cell.get("outputs", [])}
    assert "error" not in kinds
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "#token=" not in text
    assert str(Path.home()) not in text
    assert "/site-packages/" not in text, "no path of the machine that it ran on"
