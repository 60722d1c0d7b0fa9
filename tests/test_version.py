"""The version stands in one place, and the changelog begins with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import fedbicross

ROOT = Path(__file__).parents[1]


def test_the_package_takes_its_version_from_the_code() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pyproject["project"]["dynamic"] == ["version"]
    source = (ROOT / pyproject["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert f'__version__ = "{fedbicross.__version__}"' in source
    assert "version:" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8").replace("cff-version:", "")


def test_the_changelog_begins_with_it() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert first is not None and first[1] == fedbicross.__version__
