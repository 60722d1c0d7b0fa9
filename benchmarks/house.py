"""How large the house is, now and before the rebuild: `python -m benchmarks.house --before CHECKOUT --to FILE`.

``CHECKOUT`` is a working tree of commit df06ece. ``rebuilt_lines`` are those that commits of the rebuild added, less
those that they took away; all other growth is what was built since. ``run_imports`` are the modules of the package that
one small run of FedBiCross imports, ``run_calls`` those of which it calls a function.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
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
FOLDERS = {"src": "src/fedbicross", "tests": "tests"}


def git(*words: str) -> str:
    """What it prints about this repository."""
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def length(file: Path) -> int:
    """Lines of a file."""
    return len(file.read_text(encoding="utf-8").splitlines())


def python_files(folder: Path) -> list[Path]:
    """Every Python file below a folder, stubs too."""
    return [*folder.rglob("*.py"), *folder.rglob("*.pyi")]


def inner_imports(file: Path) -> int:
    """Import statements inside functions."""
    functions = [n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    return len({id(n) for f in functions for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)})


def rebuilt_lines(folder: str) -> int:
    """Lines added less lines deleted by the commits of the rebuild, whose subjects say refactor.

    A commit that was made on two branches counts once.
    """
    log = git("log", "--no-merges", "-M", "--numstat", "--format=@%s", f"{BEFORE}..HEAD", "--", folder)
    by_subject: dict[str, int] = {}
    for commit in log.split("@")[1:]:
        subject, *files = [line for line in commit.splitlines() if line]
        found = [line.split("\t") for line in files if re.search(r"\.pyi?\}?$", line)]
        by_subject.setdefault(subject, sum(int(added) - int(deleted) for added, deleted, _ in found))
    return sum(lines for subject, lines in by_subject.items() if subject.startswith("refactor"))


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
    found = {
        "commits": {"before": BEFORE, "now": git("rev-parse", "--short", "HEAD").strip()},
        "before": count(arguments.before.resolve(), STAGE_2["before"]),
        "now": count(ROOT, STAGE_2["now"]),
        "rebuilt_lines": {kind: rebuilt_lines(folder) for kind, folder in FOLDERS.items()},
    }
    arguments.to.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
