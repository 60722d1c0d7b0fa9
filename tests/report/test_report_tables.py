"""Markdown, CSV and LaTeX: well-formed whatever the names are, with the right numbers in them."""

from __future__ import annotations

import csv
import io
import re
import statistics

import pytest

from fedbicross.report import tables
from fedbicross.report.classes import class_csv
from fedbicross.report.metric import judged_by

NASTY = [
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    " =1",
    "a|b",
    "a\nb",
    "100 % & $5 #1 _x_ {y} ~^\\",
    "[x]*",
]


def rename(results, name):
    for row in results["rows"]:
        if row["method"] == "fedisca":
            row["method"] = name
        for client in row["clients"]:
            client["client"] = name if client["client"] == "client-0" else client["client"]
    return results


def test_one_line_a_method_and_seeds_brought_together(make_results):
    results = make_results(seeds=3)
    rows = tables.result_table(results)
    assert [row[0] for row in rows][:2] == ["local_only", "majority"] and rows[-1][0] == "centralised"
    values = [100 * row["accuracy"]["matched"] for row in results["rows"] if row["method"] == "fedisca"]
    line = next(row for row in rows if row[0] == "fedisca")
    assert line[2] == f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"
    assert line[5].endswith("of 15")
    assert line[6:8] == ["44.7 MB", "89.4 MB"]
    assert "±" not in tables.markdown(make_results(seeds=1))


@pytest.mark.parametrize("name", NASTY)
def test_markdown_is_a_table(make_results, name):
    lines = tables.markdown(rename(make_results(), name)).splitlines()
    assert len(lines) == 2 + 8
    columns = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines}
    assert columns == {len(tables.header({})) + 1}


def test_markdown_escapes():
    assert tables._markdown_cell("ensemble:class_weighted") == "ensemble:class_weighted"
    assert tables._markdown_cell("_x_ <b> `c` a|b") == "\\_x\\_ &lt;b&gt; \\`c\\` a\\|b"


@pytest.mark.parametrize("name", NASTY)
def test_csv_cells_cannot_be_formulas(make_results, name):
    results = rename(make_results(), name)
    for text in (tables.result_csv(results), tables.client_csv(results)):
        rows = list(csv.reader(io.StringIO(text)))
        assert {len(row) for row in rows} == {len(rows[0])}
        for cell in (cell for row in rows for cell in row):
            assert cell[:1] not in ("=", "+", "@", "\t", "\r")
            assert not cell.startswith("-") or float(cell) < 0


def test_client_csv_is_complete_and_exact(make_results):
    results = make_results(seeds=2)
    rows = list(csv.DictReader(io.StringIO(tables.client_csv(results))))
    assert tuple(rows[0]) == tables.CLIENT_HEADER
    per_client = 3 * len(tables.CLIENT_METRICS) + len(tables.against_alone({})) + len(tables.CLIENT_COSTS)
    assert len(rows) == 2 * 8 * 5 * per_client
    wanted = {"method": "fedisca", "seed": "1", "client": "client-3", "protocol": "matched", "metric": "accuracy"}
    (found,) = [row for row in rows if wanted.items() <= row.items()]
    source = next(row for row in results["rows"] if row["method"] == "fedisca" and row["seed"] == 1)
    assert float(found["value"]) == source["clients"][3]["accuracy"]["matched"]
    assert {row["value"] for row in rows if row["metric"] == "macro_auc" and row["protocol"] == "matched"} == {"n/a"}
    assert {row["value"] for row in rows if row["metric"] == "harmed"} == {"0", "1", "n/a"}
    assert {row["value"] for row in rows if row["metric"] == "clearly_harmed"} == {"0", "1", "n/a"}
    pairs = source["clients"][3]["against_alone"]
    for metric, value in (("lost", pairs["lost"]), ("won", pairs["won"]), ("gain_high", pairs["interval"][1])):
        (found,) = [row for row in rows if (wanted | {"metric": metric}).items() <= row.items()]
        assert float(found["value"]) == value


