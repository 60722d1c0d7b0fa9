"""The small run of every method whose digests are compared."""

from __future__ import annotations

import pytest

from benchmarks import digests
from fedbicross.methods import METHODS, create


def test_every_method_is_named_and_takes_the_small_settings() -> None:
    names = digests.all_names()
    assert {name.partition(":")[0] for name in names} == set(METHODS) and "fedavg:personal" in names
    for name in names:
        create(name, digests.table([name]))
    assert create("fedisca:five_shots", digests.table(["fedisca:five_shots"])).rounds == 2, (
        "a large number is made small"
    )
    assert create("primum:no_cutmix", digests.table(["primum:no_cutmix"])).config.cutmix == 0, "a variant stays one"


def test_a_line_for_each_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["digests", "majority", "majority:trusting"])
    digests.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for _, name in lines] == ["majority", "majority:trusting"]
    assert all(len(digest) == 64 for digest, _ in lines) and lines[0][0] != lines[1][0], "the name is in the row"
