"""The tests under other processor kernels: `python -m benchmarks.suite SETTING` (two cores, about ten minutes each).

From a fresh clone. One row a setting is kept in results/benchmarks/suite.json. A processor can be told to leave its
newer instructions alone, and each set adds up in another order; with two threads, in yet another one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from fedbicross.runs.environment import versions

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "sse41": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "two-threads": {"FEDBICROSS_TEST_THREADS": "2"},
    "check": {},  # without the slow ones
}
PYTEST = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]


def told(junit: Path) -> dict[str, Any]:
    """What a JUnit file tells: counts, and seconds on the clock."""
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    total, failed, skipped = (int(suite.attrib[name]) for name in ("tests", "failures", "skipped"))
    errors = int(suite.attrib["errors"])
    made = {"passed": total - failed - errors - skipped, "failed": failed + errors, "skipped": skipped}
    return {**made, "seconds": round(float(suite.attrib["time"]), 1)}


def commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--junit", type=Path, help="the file of a run that was made already")
    parser.add_argument("--commit", default=None, help="of that run")
    parser.add_argument("--note", default="", help="what else ran on the machine, what was mended afterwards")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/suite.json"))
    given = parser.parse_args()
    setting = SETTINGS[given.setting]
    with tempfile.TemporaryDirectory() as folder:
        junit = given.junit or Path(folder) / "junit.xml"
        if not given.junit:
            words = [*PYTEST, f"--junitxml={junit}", *(["-m", "not slow"] if given.setting == "check" else [])]
            subprocess.run(words, env={**os.environ, **setting}, check=False)
        row = {"setting": given.setting, "environment": setting, "commit": given.commit or commit(), **told(junit)}
    row["note"] = given.note
    kept = json.loads(given.out.read_text(encoding="utf-8"))["rows"] if given.out.exists() else []
    rows = {**{old["setting"]: old for old in kept}, given.setting: row}
    stored = {"rows": [rows[name] for name in SETTINGS if name in rows], "versions": versions("cpu")}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(stored, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
