"""The page: well-formed, self-contained, deterministic, safe against its own contents, honest about what is missing."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from fedbicross.report.html import render
from fedbicross.report.metric import judged_by

VOID = {"meta", "br", "wbr", "img", "hr", "link", "input"}
METHODS = [("local_only", "baseline", (0.5, 0.9, 0.6)), ("fedbicross", "method", (0.6, 0.8, 0.7))]
XSS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "'><iframe src=javascript:alert(1)>",
    "</title><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "</svg><script>alert(1)</script>",
    "]]><script>alert(1)</script>",
    "--><script>alert(1)</script>",
    "{{ 7*7 }}{% raw %}",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "javascript:alert(1)",
    '" autofocus onfocus="alert(1)',
    "\u202e<b>\x00\x08\ud800</b>",
    "<a href='http://evil.example'>x</a><style>@import 'http://evil.example'</style>",
]


class Checker(HTMLParser):
    """Balanced tags, unique ids, no script, no handler, no remote resource."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.stack, self.ids, self.tags, self.problems, self.text, self.links = [], set(), set(), [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in VOID:
            self.stack.append(tag)
        for name, value in attrs:
            if name == "id" and value in self.ids:
                self.problems.append(f"id {value} twice")
            if name == "id":
                self.ids.add(value)
            if name.startswith("on") or name in ("srcset", "action", "formaction", "srcdoc"):
                self.problems.append(f"attribute {name}")
            if name in ("src", "href", "xlink:href"):
                self.links.append(value)
                if not value.startswith(("#", "data:image/png;base64,")):
                    self.problems.append(f"{name}={value}")

    def handle_endtag(self, tag):
        if not self.stack or self.stack.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data):
        self.text.append(data)


