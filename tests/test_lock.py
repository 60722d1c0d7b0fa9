"""The locks name every file that the two commands install, but for torch; docs/security.md says why."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements.lock", "requirements-dev.lock")
SYSTEMS = [
    {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": system, "extra": ""}
    for python in ("3.11", "3.12", "3.13")
    for system in ("linux", "darwin")
]


def locked(name: str) -> list[tuple[Requirement, int]]:
    """Each entry of a lock, and how many files it allows."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    entries = []
    for line in text.splitlines():
        requirement, _, hashes = line.partition(" --hash=")
        entries.append((Requirement(requirement), len(re.findall(r"sha256:[0-9a-f]{64}\b", hashes))))
    return entries


def versions(name: str, environment: dict[str, str]) -> dict[str, Version]:
    """What would be installed there."""
    found: dict[str, Version] = {}
    for entry, _ in locked(name):
        if entry.marker is None or entry.marker.evaluate(environment):
            package = canonicalize_name(entry.name)
            assert package not in found, f"{package} twice in {name} for {environment}"
            (pin,) = entry.specifier
            assert pin.operator == "=="
            found[package] = Version(pin.version)
    return found


def asked_for(dev: bool) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"] if dev else {}
    found = [Requirement(text) for text in [*project["dependencies"], *(t for group in extras.values() for t in group)]]
    return [one for one in found if one.name not in ("torch", "fedbicross")]


@pytest.mark.parametrize("name", LOCKS)
def test_every_entry_has_hashes_and_no_address(name: str) -> None:
    entries = locked(name)
    assert len(entries) > 30
    assert [entry.name for entry, files in entries if not files] == []
    assert "://" not in (ROOT / name).read_text(encoding="utf-8")
    of_torch = re.compile(r"torch|triton|cuda|nvidia")
    assert [entry.name for entry, _ in entries if of_torch.match(entry.name)] == []


@pytest.mark.parametrize("environment", SYSTEMS, ids=lambda one: f"{one['python_version']}-{one['sys_platform']}")
def test_a_lock_holds_what_pyproject_asks_for(environment: dict[str, str]) -> None:
    small, large = (versions(name, environment) for name in LOCKS)
    assert small.items() <= large.items(), "the tests run with what the demo runs with"
    for found, dev in ((small, False), (large, True)):
        for one in asked_for(dev):
            assert found[canonicalize_name(one.name)] in one.specifier, one
    limits = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    assert "torch" in [one.name for one in limits]
    for one in limits:
        if one.name in large:
            assert large[one.name] in one.specifier, one


def test_both_commands_install_by_hash() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^LOCKED := .* --require-hashes --no-deps -r$", text, re.MULTILINE)
    assert [f"$(LOCKED) {name}" in text for name in LOCKS] == [True, True]
    (itself,) = re.findall(r"^ITSELF := (.*)$", text, re.MULTILINE)
    assert "--no-deps" in itself, "else what a lock lacks is fetched without looking at hashes"
    assert "--no-build-isolation" in itself, "else the build backend is"
    assert text.count("-m pip check") == 2, "what a lock lacks is an error"
