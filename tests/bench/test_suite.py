"""Suites as data: what they expand to, in which order, and what is refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench.small import VALUES, make
from fedbicross.bench import suite
from fedbicross.errors import ConfigError
from fedbicross.methods import METHODS, method_names
from fedbicross.runs.config import check
from fedbicross.settings import parse
from small import refuses

PAPERS = ("fedbicross", "fedisca", "e_fedisca", "falcon")


def test_a_suite_stopped_early_holds_a_whole_small_table() -> None:
    sweep = {"partitions": ["iid", "dirichlet:0.5"], "seeds": [0, 1], "clients": [2, 3], "alone": ["local_only"]}
    cells = make(sweep)
    order = [(c.seed, c.clients, c.skew, c.method) for c in cells]
    methods = ("local_only", "fedavg", "fedisca")
    assert order == [
        (seed, clients, skew, method)
        for seed in (0, 1)
        for clients in (2, 3)
        for skew in ("iid", "dirichlet:0.5")
        for method in methods
    ]
    assert len({c.key for c in cells}) == len(cells)


def test_neighbours_of_one_name_are_one_sweep() -> None:
    """All methods of a federation come together, also where they train alone in different ways."""
    first = {**VALUES["sweep"][0], "seeds": [0, 1], "methods": ["fedavg"]}
    second = {**first, "alone": ["local_head"], "methods": ["fedcgs"]}
    cells = suite.expand("small", parse(suite.Suite, {**VALUES, "sweep": [first, second]}))
    methods = ["local_only", "fedavg", "local_head", "fedcgs"]
    assert [(c.seed, c.method) for c in cells] == [(seed, method) for seed in (0, 1) for method in methods]
    apart = suite.expand("small", parse(suite.Suite, {**VALUES, "sweep": [first, {**second, "name": "two"}]}))
    assert [c.seed for c in apart] == [0, 0, 1, 1] * 2


def test_lists_and_settings_of_the_whole_suite() -> None:
    lists, own = {"some": ["fedavg", "fedisca:ema"]}, {"fedisca": {"steps": 7, "temperature": 3.0}}
    cells = make({"methods": ["dafl", "@some"], "method": {"fedisca": {"steps": 8}}}, lists=lists, method=own)
    assert [c.method for c in cells] == ["local_only", "dafl", "fedavg", "fedisca:ema"]
    config = cells[-1].config.build("fedisca:ema").config
    assert (config.steps, config.temperature, config.epochs) == (8, 3.0, 1), "sweep over suite over budget"


def test_ours_begins_with_the_smallest_table_worth_reading() -> None:
    """Every method on Blood and Derma, five hospitals; one seed after the other."""
    cells = suite.expand(*suite.load("ours"))
    core = [c for c in cells if c.sweep == "core"]
    assert core == cells[: len(core)]
    federations = list(dict.fromkeys((c.seed, c.data, c.skew, c.clients) for c in core))
    skews = ("dirichlet:0.1", "dirichlet:0.5", "iid")
    assert federations == [(s, d, a, 5) for s in (0, 1, 2) for d in ("bloodmnist", "dermamnist") for a in skews]
    for seed, data, skew, _ in federations:
        found = {c.spec.partition(":")[0] for c in core if (c.seed, c.data, c.skew) == (seed, data, skew)}
        assert found == set(METHODS)
    assert len(core) == len(federations) * len({c.method for c in core}), "each of them once"


def test_what_a_cell_runs() -> None:
    local, fedavg, fedisca = make()
    assert local.config.methods == ["local_only"] and local.is_alone
    assert fedisca.config.methods == ["local_only", "fedisca"] and not fedisca.is_alone
    assert fedisca.config.method["fedisca"]["steps"] == 4, "by the budget"
    assert fedavg.config.method == {}
    assert fedisca.key == "small/smoke/cells-dirichlet-0.5-n2-resnet8-seed0/fedisca"
    assert fedisca.config.baselines == [] and fedisca.config.partition.alpha == 0.5


def test_settings_of_a_sweep_win_over_the_budget_also_for_variants() -> None:
    cells = make({"methods": ["fedisca:ema"], "method": {"fedisca": {"steps": 7}}})
    assert cells[-1].config.build("fedisca:ema").config.steps == 7
    assert cells[-1].config.build("fedisca:ema").config.epochs == 1, "the rest is the budget's"


def test_a_sweep_that_repeats_a_cell() -> None:
    sweeps = [VALUES["sweep"][0], {**VALUES["sweep"][0], "name": "two", "seeds": [0, 1]}]
    cells = suite.expand("small", parse(suite.Suite, {**VALUES, "sweep": sweeps}))
    assert [c.sweep for c in cells] == ["one"] * 3 + ["two"] * 3
    assert not any(c.ablation for c in cells)
    for first, second in ((True, False), (False, True), (True, True)):  # a method anywhere is one everywhere
        both = [{**sweep, "ablation": kind} for sweep, kind in zip(sweeps, (first, second), strict=True)]
        again = suite.expand("small", parse(suite.Suite, {**VALUES, "sweep": both}))
        shared = [c for c in again if c.seed == 0 and c.method == "fedisca"]
        assert [c.ablation for c in shared] == [first and second]
    other = {**VALUES["sweep"][0], "name": "two", "method": {"fedisca": {"steps": 2}}}
    with refuses(ConfigError, "same_cell", "different ways"):
        suite.expand("small", parse(suite.Suite, {**VALUES, "sweep": [VALUES["sweep"][0], other]}))
    tagged = {**other, "tag": "short"}
    cells = suite.expand("small", parse(suite.Suite, {**VALUES, "sweep": [VALUES["sweep"][0], tagged]}))
    assert [c.method for c in cells] == ["local_only", "fedavg", "fedisca", "fedavg@short", "fedisca@short"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, 18),
        ("method=fedavg", 12),  # training alone comes along
        ("method=fedavg,seed=1", 4),
        ("method=fed*,alpha=0.5", 3 * 3),
        ("partition=iid seed=0|2", 6),
        ("n=2 seed=?", 18),
        ("alpha=iid,seed=0", 3),
    ],
)
def test_filter(wanted: str | None, expected: int) -> None:
    cells = make({"partitions": ["iid", "dirichlet:0.5"], "seeds": [0, 1, 2]})
    found = suite.choose(cells, wanted)
    assert len(found) == expected
    assert [cell for cell in cells if cell in found] == found, "the order stays"


@pytest.mark.parametrize(
    ("wanted", "code"),
    [("method=nothing", "no_cells"), ("methods=fedavg", "bad_filter"), ("fedavg", "bad_filter")],
)
def test_bad_filters(wanted: str, code: str) -> None:
    with refuses(ConfigError, code):
        suite.choose(make(), wanted)


def test_a_sweep_finds_cells_that_an_earlier_one_shares() -> None:
    first = VALUES["sweep"][0]
    sweeps = [first, {**first, "name": "two", "methods": ["fedavg"]}, {**first, "name": "three", "methods": ["dafl"]}]
    cells = suite.expand("small", parse(suite.Suite, {**VALUES, "sweep": sweeps}))
    assert [c.method for c in suite.choose(cells, "sweep=two")] == ["local_only", "fedavg"]
    assert [c.method for c in suite.choose(cells, "sweep=one")] == ["local_only", "fedavg", "fedisca"]
    assert [c.method for c in suite.choose(cells, "sweep=t*")] == ["local_only", "fedavg", "dafl"]


def test_ours_says_how_its_settings_were_chosen() -> None:
    note = suite.load("ours")[1].note
    assert "seeds 0 to 2" in note and "unlabelled test images" in note and "\n" not in note


def first_sweep(**values: Any) -> dict[str, Any]:
    return {"sweep": [{**VALUES["sweep"][0], **values}]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"budget": "hour"}, "unknown budget"),
        (first_sweep(data=["blood"]), r"no \[data.blood\]"),
        (first_sweep(partitions=["dirichlet:much"]), "expected a partition"),
        (first_sweep(alone=["fedavg"]), "no way of training alone"),
        (first_sweep(method={"fedbicros": {"steps": 3}}), "which does not run"),
        (first_sweep(metods=["fedavg"]), "unknown key .sweep.0.metods"),
        ({"method": {"fedbicros": {"steps": 3}}}, "the suite: settings for 'fedbicros', which does not run"),
        ({**first_sweep(methods=["@sone"]), "lists": {"some": ["fedavg"]}}, "no list 'sone'.*did you mean 'some'"),
        ({**first_sweep(methods=["@some"]), "lists": ["fedavg"]}, "lists"),
        ({**first_sweep(methods=["@some"]), "lists": {"some": "fedavg"}}, "no list 'some'"),
        ({"sweep": [3]}, "sweep"),
        ({"data": {"a/b": {}}}, "no name for data"),
        ({"data": {"cells": {"dir": "elsewhere"}}}, "data.cells.dir"),
        ({"published": [{"table": "1", "columns": ["cells iid"], "rows": {}}]}, "data, partition and clients"),
        ({"published": [{"table": "1", "columns": ["cells iid 2"], "rows": {"fedavg": [1.0, 2.0]}}]}, "2 numbers"),
    ],
)
def test_what_a_suite_refuses(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(suite.Suite, {**VALUES, **values})


def test_which_suite(tmp_path: Path) -> None:
    assert set(suite.builtin()) == {"ours", "primum", "smoke", *PAPERS}
    for name, code in (("our", "unknown_suite"), ("a b.toml", "suite_name"), ("ours.toml", "suite_name")):
        with refuses(ConfigError, code):
            suite.load(tmp_path / name if name.endswith(".toml") else name)
    with refuses(ConfigError, "no_config"):
        suite.load(tmp_path / "mine.toml")
    with pytest.raises(ConfigError, match="unknown budget"):
        suite.expand(*suite.load("smoke"), budget="hour")


@pytest.mark.parametrize("name", sorted(suite.builtin()))
def test_every_cell_of_the_package_could_run(name: str) -> None:
    cells = suite.expand(*suite.load(name))
    kinds = {(c.spec, c.models, c.clients, c.sweep): c for c in cells}
    for cell in kinds.values():
        drawn = cell.config.data.model_copy(update={"name": "cells"})
        check(cell.config.model_copy(update={"data": drawn}))


@pytest.mark.parametrize("name", PAPERS)
def test_every_published_number_has_its_cell(name: str) -> None:
    _, content = suite.load(name)
    places = {(c.data, c.skew, c.clients, "+" in c.models, c.method) for c in suite.expand(name, content)}
    for table in content.published:
        if table.metric not in ("accuracy", "balanced_accuracy"):
            continue
        assert content.paper
        for column in table.columns:
            data, skews, clients = column.split()
            for skew in skews.split("+"):
                for method in table.rows:
                    assert (data, skew, int(clients), bool(table.client_models), method) in places
        assert all(0 <= value <= 100 for values in table.rows.values() for value in values)


def test_ours_has_every_method_of_the_product() -> None:
    cells = suite.expand(*suite.load("ours"))
    first = [c for c in cells if c.federation == cells[0].federation]
    assert {c.spec.partition(":")[0] for c in first} == set(METHODS)
    assert {c.spec for c in cells} <= set(method_names())


@pytest.mark.parametrize(
    ("name", "table", "method", "column", "value"),
    [  # typed again from the papers
        ("fedbicross", "I", "fedbicross:k4", "bloodmnist dirichlet:0.1 5", 85.57),
        ("fedbicross", "I", "co_boosting", "bloodmnist dirichlet:0.1 5", 54.75),
        ("fedbicross", "II", "fedbicross:no_personalisation", "dermamnist dirichlet:0.1 10", 51.03),
        ("fedbicross", "III", "fedbicross:no_clusters", "tissuemnist dirichlet:0.1 20", 48.72),
        ("fedisca", "1", "fedisca", "bloodmnist iid 5", 87.99),
        ("fedisca", "1", "fedisca:no_noise", "dermamnist dirichlet:0.3 5", 13.87),
        ("fedisca", "2", "fedisca:no_adaptation", "diabetic iid 5", 40.91),
        ("fedisca", "3", "dense", "tissuemnist dirichlet:0.3 5", 38.37),
        ("e_fedisca", "1", "e_fedisca", "isic_sites natural 6", 27.01),
        ("e_fedisca", "5", "e_fedisca:two_shots", "bloodmnist iid 20", 86.23),
        ("e_fedisca", "6", "fedisca", "cifar10 dirichlet:0.1 5", 54.55),
        ("falcon", "2", "falcon", "kermany_cxr_224 dirichlet:0.3 5", 88.92),
        ("falcon", "3", "falcon:ar", "kermany_cxr_224 dirichlet:0.1+dirichlet:0.3+dirichlet:0.5 5", 72.76),
        ("falcon", "4", "falcon:nar", "office_home natural 4", 0.000849),
    ],
)
def test_published_numbers(name: str, table: str, method: str, column: str, value: float) -> None:
    _, content = suite.load(name)
    found = [
        t.rows[method][t.columns.index(column)]
        for t in content.published
        if t.table == table and column in t.columns and method in t.rows
    ]
    assert found == [value]


def test_the_example_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    cells = suite.expand("example", parse(suite.Suite, tomllib.loads(example)))
    assert len(cells) == 2 * 3 * (3 + 2)
    assert cells[-1].config.build("primum").config.temperature == 4.0
