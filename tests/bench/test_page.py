"""The page stands alone, shows every line, and changes with every number."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedbicross.bench import charts, page, publish, table
from fedbicross.errors import ConfigError, RunError
from fedbicross.report.text import duration, stat
from small import refuses


@pytest.fixture(scope="module")
def text(smoke: Path) -> str:
    return publish.render(["smoke"], "html", smoke, smoke / "pages" / "page.html")


class Walk(HTMLParser):
    """Open tags, links, and rows of the table of numbers."""

    VOID = {"meta", "input", "br", "wbr", "link", "img"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.rows = 0

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [value for key in ("href", "src") if (value := found.get(key))]
        self.ids += [found["id"]] if found.get("id") else []
        self.rows += name == "tr" and "data-method" in found
        if name not in self.VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name


def test_the_page_is_whole_and_alone(text: str, smoke: Path) -> None:
    walk = Walk()
    walk.feed(text)
    assert walk.open == [] and walk.rows == 19
    inner = [link[1:] for link in walk.links if link.startswith("#")]
    assert inner and set(inner) <= set(walk.ids) and len(walk.ids) == len(set(walk.ids))
    raw = [link for link in walk.links if not link.startswith("#")]
    assert len(raw) == 33 and all((smoke / "pages" / link).resolve().is_file() for link in raw)
    assert "http" not in text and "@import" not in text
    assert text.index('id="pays"') < text.index("<svg") < text.index('id="numbers"')


def test_what_it_shows(text: str) -> None:
    for words in ("When does it pay?", "Gain against skew", "Accuracy against seconds", "Accuracy against bytes"):
        assert f"<h2>{words}</h2>" in text
    assert "budget smoke: 0 of 2 published numbers within 5 points" in text
    assert "Not available here, or not made yet: OCTMNIST" in text
    assert "--cells &#39;data=cells,partition=dirichlet,alpha=0.3,clients=2,method=fedavg&#39;" in text
    assert "smoke, Table 0: 4" in text, "published numbers without a cell"


def test_the_same_cells_give_the_same_bytes(text: str, smoke: Path) -> None:
    assert publish.render(["smoke"], "html", smoke, smoke / "pages" / "page.html") == text


def test_every_chart_is_drawn(smoke: Path) -> None:
    groups = table.groups(table.stored_cells(["smoke"], smoke)[1])
    colour = charts.colours(groups)
    assert set(colour) == {"fedavg", "fedisca"}
    pays = charts.when_it_pays(groups)
    assert pays.count("lose</text>") == 2 and "0 to 249" in pays  # two skews, one size
    skew = charts.gains_by_skew(groups[:2], colour, "label")
    assert skew.count("<path") == 2 and "IID" in skew
    assert charts.gains_by_size(groups, colour, "label").count('class="point') >= 3
    assert charts.accuracy_against(groups[:2], "seconds", colour, "label").count("<title>") >= 7
    assert charts.accuracy_against(groups[:2], "bytes", colour, "label")
    assert charts.client_strips(groups[0], "label").count("dot ") >= 4
    assert charts.when_it_pays([]) == charts.gains_by_skew([], colour, "") == charts.gains_by_size([], colour, "") == ""
    assert charts.accuracy_against([], "bytes", colour, "") == ""


def test_seconds_are_marked_at_whole_minutes_and_hours() -> None:
    def shown(low: float, high: float) -> list[str]:
        marks = charts._time_ticks(math.log10(low), math.log10(high))
        return [charts.WHOLE.sub("", duration(value)) for value in marks]

    assert shown(1, 30) == ["1 s", "2 s", "5 s", "10 s", "20 s"]
    assert shown(50, 7000) == ["60 s", "2 min", "5 min", "10 min", "20 min", "60 min"]
    assert len(shown(0.01, 300_000)) <= 6


def test_only_methods_with_all_federations_of_a_field_count(smoke: Path) -> None:
    groups = table.groups(table.stored_cells(["smoke"], smoke)[1])
    one = groups[1]
    lines = {line.method: line for line in one.lines}

    def having(data: str, **gains: float) -> table.Group:
        made = [replace(lines["fedavg"], method=m, role="method", gain=stat([gain])) for m, gain in gains.items()]
        return replace(one, title=data, lines=tuple(made))

    drawn = charts.when_it_pays([having("a", lucky=0.5, both=0.01), having("b", both=0.03)])
    assert "a, b: both +2.0 points; 1 of 1 methods win" in drawn and "lucky" not in drawn
    assert "win" not in charts.when_it_pays([having("a", x=0.1), having("b", y=0.1)])


def test_ablations_are_in_the_table_and_in_no_chart(smoke: Path) -> None:
    suites, statuses = table.stored_cells(["smoke"], smoke)
    cells = [replace(s, cell=replace(s.cell, ablation=s.cell.method == "fedavg")) for s in statuses]
    text = page.render(suites, table.groups(cells), [], smoke)
    charts_end = text.index("<h2>Numbers</h2>")
    assert ">fedavg<" not in text[:charts_end] and "fedavg" in text[charts_end:]
    assert ">fedisca<" in text[:charts_end], "the others are drawn"
    lone = [s for s in cells if s.cell.ablation or s.cell.is_alone]
    assert 'aria-label="When does it pay?"' not in page.render(suites, table.groups(lone), [], smoke)


def test_a_picture_for_each_suite_and_budget(smoke: Path) -> None:
    suites, statuses = table.stored_cells(["smoke"], smoke)
    groups = table.groups(statuses)
    text = page.render(suites, [*groups, *(replace(group, budget="minute") for group in groups)], [], smoke)
    assert text.count('aria-label="When does it pay?"') == 2
    assert "<figcaption>smoke, smoke</figcaption>" in text and "<figcaption>smoke, minute</figcaption>" in text


def test_a_line_needs_two_sizes_of_a_hospital(smoke: Path) -> None:
    groups = table.groups(table.stored_cells(["smoke"], smoke)[1])
    assert charts.gains_by_size([group for group in groups if group.clients == 2], {}, "label") == ""


def test_sizes_are_compared_under_the_same_skews(smoke: Path) -> None:
    groups = table.groups(table.stored_cells(["smoke"], smoke)[1])
    few = [group for group in groups if group.clients == 2]
    skewed, alike = (group for group in few if group.skew == "α = 0.3"), (g for g in few if g.skew == "IID")
    more = [replace(group, clients=9, images=7.0) for group in skewed]
    both = charts.gains_by_size([*few, *more], charts.colours(groups), "label")
    assert ">7</text>" in both
    assert charts.gains_by_size([*alike, *more], {}, "label") == "", "IID beside α = 0.3 says nothing about sizes"


def test_ticks_are_shortened_at_their_end_only() -> None:
    assert [charts.WHOLE.sub("", name) for name in ("0.01 s", "1.00 s", "10.0 kB", "1.05 s")] == [
        "0.01 s",
        "1 s",
        "10 kB",
        "1.05 s",
    ]


def test_great_losses_do_not_flatten_the_others() -> None:
    drawn = charts.gain_lines({"a": [(0.0, -0.9)], "b": [(0.0, 0.01)]}, [(0.0, "x")], "", "", {"a": 0, "b": 1})
    assert "\u221290.0 points" in drawn and "<polygon" in drawn and "\u221250" not in drawn


def test_a_page_without_cells(tmp_path: Path) -> None:
    text = publish.render(["smoke"], "html", tmp_path)
    assert "No cells of a method are stored." in text and "No stored cell stands beside a published number." in text


def test_names_are_escaped(smoke: Path) -> None:
    suites, statuses = table.stored_cells(["smoke"], smoke)
    groups = table.groups(statuses)
    bad = [type(group)(**{**vars(group), "title": "<script>alert(1)</script>"}) for group in groups]
    assert "<script>alert" not in page.render(suites, bad, [], smoke)


@pytest.mark.parametrize("form", ["md", "csv", "latex", "html"])
def test_check_notices_an_edited_number(smoke: Path, tmp_path: Path, form: str) -> None:
    to = tmp_path / f"page.{form}"
    text = publish.render(["smoke"], form, smoke, to)
    publish.write(to, text, form)
    assert publish.differences(to, text, form) == []
    numbers = list(re.finditer(r"\d+\.\d", text))
    found = numbers[-1] if form != "html" else next(m for m in re.finditer(r">[^<>]*?(\d+\.\d) ±", text))
    place = found.start(1) if form == "html" else found.start()
    digit = "1" if text[place] != "1" else "2"
    to.write_text(text[:place] + digit + text[place + 1 :])
    lines = publish.differences(to, text, form)
    assert [line[0] for line in lines] == ["-", "+"]


def test_check_notices_an_edited_cell(smoke: Path, tmp_path: Path) -> None:
    out, to = tmp_path / "out", tmp_path / "page.md"
    shutil.copytree(smoke, out)
    publish.write(to, publish.render(["smoke"], "md", out, to), "md")
    file = next(out.rglob("fedavg.json"))
    content = json.loads(file.read_text())
    content["row"]["accuracy"]["global"] += 0.01
    file.write_text(json.dumps(content))
    assert publish.differences(to, publish.render(["smoke"], "md", out, to), "md")


def test_a_block_of_a_page(smoke: Path, tmp_path: Path) -> None:
    to = tmp_path / "page.md"
    to.write_text("Before\n<!-- bench -->\nold\n<!-- end -->\nAfter\n")
    text = publish.render(["smoke"], "md", smoke, to)
    assert publish.differences(to, text, "md")
    publish.write(to, text, "md")
    assert to.read_text() == f"Before\n<!-- bench -->\n{text}<!-- end -->\nAfter\n"
    assert publish.differences(to, text, "md") == []
    to.write_text(to.read_text().replace("After", "Afterwards"))
    assert publish.differences(to, text, "md") == [], "what is not ours is free"


def test_pages_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with refuses(RunError, "page_unreadable"):
        publish.differences(tmp_path / "gone.md", "", "md")
    (tmp_path / "file").touch()
    with refuses(RunError, "cannot_write"):
        publish.write(tmp_path / "file" / "page.html", "", "html")


def test_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert isinstance(publish.reasons(), list)
    monkeypatch.setattr(publish, "read_toml", lambda file: {"reason": [{"suite": "ours"}]})
    with refuses(ConfigError, "bad_reasons"):
        publish.reasons()
