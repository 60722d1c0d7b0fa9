"""Every example runs as it stands, with few images where it takes a number; three of them as notebooks."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = {  # images, and what the last cell shows
    "quickstart": ("", "<th>matched %</th>"),
    "own_images": ("20", "report written: True"),
    "own_method": ("40", "keep_head"),
}


def test_every_example_is_run() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*NOTEBOOKS, "three_hospitals_by_files"}
    assert {file.stem for file in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)
    assert all(len(file.read_text(encoding="utf-8").splitlines()) < 60 for file in EXAMPLES.glob("*.py"))


@pytest.mark.slow
def test_hospitals_by_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = EXAMPLES / "three_hospitals_by_files.py"
    monkeypatch.setattr(sys, "argv", [str(file), "30"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second thread only waits where another process wants the core
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert "same bytes as a simulation: True" in said and "False" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their cells are those of the scripts: `docs.build --check` compares them."""
    images, words = NOTEBOOKS[name]
    if images:
        monkeypatch.setenv("IMAGES", images)
    for variable, value in {"OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path), "JUPYTER_PLATFORM_DIRS": "1"}.items():
        monkeypatch.setenv(variable, value)
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "stored without outputs"
    # The kernel of this very Python, whatever kernels are installed under that name.
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.km = client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute(env=dict(os.environ))
    shown = [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any(words in text for text in shown), shown
    assert any("method 1 of " in text for text in shown), "progress"
