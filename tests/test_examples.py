"""Every example runs as it stands, with few images where it takes a number."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
ARGUMENTS = {"quickstart": [], "own_images": ["20"], "own_method": ["40"], "three_hospitals_by_files": ["30"]}
SAYS = {
    "quickstart": "ensemble:class_weighted",
    "own_images": "report written: True",
    "own_method": "north: ",
    "three_hospitals_by_files": "same bytes as a simulation: True",
}


def test_every_example_is_run() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(ARGUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = EXAMPLES / f"{name}.py"
    assert len(file.read_text(encoding="utf-8").splitlines()) < 60
    monkeypatch.setattr(sys, "argv", [str(file), *ARGUMENTS[name]])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second thread only waits where another process wants the core
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert SAYS[name] in said and "False" not in said
