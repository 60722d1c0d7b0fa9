"""The verdict in words: it must follow the rows, whatever they say."""

from __future__ import annotations

import pytest

from fedbicross.report.summary import summarise
from fedbicross.report.verdict import judge, row_verdict


def row(method, matched, seed=0, role="method", harmed=None, clients=5, overall=0.5):
    accuracy = {"global": overall, "matched": matched, "label_set": 0.6}
    return {
        "method": method,
        "seed": seed,
        "role": role,
        "accuracy": accuracy,
        "harmed_clients": harmed,
        "num_clients": clients,
    }


def local(matched=0.9, seed=0):
    return row("local_only", matched, seed, "baseline")


def verdict(*rows):
    results = {"rows": list(rows), "complete": True}
    return judge(results, summarise(results))


def test_worth_it():
    found = verdict(local(), row("a", 0.95, harmed=0), row("b", 0.85, harmed=4))
    assert (found.kind, found.best.method) == ("good", "a")
    assert "a gains 5.0 points" in found.headline and "harms no hospital" in found.headline
    assert "training alone reaches 90.0\u00a0%. Of 2 methods, 1 beats it on average." in found.sentences[0]
    assert "b harms 4 of 5 hospitals." in found.sentences


def test_a_gain_that_harms_nobody_comes_before_a_larger_one():
    assert verdict(local(), row("a", 0.91, harmed=0), row("b", 0.99, harmed=1)).best.method == "a"


def test_mixed_when_somebody_is_harmed():
    found = verdict(local(), row("a", 0.95, harmed=2))
    assert found.kind == "mixed" and "but harms 2 of 5 hospitals" in found.headline


def test_mixed_when_harm_is_unknown():
    found = verdict(local(), row("a", 0.95))
    assert found.kind == "mixed" and "was not measured" in found.headline


def test_not_worth_it():
    found = verdict(local(), row("a", 0.8, harmed=5), row("b", 0.85, harmed=4))
    assert found.kind == "bad" and "no method beats training alone" in found.headline
    assert "none beats it" in found.sentences[0]


@pytest.mark.parametrize(("harmed", "kind"), [(0, "mixed"), (2, "bad")])
def test_a_difference_too_small_to_print_is_level(harmed, kind):
    found = verdict(local(0.9), row("a", 0.9004, harmed=harmed))
    assert found.kind == kind and "level with training alone" in found.headline


def test_an_unfinished_run_is_judged_so_far():
    results = {"rows": [local(), row("a", 0.95, harmed=0)], "complete": False}
    assert judge(results, summarise(results)).badge == "So far: worth it"


def test_no_local_only_row():
    found = verdict(row("a", 0.9, harmed=None))
    assert found.kind == "unknown" and "no local_only row" in found.headline


def test_a_head_trained_alone_is_the_bar_where_no_network_is():
    head = row("local_head", 0.9)  # in runs of older versions its role is "method"
    found = verdict(head, row("falcon", 0.8))
    assert found.kind == "bad" and "no method beats training alone" in found.headline
    found = verdict(local(0.7), head, row("falcon", 0.8))
    assert found.kind != "bad" and found.best.method == "falcon", "a whole network trained alone comes first"
    found = verdict(local(0.7), head, row("falcon", 0.6))
    assert found.kind == "bad", "a head that nobody shares is no method"


def test_only_baselines():
    assert "no method beside the baselines" in verdict(local()).headline
    found = verdict(
        local(), row("majority", 0.99, role="baseline", harmed=0), row("mean", 0.7, role="baseline", harmed=5)
    )
    assert "no baseline beats" in found.headline


def test_no_matched_result():
    assert verdict(local(None), row("a", 0.9)).kind == "unknown"


def test_an_upper_bound_is_never_the_best():
    assert verdict(local(), row("pool", 0.99, role="upper_bound", harmed=0), row("a", 0.8, harmed=3)).kind == "bad"


def test_seeds_are_paired_and_disagreement_is_told():
    rows = [local(0.90, 0), local(0.80, 1), row("a", 0.89, 0, harmed=0), row("a", 0.85, 1, harmed=0)]
    found = verdict(*rows)
    assert found.kind == "mixed" and "1 of 2 seeds" in found.headline
    assert any("+2.0 ± 4.2 points" in note for note in found.cautions)


def test_a_method_with_fewer_seeds_is_compared_on_its_own_seeds():
    rows = [local(0.90, 0), local(0.50, 1), row("a", 0.85, 0, harmed=5)]
    found = verdict(*rows)
    assert found.kind == "bad"
    assert any("Not all seeds are finished for a" in note for note in found.cautions)


def test_patients_from_everywhere():
    found = verdict(local() | {"accuracy": {"global": 0.4, "matched": 0.9}}, row("a", 0.8, harmed=5, overall=0.7))
    assert any("training alone reaches 40.0\u00a0%, a 70.0\u00a0%" in sentence for sentence in found.sentences)


def test_clients_that_cannot_be_compared_are_not_counted():
    clients = [{"client": "a", "harmed": True}, {"client": "b", "harmed": False}, {"client": "c", "harmed": None}]
    found = verdict(local(), row("m", 0.95, harmed=1, clients=3) | {"clients": clients})
    assert "harms 1 of 2 hospitals" in found.headline


def test_words_of_the_table():
    results = {"rows": [local(), row("a", 0.8, harmed=3), row("b", 0.95, harmed=0), row("p", 0.8, role="upper_bound")]}
    words = {item.method: row_verdict(item) for item in summarise(results)}
    assert words["local_only"] == ["the reference: training alone"]
    assert words["a"] == ["loses to training alone by 10.0 points", "harms 3 of 5 clients"]
    assert words["b"] == ["beats training alone by 5.0 points", "no client harmed"]
    assert words["p"] == ["upper bound: pools the data, not federated", "loses to training alone by 10.0 points"]
