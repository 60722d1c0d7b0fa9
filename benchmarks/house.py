"""How large the house is, now and before the rebuild: `python -m benchmarks.house --before CHECKOUT --to FILE`.

``CHECKOUT`` is a working tree of commit df06ece. `house.toml` lists what could not be done then; its lines are counted
apart. ``run_imports`` are the modules of the package that one small run of FedBiCross imports, ``run_calls`` those of
which it calls a function.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEFORE = "df06ece"
RUN = """
import sys, fedbicross
small = {"steps": 1, "batch": 8, "trajectories": 1, "probes": 4, "epochs_personal": 1, "clusters": 2}
called = set()
sys.setprofile(lambda frame, event, _: called.add((frame.f_globals.get("__name__"), frame.f_code.co_name)))
fedbicross.run("cells", quick=True, methods=["fedbicross"], baselines=["local_only"], clients=2, threads=1,
    device="cpu", data={"train_size": 40, "test_size": 8, "image_size": 12}, training={"epochs": 1},
    method={"fedbicross": small})
sys.setprofile(None)
ours = lambda names: len({name for name in names if str(name).split(".")[0] == "fedbicross"})
print(ours(sys.modules), ours(module for module, function in called if function != "<module>"))
"""
# Stage 2 of FedBiCross: the loop, Eqs. 6 to 8, the samples that it reads, and how a killed run goes on.
STAGE_2 = {
    "before": [
        "methods/fedbicross.py",
        "methods/synthesis.py",
        "steps/crosscluster.py",
        "steps/bilevel.py",
        "steps/trajectory.py",
        "context.py",
        "bundle/format.py",
    ],
    "now": ["methods/fedbicross.py", "steps/bilevel.py", "steps/trajectory.py", "stages.py"],
}
NEW = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["new"]
FOLDERS = {"src": "src/fedbicross", "tests": "tests"}


def git(*words: str) -> str:
    """What it prints about this repository."""
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def length(file: Path) -> int:
    """Lines of a file."""
    return len(file.read_text(encoding="utf-8").splitlines())


def python_files(folder: Path) -> list[Path]:
    """Every Python file below a folder, stubs too; or the file itself."""
    return [folder] if folder.is_file() else sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")])


def inner_imports(file: Path) -> int:
    """Import statements inside functions."""
    functions = [n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    return len({id(n) for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)})


def definitions(file: Path) -> dict[str, int]:
    """Lines of every function and class of a file, and of every method as ``Class.method``, decorators included."""

    def walk(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, int]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield prefix + node.name, (node.end_lineno or first) - first + 1
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body, f"{node.name}.")

    return dict(walk(ast.parse(file.read_text(encoding="utf-8")).body))


def lines_of(entry: str, root: Path) -> int:
    """Lines of a file, of a folder, or of the definitions named after a colon; an error where there is none."""
    path, _, names = entry.partition(": ")
    if names:
        found = definitions(root / path)
        return sum(found[name] for name in names.split())
    files = python_files(root / path)
    if not files:
        raise FileNotFoundError(path)
    return sum(map(length, files))


def is_there(entry: str, root: Path) -> bool:
    """Whether any part of an entry is in this tree."""
    path, _, names = entry.partition(": ")
    if not names or not (root / path).exists():
        return (root / path).exists()
    return bool(set(names.split()) & definitions(root / path).keys())


def new_lines(root: Path) -> dict[str, dict[str, int]]:
    """Lines of what is new, by feature."""
    return {
        feature: {
            kind: sum(lines_of(entry, root / FOLDERS[kind]) for entry in entries) for kind, entries in parts.items()
        }
        for feature, parts in NEW.items()
    }


def new_modules(root: Path) -> int:
    """How many modules are new as a whole."""
    whole = [entry for parts in NEW.values() for entry in parts["src"] if ": " not in entry]
    return sum(file.suffix == ".py" for entry in whole for file in python_files(root / FOLDERS["src"] / entry))


def not_new(before: Path) -> list[str]:
    """Entries of the list that were there before: none, or the list is wrong."""
    entries = [(kind, entry) for parts in NEW.values() for kind, found in parts.items() for entry in found]
    return [entry for kind, entry in entries if is_there(entry, before / FOLDERS[kind])]


def lines_by_commits(folder: str) -> dict[str, int]:
    """Lines added less lines deleted since then: by commits of the rebuild, whose subjects say refactor, and by others.

    A commit that was made on two branches counts once.
    """
    log = git("log", "--no-merges", "-M", "--numstat", "--format=@%s", f"{BEFORE}..HEAD", "--", folder)
    by_subject: dict[str, int] = {}
    for commit in log.split("@")[1:]:
        subject, *files = [line for line in commit.splitlines() if line]
        found = [line.split("\t") for line in files if re.search(r"\.pyi?\}?$", line)]
        by_subject.setdefault(subject, sum(int(added) - int(deleted) for added, deleted, _ in found))
    rebuild = sum(lines for subject, lines in by_subject.items() if subject.startswith("refactor"))
    return {"rebuild": rebuild, "others": sum(by_subject.values()) - rebuild}


def unique_definitions(folder: Path) -> dict[str, int]:
    """Lines of every function and class whose name stands in one file of a folder only."""
    found = [item for file in folder.rglob("*.py") for item in definitions(file).items() if "." not in item[0]]
    names = Counter(name for name, _ in found)
    return {name: lines for name, lines in found if names[name] == 1}


def same_names(before: Path, folder: str) -> dict[str, int]:
    """Functions and classes of the same name in both trees: how many, and their lines in each."""
    old, new = unique_definitions(before / folder), unique_definitions(ROOT / folder)
    both = old.keys() & new.keys()
    return {"names": len(both), "before": sum(old[n] for n in both), "now": sum(new[n] for n in both)}


def count(root: Path, stage_2: list[str]) -> dict[str, Any]:
    """All numbers of one tree."""
    source = root / FOLDERS["src"]
    methods = sorted((source / "methods").glob("*.py"), key=length)
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    run = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True, env=environment)
    imported, called = map(int, run.stdout.split()[-2:])
    return {
        "src_lines": sum(map(length, python_files(source))),
        "tests_lines": sum(map(length, python_files(root / "tests"))),
        "modules": len(list(source.rglob("*.py"))),
        "inner_imports": sum(map(inner_imports, source.rglob("*.py"))),
        "longest_method": [methods[-1].name, length(methods[-1])],
        "stage_2": {name: length(source / name) for name in stage_2},
        "run_imports": imported,
        "run_calls": called,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help=f"a working tree of {BEFORE}")
    parser.add_argument("--to", type=Path, default=ROOT / "results" / "benchmarks" / "house.json")
    arguments = parser.parse_args()
    wrong = not_new(arguments.before)
    if wrong:
        parser.error(f"not new: {wrong}")
    found = {
        "commits": {"before": BEFORE, "now": git("rev-parse", "--short", "HEAD").strip()},
        "before": count(arguments.before.resolve(), STAGE_2["before"]),
        "now": count(ROOT, STAGE_2["now"]),
        "new_lines": new_lines(ROOT),
        "new_modules": new_modules(ROOT),
        "same_names": {kind: same_names(arguments.before, folder) for kind, folder in FOLDERS.items()},
        "by_commits": {kind: lines_by_commits(folder) for kind, folder in FOLDERS.items()},
    }
    arguments.to.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
