"""The container file cannot be built in a test; what it names has to exist."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from cli.console import call

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def test_what_the_container_file_names_exists() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", TEXT, re.MULTILINE)
    assert stages == [("python:3.12-slim", "wheels"), ("python:3.12-slim", "site"), ("site", "server")]
    for line in re.findall(r"^COPY (.*)$", TEXT, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    copied = {source for line in re.findall(r"^COPY (.*)$", TEXT, re.MULTILINE) for source in line.split()[:-1]}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored and {line[1:] for line in ignored if line.startswith("!")} == copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {extra for group in re.findall(r"\[([a-z,]+)\]'", TEXT) for extra in group.split(",")}
    assert extras == {"dicom", "nifti", "onnx", "flower"} and extras <= project["optional-dependencies"].keys()


def test_nothing_but_torch_is_installed_without_a_hash() -> None:
    commands = re.findall(r"\bpip (install|download) ([^&\n]*)", TEXT)
    for verb, options in commands:
        hashed = "--require-hashes --no-deps" in options
        from_hashed = "--no-index --find-links /wheels --no-build-isolation" in options and verb == "install"
        assert hashed or from_hashed or options.split()[-3:] == ["-c", "constraints.txt", "torch"], options
    assert len(commands) == 5 and TEXT.count("--mount=type=bind,from=wheels,source=/wheels,target=/wheels") == 2


def test_its_commands_are_ours_and_nobody_is_root() -> None:
    for command in re.findall(r"^CMD (.*)$", TEXT, re.MULTILINE):
        assert call(*json.loads(command)).code == 0
    assert re.findall(r"^USER (.*)$", TEXT, re.MULTILINE)[-1] == "fedbicross"
    assert re.findall(r"^ENTRYPOINT (.*)$", TEXT, re.MULTILINE) == ['["fedbicross"]']
