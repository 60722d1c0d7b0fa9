"""`fedbicross bench` from the list to the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.console import call, ok


def test_list() -> None:
    found = call("bench", "list", "--json").json()
    assert set(found) == {"ours", "primum", "fedbicross", "fedisca", "e_fedisca", "falcon", "smoke"}
    assert found["smoke"]["cells"] == 37 and found["fedbicross"]["published"] == 3 * 13 * 16
    assert "Smoke test" in call("bench", "list").out


@pytest.mark.slow
def test_from_the_first_cell_to_the_page(tmp_path: Path) -> None:
    out, page = tmp_path / "bench", tmp_path / "page.html"
    words = ("smoke", "--out", out, "--data-dir", tmp_path)
    chosen = ok("bench", "run", *words, "--cells", "clients=3,method=fedavg")
    assert chosen.out == "smoke: 4 cells made\n"
    none = call("bench", "run", *words, "--budget-minutes", "0")
    assert none.out == "smoke: 0 cells made, 29 left, the same command goes on, 4 not available here\n"
    rest = call("bench", "run", *words)
    assert rest.out == "smoke: 29 cells made, 4 not available here\n"
    assert call("bench", "run", *words).out == "smoke: 0 cells made, 4 not available here\n"

    status = call("bench", "status", *words)
    assert status.out.splitlines()[-1] == "33 done, 0 stale, 0 failed, 0 missing, 4 not available here"
    cells = call("bench", "status", *words, "--json").json()
    assert len(cells) == 37 and {cell["state"] for cell in cells} == {"done", "not available here"}

    for form, sign in (("md", "### Drawn cells"), ("csv", "suite,data,"), ("latex", "% written by"), ("html", "<!doc")):
        assert call("bench", "table", "smoke", "--out", out, "--format", form).out.startswith(sign)
    assert call("bench", "table", "--out", out).out == "No cells are stored.\n", "smoke has to be named"
    made = ("bench", "table", "smoke", "--out", out, "--format", "html", "--to", page)
    assert call(*made).code == 0
    assert call(*made, "--check").code == 0
    text = page.read_text()
    edited = text.replace("2 hospitals", "7 hospitals", 1)
    assert edited != text
    page.write_text(edited)
    checked = call(*made, "--check")
    assert checked.code == 1 and "is not what the stored cells say" in checked.err
    assert page.read_text() == edited, "a check writes nothing"


@pytest.mark.slow
def test_two_workers_and_the_way_home(tmp_path: Path) -> None:
    out, file = tmp_path / "bench", tmp_path / "cells.jsonl.gz"
    words = ("smoke", "--out", out, "--cells", "clients=3")
    made = call("bench", "run", *words, "--workers", "2")
    assert made.code == 0 and made.out.splitlines()[-1] == "smoke: 5 cells made"
    assert call("bench", "run", *words, "--workers", "2").out.splitlines()[-1] == "smoke: 0 cells made"
    assert call("bench", "pack", "smoke", "--out", out, "--to", file).out.startswith(f"5 cells in {file} (")
    home = ("bench", "unpack", file, "--out", tmp_path / "home")
    assert call(*home).out == "5 cells written, 0 kept as they were, 0 refused\n"
    assert call(*home).out == "0 cells written, 5 kept as they were, 0 refused\n"
    refused = call(*home, "ours")
    assert refused.code == 4 and "error[cells_refused]" in refused.err and "none of the suites" in refused.err
    table = [call("bench", "table", "smoke", "--out", where).out for where in (out, tmp_path / "home")]
    assert table[0] == table[1] != "No cells are stored.\n"


@pytest.mark.slow
def test_stale_cells_are_shown(tmp_path: Path) -> None:
    words = ("smoke", "--out", tmp_path, "--cells", "clients=3,method=fedavg")
    call("bench", "run", *words)
    file = next(tmp_path.rglob("fedavg.json"))
    file.write_text(json.dumps({**json.loads(file.read_text()), "digest": "0", "engine_version": 0}))
    status = call("bench", "status", *words)
    assert "3 done, 1 stale" in status.out and "engine 0, now" in status.out
    assert call("bench", "run", *words).out == "smoke: 1 cells made\n"


@pytest.mark.parametrize(
    ("words", "code", "status"),
    [
        (("run", "smok"), "unknown_suite", 2),
        (("run", "smoke", "--cells", "method=none"), "no_cells", 2),
        (("run", "smoke", "--cells", "colour=red"), "bad_filter", 2),
        (("run", "smoke", "--budget", "hour"), "unknown_budget", 2),
        (("status", "gone.toml"), "no_config", 2),
        (("table", "smoke", "--check"), "no_page", 2),
        (("table", "smoke", "--check", "--to", "gone.md"), "page_unreadable", 4),
        (("table", "smoke", "--format", "pdf"), "usage", 2),
        (("run", "smoke", "--budget-minutes", "-1"), "usage", 2),
        (("run", "smoke", "--workers", "0"), "usage", 2),
        (("run", "smoke", "--workers", "2", "--engine", "ray"), "ray_or_workers", 2),
        (("pack", "smoke", "--to", "cells.gz"), "nothing_to_pack", 4),
        (("unpack", "gone.gz"), "pack_unreadable", 4),
    ],
)
def test_mistakes(words: tuple[str, ...], code: str, status: int, tmp_path: Path) -> None:
    done = call("bench", *words, "--out", tmp_path / "out")
    assert f"error[{code}]" in done.err and done.code == status
    assert not (tmp_path / "out").exists()


def test_a_method_that_fails_ends_with_its_error(tmp_path: Path) -> None:
    suite = tmp_path / "mine.toml"
    suite.write_text(
        """
title = "Mine"
budget = "smoke"
model = "cnn"
device = "cpu"
[training]
recipe = "modern"
epochs = 1
[data.cells]
image_size = 8
train_size = 40
test_size = 16
[[sweep]]
name = "one"
data = ["cells"]
partitions = ["iid"]
clients = [2]
alone = ["local_only"]
methods = ["fedisca", "fedavg"]
"""
    )
    done = call("bench", "run", suite, "--out", tmp_path / "out")
    assert done.code == 2 and "error[needs_batchnorm]" in done.err
    assert done.out == "mine: 2 cells made, 1 failed\n"
    status = call("bench", "status", suite, "--out", tmp_path / "out")
    assert "2 done, 0 stale, 1 failed" in status.out and "failed: mine/smoke/" in status.out