def test_harm_is_told_from_chance_where_the_results_can(make_results, make_old_results):
    def columns(results):
        rows = csv.DictReader(io.StringIO(tables.result_csv(results)))
        return {row["method"]: (row["harmed_clients"], row["clearly_harmed_clients"]) for row in rows}

    new, old = columns(make_results()), columns(make_old_results())
    assert new["local_only"] == old["local_only"] == ("n/a", "n/a")
    assert int(new["fedisca"][1]) <= int(new["fedisca"][0]) == int(old["fedisca"][0]) and old["fedisca"][1] == "n/a"
    assert any(int(lower) > int(harmed) for lower, harmed in new.values() if lower != "n/a")
    assert "lower)" in tables.markdown(make_results()) and "lower by chance" in tables.markdown(make_results())
    assert "(lower at all)" in tables.markdown(make_old_results())


@pytest.mark.parametrize("name", NASTY)
def test_latex_is_a_booktabs_table(make_results, name):
    text = tables.latex(rename(make_results(), name))
    lines = text.splitlines()
    assert lines[1].startswith(r"\begin{tabular}{l") and lines[-1] == r"\end{tabular}"
    for rule in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert lines.count(rule) == 1
    body = [line for line in lines if line.endswith(r" \\")]
    assert len(body) == 1 + 8
    for line in body:
        assert len(re.findall(r"(?<!\\)&", line)) == len(tables.header({})) - 1
        assert not re.search(r"(?<!\\)[%#_~^]", line)
        assert not line.startswith(("[", "*"))
        assert line.count("$") - line.count(r"\$") in range(0, 100, 2)
        bare = re.sub(r"\\[{}\\]", "", line)
        assert bare.count("{") == bare.count("}")


def test_tables_of_a_hollow_run(make_results):
    results = make_results()
    for row in results["rows"]:
        for key in ("accuracy", "clients", "seconds", "worst_client", "upload_bytes", "harmed_clients"):
            row[key] = None
    assert tables.markdown(results).count("n/a") > 40
    assert tables.client_csv(results).splitlines() == [",".join(tables.CLIENT_HEADER)]
    assert len(tables.result_csv({}).splitlines()) == 1


def test_the_metric_is_named_where_it_is_not_accuracy(make_results):
    assert tables.header({})[2] == "matched %"
    results = judged_by(make_results(seeds=2), "balanced_accuracy")
    assert tables.header(results)[1:3] == ("global balanced accuracy %", "matched balanced accuracy %")
    line = next(csv.DictReader(io.StringIO(tables.result_csv(results))))
    assert (
        line["metric"] == "balanced_accuracy" and line["matched_percent"] == line["matched_balanced_accuracy_percent"]
    )
    assert float(line["matched_accuracy_percent"]) == pytest.approx(float(line["matched_percent"]) / 0.97)


def test_class_csv_has_every_class_and_way_to_decide(make_results, make_old_results):
    results = make_results(seeds=2)
    rows = list(csv.DictReader(io.StringIO(class_csv(results))))
    assert len(rows) == 2 * 8 * 2 * 8 * 2  # seeds, methods, protocols, classes, ways to decide
    wanted = {"method": "fedisca", "seed": "1", "protocol": "matched", "class": "basophil"}
    plain, cut = [row for row in rows if wanted.items() <= row.items()]
    found = next(r for r in results["rows"] if (r["method"], r["seed"]) == ("fedisca", 1))["clinical"]["matched"]
    for line, cells in ((plain, found["classes"]), (cut, found["at_threshold"])):
        assert int(float(line["images"])) == cells["tp"][0] + cells["fn"][0]
        assert float(line["sensitivity"]) == cells["tp"][0] / (cells["tp"][0] + cells["fn"][0])
        assert float(line["auc"]) == found["curves"]["auc"][0]
    assert (plain["decision"], cut["decision"]) == ("most probable class", "threshold")
    assert {row["sensitivity"] for row in rows if row["decision"] == "threshold" and row["class"] == "platelet"} == {
        "n/a"
    }
    assert len(class_csv(make_old_results()).splitlines()) == 1


@pytest.mark.parametrize("name", NASTY)
def test_class_csv_cells_cannot_be_formulas(make_results, name):
    results = make_results(classes=[name, "b"])
    for cell in (cell for row in csv.reader(io.StringIO(class_csv(results))) for cell in row):
        assert cell[:1] not in ("=", "+", "@", "-", "\t", "\r")
