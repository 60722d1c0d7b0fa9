"""How the size of the house is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import house


def test_lines_and_imports_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "import os\n\n\ndef f():\n    import json\n    def g():\n        from math import pi\n    return json\n"
    )
    (tmp_path / "b.txt").write_text("not counted\n")
    assert sum(map(house.length, house.python_files(tmp_path))) == 8
    assert house.inner_imports(file) == 2, "each once, however deep"


def test_commits_of_the_rebuild_are_told_by_their_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "@refactor: one\n\n3\t10\tsrc/a.py\n9\t0\tsrc/a.toml\n@feat: two\n\n50\t1\tsrc/b.py\n"
    moved = "@refactor(x): three\n\n2\t4\tsrc/{b.py => c.pyi}\n"
    monkeypatch.setattr(house, "git", lambda *words: log + moved + moved)
    assert house.rebuilt_lines("src") == -7 - 2, "the same subject once"
