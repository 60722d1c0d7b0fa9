"""The commands of "Three hospitals, no network" are followed word by word, on DICOM folders."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest

from data.scans import NAME, dicom
from fedbicross.cli import main
from fedbicross.deploy import compare
from fedbicross.transport.federation_file import load_federation

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "three-hospitals-by-files.md"
SITES = ("north", "south", "east")


def blocks() -> list[tuple[str, list[str]]]:
    """(marker, lines) of every shell block, in order."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"(?:<!-- test: ([^>]*?) -->\n)?```bash\n(.*?)```", text, flags=re.DOTALL)
    assert all(marker for marker, _ in found), "every shell block says who runs it"
    return [(marker, block.replace("\\\n", " ").strip().splitlines()) for marker, block in found]


def follow(line: str, more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    assert words[0] == "fedbicross", "nothing is copied by hand"
    monkeypatch.setattr(sys, "argv", words + shlex.split(more))
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code, f"{line}: {capsys.readouterr().err}"


def draw(folder: Path, rng: np.random.Generator) -> None:
    """DICOM files of two classes, two of each patient, and a new one without a class."""
    for label, level in (("benign", 800), ("malignant", 2400)):
        for number in range(12):
            values = rng.normal(level, 300, (12, 12)).clip(0, 4095).astype(np.uint16)
            tags = {"WindowCenter": 2048, "WindowWidth": 4096}
            dicom(folder / "images" / label / f"{number}.dcm", values, f"MRN-{label}-{number // 2}", **tags)
    dicom(folder / "new" / "scan", rng.integers(4096, size=(12, 12), dtype=np.uint16), "MRN-new")


@pytest.mark.slow
def test_the_page_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for name in (*SITES, "server", "post"):
        (tmp_path / name).mkdir()
    for name in SITES:
        draw(tmp_path / name, rng)
    commands = 0
    for marker, lines in blocks():
        where, _, more = marker.partition(", adding: ")
        if "FINGERPRINT" in more:  # what the server's people read out
            heard = load_federation(tmp_path / "server" / "federation.toml").fingerprint
            more = more.replace("FINGERPRINT", shlex.quote(heard))
        for name in SITES if where == "at each site" else ("server",):
            assert where in ("at each site", "at the server")
            with chdir(tmp_path / name):
                for line in lines:
                    own = line.replace("north", name) if where == "at each site" else line
                    follow(own, more, monkeypatch, capsys)
                    commands += 1
    assert f"{commands} commands in all" in PAGE.read_text(encoding="utf-8")
    travelled = b"".join(path.read_bytes() for path in (tmp_path / "post").rglob("*") if path.is_file())
    assert b"MRN-" not in travelled and NAME.encode() not in travelled, "nothing of a patient is on the stick"
    for name in SITES:
        model = tmp_path / name / "model"
        comparison = json.loads((model / "config.json").read_text())["comparison"]
        assert comparison["images"] > 0
        card = (model / "MODEL_CARD.md").read_text()
        assert all(line in card for line in compare.advice(comparison)), "whether taking part helped"
        (row,) = csv.DictReader((tmp_path / name / "predictions.csv").read_text().splitlines())
        assert row["predicted"] in ("benign", "malignant") and "MRN" not in str(row)
        assert abs(float(row["benign"]) + float(row["malignant"]) - 1) < 1e-5