def check(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.problems == []
    assert checker.stack == []
    assert not checker.tags & {"script", "iframe", "object", "embed", "link", "base", "form"}
    styles = " ".join(re.findall(r"<style>.*?</style>", page, re.S) + re.findall(r'style="[^"]*"', page))
    assert "url(" not in styles and "@import" not in styles
    assert {link[1:] for link in checker.links if link.startswith("#")} <= checker.ids
    assert not re.search(r"(?<![\w-])(nan|inf)(?![\w-])", " ".join(re.findall(r'(?:x|y|d|points)="[^"]*"', page)))
    return " ".join("".join(checker.text).split())


@pytest.mark.parametrize(("seeds", "clients"), [(1, 1), (1, 5), (3, 5), (1, 100)])
def test_page_is_well_formed_and_self_contained(make_results, seeds, clients):
    page = render(make_results(seeds=seeds, clients=clients))
    text = check(page)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page
    assert "Not a medical device" in text
    assert "upper bound: pools the data, not federated" in text
    assert len(page) < 1_500_000


def test_page_has_every_section(make_results):
    page = render(make_results())
    found = re.findall(r'<section id="([^"]+)"', page)
    first = ["verdict", "pictures", "results", "about", "classes", "gains", "holdings", "confusion", "training"]
    assert found == [*first, "costs", "leaves", "diagnosis", "provenance"]
    text = check(page)
    assert text.index("Under the matched protocol") < text.index("under three protocols")
    assert page.index('class="tiles"') < page.index("<svg") < page.index("<table") < page.index('id="warnings"')
    assert page.count('class="tile"') == 3
    for expected in (
        "model weights, batch-norm statistics",
        "Two clusters have one member each. fedbicross:uniform",
        "What to be careful about",
        "0f0f0f",
    ):
        assert expected in text
    assert "loses to training alone by" in text and "harms 5 of 5 clients" in text


def test_same_input_same_bytes(make_results):
    results = make_results(seeds=2)
    untouched = copy.deepcopy(results)
    assert render(results) == render(copy.deepcopy(results))
    assert json.dumps(results) == json.dumps(untouched)


def test_same_bytes_in_another_process(make_results, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(make_results()))
    code = "import sys, json; from fedbicross.report.html import render; r = json.load(open(sys.argv[1]));"
    code += "sys.stdout.buffer.write(render(r).encode()); assert not {'torch', 'matplotlib'} & set(sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "r.json"], capture_output=True, check=True)
    assert run.stdout.decode() == render(json.loads((tmp_path / "r.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("attack", XSS)
def test_user_strings_are_shown_not_run(make_results, attack):
    results = hostile(make_results(clients=2, epochs=3), attack)
    page = render(results)
    check(page)
    assert "<script" not in page and "onerror=alert(1)>" not in page
    assert "\x00" not in page and "\u202e" not in page
    page.encode("utf-8")


def hostile(results, attack):
    """The attack in every place that holds a user's or a method's words."""
    text = json.dumps(results)
    for word in ("client-0", "basophil", "demo", "cells", "fedbicross:uniform", "two clusters have one member each"):
        text = text.replace(json.dumps(word), json.dumps(attack))
    for word in (
        "Inversion losses",
        "Cross-cluster weights w",
        "Clusters",
        "Synthesised images",
        "silhouette",
        "CE",
        "G_1",
    ):
        text = text.replace(json.dumps(word), json.dumps(attack))
    found = json.loads(text)
    found["config"] |= {attack: attack}
    found["versions"] |= {attack: attack}
    found["dataset"] |= {"note": attack, "digest": attack}
    found["partition_sha256"] = attack
    for row in found["rows"]:
        row["leaves_the_hospital"] = attack
    return found


def test_very_long_names_are_cut(make_results):
    results = hostile(make_results(), "x" * 10_000)
    page = render(results)
    check(page)
    assert "x" * 1000 not in page
    assert "xxx…" in page
    assert len(page) < 700_000


def test_partial_run_says_so(make_results):
    assert "This run is not finished" in check(render(make_results(complete=False)))
    assert "not finished" not in check(render(make_results()))


def test_odd_numbers_are_shown_as_not_available(make_results):
    results = make_results()
    for row in results["rows"]:
        row["accuracy"] = {"global": float("nan"), "matched": None, "label_set": float("inf")}
        row["seconds"], row["upload_bytes"] = float("-inf"), 10**400
        row["clients"][0]["gain_over_local"]["matched"] = float("nan")
        row["clients"][1]["confusion"] = None
    results["training"]["0"]["client-0"]["history"][3] |= {"val_accuracy": None, "train_loss": float("nan")}
    text = check(render(results))
    assert "n/a" in text and not re.search(r"\b(nan|inf|None|null)\b", text.split("Configuration")[0])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["dataset", "clients", "rows", "training", "warnings", "config", "versions"])
@pytest.mark.parametrize("value", ["missing", None, [], {}, "text", 3, [None, 1]])
def test_missing_and_misshapen_parts_leave_a_page(make_results, part, value):
    results = make_results(clients=2, epochs=2, methods=METHODS)
    del results[part]
    if value != "missing":
        results[part] = value
    check(render(results))


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, [], {}, "text", [{"client": {}}], {"a": [1]}])
def test_misshapen_rows_leave_a_page(make_results, value):
    # A local row stays whole; every other row has one broken field, so that one page tries many of them.
    local, row = make_results(clients=2, epochs=2, methods=METHODS)["rows"]
    fields = [field for field in row if field not in ("method", "seed")]
    rows = [row | {field: value, "method": f"without {field}"} for field in fields]
    rows += [row | {"clients": [row["clients"][0] | {field: value}], "method": field} for field in row["clients"][0]]
    check(render(make_results(clients=2, epochs=2, methods=METHODS) | {"rows": [local, row | {"seed": value}, *rows]}))


def test_no_rows_at_all(make_results):
    text = check(render(make_results(methods=[])))
    assert "cannot be said" in text


def test_many_classes_and_clients_stay_small(make_results):
    page = render(make_results(clients=300, epochs=2, methods=METHODS))
    assert "200 of 300 clients are drawn" in check(page)
    page = render(make_results(clients=2, classes=[f"class number {i}" for i in range(100)], epochs=2, methods=METHODS))
    check(page)
    assert len(page) < 4_000_000


def test_excluded_clients_are_named(make_results):
    results = make_results()
    results["clients"]["0"][2]["excluded"] = True
    assert "Excluded from this run (1 client): client-2." in check(render(results))


def test_both_kinds_of_patients_are_drawn_for_every_client(make_results, make_old_results):
    page = render(make_results())
    chart = page[page.index("What fedbicross gains over training alone") :].split("</svg>")[0]
    assert chart.count('class="dot everywhere"') == 5 + 1 and chart.count('class="whisker"') == 5  # and the legend
    assert "own patients: " in chart and "95 % interval" in chart and "client-4" in chart
    assert "Patients from everywhere (global)" in page and "lower by chance</th>" in page
    old = render(make_old_results())
    assert "do not tell harm from chance" in old and "lower by chance</th>" not in old
    many = render(make_results(clients=60, diagnosis=False))
    assert "The 40 clients with the lowest gain at home" in many


def test_misshapen_pairs_leave_a_page(make_results):
    results = make_results()
    for value in (None, 3, "x", [], [1], ["a", "b"], [float("nan"), 1], {"low": 1}):
        for row in results["rows"]:
            row["alone"] = value
            for client in row["clients"]:
                client["against_alone"] = {"interval": value, "lost": value, "won": value}
        assert "</html>" in render(results)


def test_another_way_of_training_alone_is_no_method(make_results):
    methods = [*METHODS, ("local_only:balanced", "baseline", (0.5, 0.85, 0.6))]
    page = render(make_results(methods=methods))
    assert "training alone, another way" in page and "Of 1 method" in page
    strips = page[page.index("Gain over training alone per client, matched") :].split("</svg>")[0]
    assert "fedbicross" in strips and "local_only" not in strips


def test_warnings_stand_once_with_whom_they_concern(make_results):
    results = make_results(seeds=3)
    for row in results["rows"]:
        row["warnings"] = ["client-1: no validation images; its own model stays"] if "fed" in row["method"] else []
    text = check(render(results))
    assert text.count("no validation images") == 1
    assert "Client-1: no validation images. fedisca, fedbicross, fedbicross:uniform its own model stays" in text


def test_the_page_goes_by_the_chosen_metric(make_results):
    page = render(judged_by(make_results(), "balanced_accuracy"))
    text = check(page)
    assert "Training alone, balanced accuracy" in text and "points of balanced accuracy" in text
    for other in ("accuracy", "AUC"):
        assert f'data-label="{other}, matched %"' in page, "the others stand beside it"
    run = make_results()
    run["config"]["metric"] = "balanced_accuracy"
    assert render(run).replace("\n", "") == render(judged_by(run, "balanced_accuracy")).replace("\n", "")


def test_classes_are_shown_with_curves_and_thresholds(make_results, make_old_results):
    page = render(make_results())
    text = check(page)
    section = text[text.index("Class by class fedbicross on") :]
    assert "basophil" in section and "at threshold" in section and "average precision" in section
    for label in (
        "ROC curves, mean over classes",
        "Reliability",
        "ROC curves by class",
        "Precision–recall curves by class",
    ):
        assert f'aria-label="{label}"' in page
    assert 'id="classes"' not in render(make_old_results()), "older results have none of it"
    many = render(make_results(classes=[f"kind {i}" for i in range(60)], epochs=2, methods=METHODS))
    assert "20 more are in" in check(many) and 'aria-label="ROC' not in many


def test_scores_by_patient(make_results):
    results = make_results()
    assert "by patient" not in check(render(results))
    for row in results["rows"]:
        row["patients"] = {metric: dict.fromkeys(("global", "matched", "label_set"), 0.123) for metric in ("accuracy",)}
    text = check(render(results))
    assert "matched, by patient" in text and "12.3" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", [None, 3, "x", [], [1], {"tp": "x"}, {"tp": [1], "fp": [2]}, {"roc": [[1], None, "x"]}]
)
def test_misshapen_clinical_values_leave_a_page(make_results, value):
    results = make_results(clients=2, epochs=2, methods=METHODS)
    for row in results["rows"]:
        row["clinical"]["global"] = value
        row["clinical"]["matched"] = dict.fromkeys(("classes", "at_threshold", "curves", "reliability"), value)
        row["patients"] = value
    check(render(results))
    results["rows"][1]["clinical"] = value
    check(render(results))
