"""How the size of the house is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import house


def test_lines_imports_and_definitions_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "import os\n\n\ndef f():\n    import json\n    def g():\n        from math import pi\n    return json\n\n\n"
        "class C:\n    @property\n    def m(self):\n        return 1\n"
    )
    (tmp_path / "b.txt").write_text("not counted\n")
    assert house.lines_of("a.py", tmp_path) == sum(map(house.length, house.python_files(tmp_path))) == 14
    assert house.inner_imports(file) == 2, "each once, however deep"
    assert house.definitions(file) == {"f": 5, "C": 4, "C.m": 3}
    assert house.lines_of("a.py: f C.m", tmp_path) == 8
    assert house.is_there("a.py: f gone", tmp_path) and not house.is_there("a.py: gone", tmp_path)
    assert not house.is_there("c.py: f", tmp_path) and not house.is_there("c.py", tmp_path)
    assert house.unique_definitions(tmp_path) == {"f": 5, "C": 4}
    (tmp_path / "twice.py").write_text("class f:\n    pass\n")
    assert house.unique_definitions(tmp_path) == {"C": 4}
    with pytest.raises(KeyError, match="gone"):
        house.lines_of("a.py: gone", tmp_path)
    with pytest.raises(FileNotFoundError):
        house.lines_of("c", tmp_path)


def test_everything_on_the_list_of_what_is_new_is_there_and_counts_once() -> None:
    assert all(lines > 0 for feature in house.new_lines(house.ROOT).values() for lines in feature.values())
    assert house.new_modules(house.ROOT) > 10
    for kind in house.FOLDERS:
        entries = [entry.partition(": ") for feature in house.NEW.values() for entry in feature[kind]]
        names = [(path, name) for path, _, names in entries for name in names.split() or [""]]
        assert len(set(names)) == len(names)
        whole = {path for path, name in names if not name}
        assert not [path for path, name in names if name and whole & {path, *map(str, Path(path).parents)}]
