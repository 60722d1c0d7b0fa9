"""Which files of the package a file can reach by its imports, at its top or inside a function."""

from __future__ import annotations

import ast
from pathlib import Path

import fedbicross

SOURCE = Path(fedbicross.__file__).parent


def modules_of(target: str) -> list[Path]:
    """The file of a module; for a package every file in it, since its submodules may load lazily."""
    path = SOURCE.joinpath(*target.split(".")[1:])
    if path.is_dir():
        return sorted(path.rglob("*.py"))
    return [path.with_suffix(".py")] if path.with_suffix(".py").exists() else []


def imports_of(file: Path) -> set[str]:
    """Every ``fedbicross`` module that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from fedbicross import steps` reaches steps; `from fedbicross.x import name` may reach x.name.
            inner = {f"{node.module}.{alias.name}" for alias in node.names if modules_of(f"{node.module}.{alias.name}")}
            found |= inner if node.module == "fedbicross" and inner else {node.module, *inner}
    return {name for name in found if name.startswith("fedbicross.")}


def reachable(start: list[Path]) -> set[Path]:
    """All files that can be reached from these, themselves included."""
    seen: set[Path] = set()
    todo = list(start)
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        todo += [path for name in imports_of(file) for path in modules_of(name)]
    return seen
