"""How large the house is: `python -m benchmarks.house` prints lines, modules and imports as JSON.

``run_modules`` are the modules of this package that one quick run of FedBiCross imports.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedbicross"
RUN = """
import sys, fedbicross
small = {"steps": 1, "batch": 8, "trajectories": 1, "probes": 4, "epochs_personal": 1, "clusters": 1}
fedbicross.run("cells", quick=True, methods=["fedbicross"], baselines=["local_only"], clients=2, threads=1,
    device="cpu", data={"train_size": 40, "test_size": 8, "image_size": 12}, training={"epochs": 1},
    method={"fedbicross": small})
print(sum(name.split(".")[0] == "fedbicross" for name in sys.modules))
"""


def lines(folder: Path) -> int:
    """Lines of all Python files in it."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in folder.rglob("*.py"))


def inner_imports(file: Path) -> int:
    """Import statements inside functions; one inside a nested function counts for both."""
    functions = [n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    return sum(isinstance(node, ast.Import | ast.ImportFrom) for f in functions for node in ast.walk(f))


def house() -> dict[str, object]:
    """All numbers."""
    files = list(SOURCE.rglob("*.py"))
    longest = max(SOURCE.joinpath("methods").glob("*.py"), key=lambda file: len(file.read_text().splitlines()))
    run = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    return {
        "src_lines": lines(SOURCE),
        "tests_lines": lines(ROOT / "tests"),
        "modules": len(files),
        "imports_inside_functions": sum(map(inner_imports, files)),
        "longest_method": [longest.name, len(longest.read_text().splitlines())],
        "run_modules": int(run.stdout.split()[-1]),
    }


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(json.dumps(house(), indent=2))
