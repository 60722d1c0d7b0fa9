"""Equal budgets mean equal numbers of steps, for every method that has any."""

from __future__ import annotations

import pytest

from fedbicross.bench import budgets
from fedbicross.errors import ConfigError
from fedbicross.methods import METHODS, create, method_names
from small import refuses


@pytest.mark.parametrize("name", ["tenth", "minute"])
@pytest.mark.parametrize("clients", [5, 20])
def test_the_same_number_of_steps(name: str, clients: int) -> None:
    budget = budgets.BUDGETS[name]
    assert budget is not None
    total = budget.synthesis + budget.student

    def config(spec: str) -> object:
        return create(spec, budgets.settings(name, spec, clients)).config

    for spec in ("fedisca", "fedisca:no_adaptation"):
        made = config(spec)
        assert made.distillation_steps == budget.student and made.synthesis_steps == budget.synthesis  # type: ignore[attr-defined]
    once = config("e_fedisca")
    assert once.synthesis_steps + once.distillation_steps == total  # type: ignore[attr-defined]
    alone = config("primum")
    assert alone.pool * alone.steps == budget.synthesis * clients  # type: ignore[attr-defined]
    assert alone.steps_distil == budget.student  # type: ignore[attr-defined]
    for spec in ("dense", "co_boosting"):
        made = config(spec)
        generator, student = made.epochs * made.steps, made.epochs * made.steps_distil  # type: ignore[attr-defined]
        assert generator == pytest.approx(budget.synthesis, rel=0.01)
        assert student == pytest.approx(budget.student, rel=0.01)
    made = config("dafl:cifar10")
    assert made.epochs * made.steps == budget.synthesis  # type: ignore[attr-defined]
    for spec in ("fedisca", "fedbicross", "e_fedisca", "primum", "dense", "co_boosting", "dafl"):
        assert config(spec).batch == budget.batch  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["tenth", "minute"])
@pytest.mark.parametrize("clients", [5, 10, 20])
@pytest.mark.parametrize(("spec", "k"), [("fedbicross", 3), ("fedbicross:own_start", 3), ("fedbicross:k5", 5)])
def test_fedbicross_has_the_arithmetic_of_fedisca(name: str, clients: int, spec: str, k: int) -> None:
    """By the formulas of the methods' pages, to half a trajectory, of which there is at least one."""
    made = create(spec, budgets.settings(name, spec, clients)).config
    fedisca = create("fedisca", budgets.settings(name, "fedisca", clients)).config
    per_step = 4 * clients + 3 * k * (k + 1)
    passes = made.distillation_steps * per_step  # type: ignore[attr-defined]
    wanted = fedisca.distillation_steps * (4 * clients + 3)  # type: ignore[attr-defined]
    assert made.clusters == k and made.steps == 500  # type: ignore[attr-defined]
    assert abs(passes - wanted) <= 250 * per_step or made.trajectories == 1  # type: ignore[attr-defined]


def test_fedbicross_with_clusters_by_the_uploads() -> None:
    chosen, default = (budgets.settings("tenth", f"fedbicross{v}", 5)["fedbicross"] for v in (":auto", ""))
    assert chosen == default and chosen["trajectories"] == 4


def test_paper_leaves_everything_as_it_is() -> None:
    assert all(budgets.settings("paper", spec, 5) == {} for spec in method_names())


@pytest.mark.parametrize("name", sorted(budgets.BUDGETS))
def test_every_method_takes_its_settings(name: str) -> None:
    for spec in method_names():
        create(spec, budgets.settings(name, spec, 3))
    assert set(budgets.NOTES) == set(budgets.BUDGETS) and METHODS


def test_an_unknown_budget() -> None:
    with refuses(ConfigError, "unknown_budget", "did you mean 'minute'"):
        budgets.settings("minutes", "fedisca", 5)
