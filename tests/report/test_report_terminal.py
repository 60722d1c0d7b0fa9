from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedbicross.report import terminal
from fedbicross.report.summary import summarise
from fedbicross.report.verdict import judge

LONG = [("local_only", "baseline", (0.5, 0.9, 0.6)), ("e_fedisca:five_shots:personal", "method", (0.61, 0.82, 0.7))]


@pytest.mark.parametrize("seeds", [1, 3])
def test_everything_fits_100_columns_and_no_number_is_broken(make_results, seeds: int) -> None:
    results = make_results(seeds=seeds, methods=LONG)
    lines = terminal.text(results).splitlines()
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines)
    row = next(line for line in lines if line.startswith("local_only"))
    assert row.count("±") == (3 if seeds > 1 else 0)
    verdict = judge(results, summarise(results)).headline
    assert " ".join(lines).endswith(f"verdict: {verdict}"), "the last lines"
    name = lines.index("e_fedisca:")  # broken after its colons
    assert [line.split()[0] for line in lines[name : name + 3]] == ["e_fedisca:", "five_shots:", "personal"]


def test_names_are_no_markup(make_results) -> None:
    results = make_results(methods=[("[red]x[/red]", "method", (0.5, 0.9, 0.6))], name="[/b] :smile:")
    stream = io.StringIO()
    terminal.print_all(results, Console(file=stream, width=100))
    assert stream.getvalue().startswith("[/b] :smile:: accuracy") and "[red]x[/red]" in stream.getvalue()
