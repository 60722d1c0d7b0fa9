"""A release can be made again by anybody, to the same bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


def build(source: Path, out: Path) -> Path:
    out.mkdir()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=source, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_the_wheel_is_the_same_wherever_and_whenever_it_is_built(tmp_path: Path) -> None:
    wheels = []
    for number in range(2):
        source = tmp_path / f"checkout-{number}"
        source.mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source / name)
        shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for file in source.rglob("*"):
            os.utime(file, (1e9 + number, 1e9 + number))  # two checkouts at different times
        wheels.append(build(source, tmp_path / f"out-{number}"))
    first, second = (hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
    assert first == second
    names = zipfile.ZipFile(wheels[0]).namelist()
    assert "fedbicross/disclosure/templates/statement.html.j2" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
