"""The commands of "Three hospitals, no network" are followed word by word, by each hospital and the server."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedbicross.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "three-hospitals-by-files.md"
SITES = ("north", "south", "east")


def blocks() -> list[tuple[str, list[str]]]:
    """(marker, lines) of every shell block, in order."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"(?:<!-- test: ([^>]*?) -->\n)?```bash\n(.*?)```", text, flags=re.DOTALL)
    assert all(marker for marker, _ in found), "every shell block says who runs it"
    return [(marker, block.strip().splitlines()) for marker, block in found]


def follow(line: str, more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    if words[:2] == ["mkdir", "-p"]:
        Path(words[2]).mkdir(parents=True, exist_ok=True)
        return
    if words[0] == "cp":
        shutil.copy(words[1], words[2])
        return
    assert words[0] == "fedbicross"
    monkeypatch.setattr(sys, "argv", words + (shlex.split(more) if words[1] == "federation" else []))
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code, f"{line}: {capsys.readouterr().err}"


@pytest.mark.slow
def test_the_page_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for name in (*SITES, "server"):
        (tmp_path / name).mkdir()
        for label, level in (("benign", 80), ("malignant", 160)) if name != "server" else ():
            (tmp_path / name / "images" / label).mkdir(parents=True)
            for number in range(12):
                pixels = rng.normal(level, 30, (10, 10, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / name / "images" / label / f"{number}.png")
    for marker, lines in blocks():
        where, _, more = marker.partition(", adding: ")
        for name in SITES if where == "at each site" else ("server",):
            assert where in ("at each site", "at the server")
            with chdir(tmp_path / name):
                for line in lines:
                    own = line.replace("north", name) if where == "at each site" else line
                    follow(own, more, monkeypatch, capsys)
    for name in SITES:
        assert (tmp_path / name / "model" / "MODEL_CARD.md").is_file()
        assert len((tmp_path / name / "predictions.csv").read_text().splitlines()) == 25
