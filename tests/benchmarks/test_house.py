"""How the size of the house is counted."""

from __future__ import annotations

from pathlib import Path

from benchmarks.house import inner_imports, lines


def test_lines_and_imports_inside_functions_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("import os\n\n\ndef f():\n    import json\n    from math import pi\n    return json, os, pi\n")
    (tmp_path / "b.txt").write_text("not counted\n")
    assert lines(tmp_path) == 7
    assert inner_imports(file) == 2
