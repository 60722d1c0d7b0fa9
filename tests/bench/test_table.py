"""From cells to lines: recomputed here the slow way from the stored files."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from fedbicross.bench import statistics, table
from fedbicross.bench.table import Group, Line


@pytest.fixture(scope="module")
def groups(smoke: Path) -> list[Group]:
    return table.groups(table.stored_cells(["smoke"], smoke)[1])


def stored(smoke: Path, federation: str) -> dict[str, dict[str, Any]]:
    folder = smoke / "cells" / "smoke" / "smoke" / federation
    return {path.stem.replace("+", ":"): json.loads(path.read_text())["row"] for path in folder.glob("*.json")}


def line_of(group: Group, method: str) -> Line:
    return next(line for line in group.lines if line.method == method)


def test_groups_in_order(groups: list[Group]) -> None:
    assert [(g.skew, g.clients) for g in groups] == [("α = 0.3", 2), ("IID", 2), ("α = 0.3", 3)]
    assert [len(g.lines) for g in groups] == [7, 7, 5]
    assert groups[0].images == 60 and groups[2].images == 40
    assert [line.role for line in groups[0].lines] == ["alone"] * 3 + ["baseline", "method", "baseline", "method"]


def test_a_line_by_hand(smoke: Path, groups: list[Group]) -> None:
    line = line_of(groups[0], "fedavg")
    seeds = [stored(smoke, f"cells-dirichlet-0.3-n2-resnet8-seed{seed}") for seed in (0, 1)]
    bars = [max(found[spec]["accuracy"]["matched"] for spec in found if "local_only" in spec) for found in seeds]
    gains = [found["fedavg"]["accuracy"]["matched"] - bar for found, bar in zip(seeds, bars, strict=True)]
    assert line.gain.mean == pytest.approx(fmean(gains)) and line.gain.sd == pytest.approx(stdev(gains))
    matched = [found["fedavg"]["accuracy"]["matched"] for found in seeds]
    assert line.accuracy["matched"].mean == pytest.approx(fmean(matched))
    clients = [client for found in seeds for client in found["fedavg"]["clients"]]
    assert line.harmed == sum(client["clearly_harmed"] for client in clients) and line.judged == len(clients) == 4
    assert line.seeds == (0, 1) and line.budget == "smoke" and not line.stale
    assert line.upload.mean == pytest.approx(fmean(found["fedavg"]["upload_bytes"] / 2 for found in seeds))


def test_p_against_training_alone_by_hand(smoke: Path, groups: list[Group]) -> None:
    raw = {}
    for method in ("majority", "fedavg", "ensemble", "fedisca"):
        differences = []
        for seed in (0, 1):
            found = stored(smoke, f"cells-dirichlet-0.3-n2-resnet8-seed{seed}")
            alone = ("local_only", "local_only:balanced", "local_only:both")
            bar = max(alone, key=lambda spec: found[spec]["accuracy"]["matched"])
            own = {c["client"]: c["accuracy"]["matched"] for c in found[bar]["clients"]}
            differences += [c["accuracy"]["matched"] - own[c["client"]] for c in found[method]["clients"]]
        raw[method] = statistics.wilcoxon(differences) or 0.0
    expected = statistics.holm(raw)
    found_p = {line.method: line.p for line in groups[0].lines if line.p is not None}
    assert found_p == pytest.approx(expected)
    assert line_of(groups[0], "local_only").p is None


def test_the_best_way_of_training_alone_has_no_gain(groups: list[Group]) -> None:
    for group in groups:
        alone = [line for line in group.lines if line.role == "alone"]
        assert max(line.gain.mean or -1 for line in alone) <= 0
        assert all(line.harmed is None and line.p is None for line in alone)


def edit(out: Path, change: Callable[[dict[str, Any]], None], name: str = "*/fedavg.json") -> None:
    for path in out.glob(f"cells/smoke/smoke/{name}"):
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))


def test_bold_where_the_gain_is_clear(smoke: Path, tmp_path: Path) -> None:
    shutil.copytree(smoke, tmp_path, dirs_exist_ok=True)
    assert not any(
        line.bold for group in table.groups(table.stored_cells(["smoke"], tmp_path)[1]) for line in group.lines
    )

    def perfect(content: dict[str, Any]) -> None:
        content["row"]["accuracy"]["matched"] = 100.0 + content["cell"]["seed"] / 1000

    edit(tmp_path, perfect)
    found = table.groups(table.stored_cells(["smoke"], tmp_path)[1])
    assert [[line.method for line in group.lines if line.bold] for group in found[:2]] == [["fedavg"]] * 2
    assert not any(line.bold for line in found[2].lines), "one seed says nothing"
    assert "| **fedavg** | **" in table.markdown(found, []) and r"\textbf{fedavg}" in table.latex(found, [])


def test_stale_cells_say_so(smoke: Path, tmp_path: Path) -> None:
    shutil.copytree(smoke, tmp_path, dirs_exist_ok=True)
    edit(tmp_path, lambda content: content.update(digest="0"))
    found = table.groups(table.stored_cells(["smoke"], tmp_path)[1])
    assert {line.method for group in found for line in group.lines if line.stale} == {"fedavg"}
    assert "| fedavg (stale) |" in table.markdown(found, [])


def test_cells_on_other_images_are_not_paired(smoke: Path, tmp_path: Path) -> None:
    shutil.copytree(smoke, tmp_path, dirs_exist_ok=True)
    edit(tmp_path, lambda content: content.update(partition_sha256="0"), "cells-iid-n2-resnet8-seed1/fedavg.json")
    statuses = table.stored_cells(["smoke"], tmp_path)[1]
    assert [(s.cell.method, s.cell.seed, s.reason) for s in statuses if s.state == "stale"] == [
        ("fedavg", 1, "made on other images than training alone")
    ]
    line = line_of(table.groups(statuses)[1], "fedavg")
    assert line.stale and {seed for seed, _ in line.client_gains} == {0} and line.gain.sd is None


def test_published_numbers(smoke: Path, groups: list[Group]) -> None:
    suites, _ = table.stored_cells(["smoke"], smoke)
    found = table.comparisons(suites, groups)
    assert [(c.skew, c.method, bool(c.ours)) for c in found] == [
        ("iid", "fedavg", True),
        ("dirichlet:0.3", "fedavg", True),
        ("iid", "fedavg", False),  # OCTMNIST
        *[(skew, "centralised", False) for skew in ("iid", "dirichlet:0.3", "iid")],
    ]
    mean = line_of(groups[1], "fedavg").accuracy["global"].mean
    assert found[0].ours == {"global": pytest.approx(100 * (mean or 0))} and found[0].seeds == 2
    assert found[0].within == () and found[0].protocol == "global" and found[0].budget == "smoke"
    assert not found[0].reason
    reasons = [{"method": "dafl", "reason": "no"}, {"suite": "smoke", "table": "0", "data": "cells", "reason": "drawn"}]
    assert [c.reason for c in table.comparisons(suites, groups, reasons)][:3] == ["drawn", "drawn", ""]


def test_only_its_own_suite_reproduces_a_paper(smoke: Path, groups: list[Group]) -> None:
    suites, _ = table.stored_cells(["smoke"], smoke)
    other = [replace(group, suite="ours") for group in groups]
    assert not any(c.ours for c in table.comparisons(suites, other))
    assert table.comparisons(suites, [*other, *groups]) == table.comparisons(suites, groups)
    shown = table.comparisons(suites, other)
    assert table.published_for(other[1], line_of(other[1], "fedavg"), shown), "the number is still shown beside"


def test_headlines_count_a_number_once(smoke: Path, groups: list[Group]) -> None:
    suites, _ = table.stored_cells(["smoke"], smoke)
    found = table.comparisons(suites, groups)
    assert table.headlines(found) == ["budget smoke: 0 of 2 published numbers within 5 points"]
    unknown = [replace(c, protocol=None, budget="paper", within=("global", "matched")) for c in found if c.ours]
    assert table.headlines([*found, *unknown]) == [
        "budget smoke: 0 of 2 published numbers within 5 points",
        "budget paper: 2 of 2 published numbers within 5 points under at least one of three protocols "
        "(the paper does not say which)",
    ]
    assert "- budget smoke: 0 of 2 published" in table.markdown(groups, found)


def test_within_five_points(groups: list[Group], smoke: Path) -> None:
    suites, _ = table.stored_cells(["smoke"], smoke)
    mean = 100 * (line_of(groups[1], "fedavg").accuracy["global"].mean or 0)

    def judged(value: float, protocol: str | None = "global", column: str = "cells iid 2") -> tuple[str, ...]:
        old = suites["smoke"].published[0]
        new = old.model_copy(update={"columns": [column], "rows": {"fedavg": [value]}, "protocol": protocol})
        (found,) = table.comparisons({"smoke": suites["smoke"].model_copy(update={"published": [new]})}, groups)
        return found.within

    assert judged(mean + 4.9) == ("global",) and judged(mean + 5.1) == ()
    assert "global" in judged(mean, None), "not stated: all three protocols"
    other = 100 * (line_of(groups[0], "fedavg").accuracy["global"].mean or 0)
    both = "cells iid+dirichlet:0.3 2"
    assert judged((mean + other) / 2, "global", both) == ("global",)
    assert judged((mean + other) / 2 + 5.1, "global", both) == ()
    assert judged(mean, "global", "cells iid+dirichlet:0.7 2") == (), "a mean needs all its parts"


def test_metrics_that_no_cell_holds(smoke: Path, groups: list[Group]) -> None:
    suites, _ = table.stored_cells(["smoke"], smoke)
    old = suites["smoke"].published[0]
    other = suites["smoke"].model_copy(update={"published": [old.model_copy(update={"metric": "psnr"})]})
    assert not any(c.ours for c in table.comparisons({"smoke": other}, groups))


def test_csv_holds_every_number(groups: list[Group]) -> None:
    lines = list(csv.DictReader(io.StringIO(table.as_csv(groups, []))))
    assert len(lines) == 19
    first, line = lines[4], groups[0].lines[4]
    assert (first["method"], first["alpha"], first["budget"], first["seeds"]) == ("fedavg", "0.3", "smoke", "2")
    assert float(first["gain_points"]) == pytest.approx(100 * (line.gain.mean or 0))
    assert float(first["matched_percent_sd"]) == pytest.approx(100 * (line.accuracy["matched"].sd or 0))
    assert first["command"].startswith("fedbicross bench run smoke --budget smoke --cells 'data=cells,")
    assert lines[0]["p_holm"] == "n/a"


def test_latex_is_whole(groups: list[Group]) -> None:
    text = table.latex(groups, [])
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 3
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count(" & ") for line in rows} == {len(table.HEADER) - 1}
    assert r"local\_only" in text and "α" not in "".join(rows)


def test_nothing_stored(tmp_path: Path) -> None:
    suites, statuses = table.stored_cells(["smoke"], tmp_path)
    assert statuses == [] and table.groups(statuses) == [] and table.missing_data(suites, []) == []
    assert table.markdown([], []) == "No cells are stored.\n"


def test_data_without_cells_are_named(smoke: Path, groups: list[Group]) -> None:
    suites, _ = table.stored_cells(["smoke"], smoke)
    assert table.missing_data(suites, groups) == ["OCTMNIST"]
    assert "not made yet: OCTMNIST" in table.markdown(groups, [], ["OCTMNIST"])
