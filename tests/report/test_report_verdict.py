"""The verdict in words: it must follow the rows, whatever they say."""

from __future__ import annotations

import pytest

from fedbicross.errors import FedBiCrossError
from fedbicross.report.metric import judged_by
from fedbicross.report.summary import summarise
from fedbicross.report.verdict import judge, row_verdict


def row(method, matched, seed=0, role="method", harmed=None, clients=5, overall=0.5, known=0.6, **new):
    """As an older version stored it; ``alone`` and ``clear`` are what rows say now."""
    accuracy = {"global": overall, "matched": matched, "label_set": known}
    fields = {"method": method, "seed": seed, "role": role, "accuracy": accuracy, "num_clients": clients}
    if "clear" in new:
        fields["clearly_harmed_clients"] = new.pop("clear")
    return {**fields, "harmed_clients": harmed, **new}


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
    assert "b harms 4 of 5 hospitals (lower at all)." in found.sentences


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


def test_baselines_that_share_are_judged_too():
    """A run once said "brought nothing" above a row of an ensemble that beat training alone by 11 points."""
    assert "nobody shares anything" in verdict(local(), row("majority", 0.4, role="baseline", harmed=5)).headline
    found = verdict(local(), row("ensemble", 0.7, role="baseline", harmed=5))
    assert found.kind == "bad" and "no method beats" in found.headline
    found = verdict(local(), row("ensemble", 0.95, role="baseline", harmed=0), row("fedavg", 0.8, harmed=5))
    assert found.kind == "good" and found.best.method == "ensemble"


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
    assert words["a"] == ["loses to training alone by 10.0 points", "harms 3 of 5 clients (lower at all)"]
    assert words["b"] == ["beats training alone by 5.0 points", "no client harmed"]
    assert words["p"] == ["upper bound: pools the data, not federated", "loses to training alone by 10.0 points"]


# --- own patients and patients from elsewhere ------------------------------------------------------------


def now(method, matched, harmed=0, clear=0, **more):
    return row(method, matched, harmed=harmed, clear=clear, alone="local_only", **more)


def test_what_was_gained_is_said_for_both_kinds_of_patients():
    found = verdict(local(), now("primum", 0.92, overall=0.9))
    assert found.kind == "good" and found.badge == "Worth it"
    assert found.headline == (
        "Taking part was worth it: primum gains 2.0 points for a hospital’s own patients and 40.0 for patients "
        "from elsewhere, and harms no hospital."
    )
    found = verdict(local(), now("a", 0.92, overall=0.505))
    assert "elsewhere" not in found.headline, "less than a point is not told apart from nothing"
    found = verdict(local(), now("a", 0.92, overall=0.3))
    assert found.kind == "good" and "but loses 20.0 points for patients from elsewhere" in found.headline


@pytest.mark.parametrize(
    ("matched", "overall", "known", "kind"),
    [
        (0.9, 0.51, 0.6, "good"),
        (0.9, 0.509, 0.6, "mixed"),
        (0.9, 0.505, 0.65, "good"),  # by the label-set protocol
        (0.9, 0.45, 0.65, "mixed"),  # but not where it loses under the global one
        (0.8996, 0.9, 0.9, "good"),  # too little to be seen on the page
        (0.899, 0.9, 0.9, "bad"),
    ],
)
def test_level_at_home_is_worth_it_for_patients_from_elsewhere(matched, overall, known, kind):
    assert verdict(local(), now("a", matched, overall=overall, known=known)).kind == kind


def test_words_where_only_patients_from_elsewhere_gain():
    found = verdict(local(), now("a", 0.9, overall=0.9))
    words = "a costs nobody anything at home, and gains 40.0 points for patients from elsewhere."
    assert found.headline == f"Taking part was worth it: {words}"
    found = verdict(local(), now("a", 0.9, known=0.9))
    assert "gains 30.0 points for patients from elsewhere of the classes it knows." in found.headline


def test_a_gain_at_home_comes_before_one_elsewhere_and_a_harmless_one_before_all():
    rows = [now("a", 0.9, overall=0.9), now("b", 0.91), now("c", 0.99, harmed=3, clear=1, overall=0.9)]
    assert verdict(local(), *rows).best.method == "b"
    assert verdict(local(), rows[0], rows[2]).best.method == "a"


def test_gaining_elsewhere_does_not_excuse_a_loss_at_home():
    found = verdict(local(), now("a", 0.8, harmed=5, clear=4, overall=0.9), now("b", 0.85, harmed=5, clear=5))
    assert found.kind == "bad" and found.badge == "Not worth it"
    assert "; a gains 40.0 points for patients from elsewhere and loses 10.0 at home." in found.headline
    found = verdict(local(), now("a", 0.9, harmed=2, clear=1, overall=0.9))
    assert found.kind == "bad" and "harms 1 of 5 hospitals, 1 more lower by chance" in found.headline


# --- harm and chance -------------------------------------------------------------------------------------


def test_lower_by_chance_is_no_harm():
    found = verdict(local(), now("a", 0.92, harmed=2))
    assert found.kind == "good" and "harms no hospital (2 of 5 lower by chance)" in found.headline
    assert "No method harmed any hospital beyond chance." in found.sentences
    assert not any("tell harm from chance" in note for note in found.cautions)
    old = verdict(local(), row("a", 0.92, harmed=2))
    assert old.kind == "mixed" and "but harms 2 of 5 hospitals (lower at all)" in old.headline
    assert any("do not tell harm from chance" in note for note in old.cautions)


def test_words_about_harm():
    rows = [now("a", 0.9), now("b", 0.9, harmed=1), now("c", 0.9, harmed=3, clear=2), now("d", 0.9, harmed=2, clear=2)]
    words = {item.method: row_verdict(item)[-1] for item in summarise({"rows": [local(), *rows]})}
    assert words["a"] == "no client harmed" and words["b"] == "0 of 5 clients harmed, 1 lower by chance"
    assert words["c"] == "harms 2 of 5 clients, 1 more lower by chance" and words["d"] == "harms 2 of 5 clients"


def test_one_seed_that_cannot_tell_makes_the_raw_count_hold_for_all():
    rows = [local(), local(seed=1), now("a", 0.92, harmed=1), row("a", 0.92, seed=1, harmed=1)]
    assert verdict(*rows).kind == "mixed"


def test_most_seeds_must_not_lose():
    rows = [local(seed=seed) for seed in range(3)]
    two = [now("a", matched, seed=seed) for seed, matched in enumerate((0.93, 0.899, 0.92))]
    assert verdict(*rows, *two).kind == "good"
    one = [now("a", matched, seed=seed) for seed, matched in enumerate((0.98, 0.89, 0.89))]
    found = verdict(*rows, *one)
    assert found.kind == "mixed" and "paid in 1 of 3 seeds" in found.headline


# --- the better way of training alone --------------------------------------------------------------------


def two_ways(plain, balanced, method, seed=0):
    """A seed with two ways of training alone; the better one is the bar."""
    bar = {"alone": "local_only" if plain >= balanced else "local_only:balanced"}
    return [
        row("local_only", plain, seed, "baseline", 0) | bar,
        row("local_only:balanced", balanced, seed, "baseline", 0) | bar,
        row("primum", method, seed, harmed=0, clear=0) | bar,
    ]


def test_a_method_must_beat_the_better_way_of_training_alone():
    assert verdict(*two_ways(0.9, 0.8, 0.91)).kind == "good"
    found = verdict(*two_ways(0.8, 0.9, 0.85))
    assert found.kind == "bad" and found.best.method == "primum"
    assert "training alone (the best of 2 ways: local_only:balanced) reaches 90.0\u00a0%" in found.sentences[0]
    assert "Of 1 method, none beats it" in found.sentences[0], "training alone is no method"


def test_every_seed_has_its_own_bar():
    rows = [*two_ways(0.9, 0.8, 0.92), *two_ways(0.7, 0.8, 0.83, seed=1)]
    found = verdict(*rows)
    assert found.kind == "good" and found.best.gains == (pytest.approx(0.02), pytest.approx(0.03))
    assert "2 ways: local_only or local_only:balanced) reaches 85.0" in found.sentences[0]
    words = {item.method: row_verdict(item) for item in summarise({"rows": rows})}
    assert words["local_only"] == words["local_only:balanced"]
    assert words["local_only"] == ["the reference: training alone, in 1 of 2 seeds"]


def test_the_other_way_of_training_alone_in_words():
    words = {item.method: row_verdict(item) for item in summarise({"rows": two_ways(0.8, 0.9, 0.85)})}
    assert words["local_only:balanced"] == ["the reference: training alone"]
    assert words["local_only"] == ["training alone, another way", "10.0 points below the reference"]


def test_a_bar_that_is_not_there_compares_nothing():
    assert verdict(row("a", 0.9, alone="local_only")).kind == "unknown"
    assert verdict(row("a", 0.9, alone=["odd"]), row("b", 0.9, alone=None)).kind == "unknown"


# --- nothing learned -------------------------------------------------------------------------------------


def test_nothing_learned_is_an_outcome():
    floor = row("majority", 0.6, role="baseline", overall=0.2, known=0.4)
    at_floor = {"overall": 0.2, "known": 0.4}
    found = verdict(floor, row("local_only", 0.6, role="baseline", **at_floor), now("a", 0.6, **at_floor))
    assert (found.kind, found.badge) == ("bad", "Nothing learned") and "train longer" in found.headline
    found = verdict(floor, row("local_only", 0.6, role="baseline", **at_floor), now("a", 0.6, overall=0.4))
    assert found.kind == "good", "patients from elsewhere are served better than by the most frequent class"


# --- the other metrics -----------------------------------------------------------------------------------


def measured(method, accuracy, area, **more):
    """A row of one client with all three metrics, which are compared with training alone."""
    values = {"accuracy": accuracy, "balanced_accuracy": accuracy, "macro_auc": area}
    by_protocol = {name: dict.fromkeys(("global", "matched", "label_set"), value) for name, value in values.items()}
    pairs = {"images": 200, "lost": 9, "won": 9, "interval": [-0.04, 0.04], "intervals": more.pop("intervals", {})}
    client = {"client": "a", **by_protocol, "against_alone": pairs, "harmed": False, "clearly_harmed": False}
    return {**now(method, accuracy, clients=1, **more), **by_protocol, "clients": [client]}


def verdict_by(metric, *rows):
    results = judged_by({"rows": list(rows), "complete": True}, metric)
    return judge(results, summarise(results))


def test_a_gain_in_another_metric_is_in_the_headline():
    """Fedavg with AUC 0.889 against 0.361 of training alone was once called level, for its accuracy."""
    rows = [measured("local_only", 0.74, 0.361, role="baseline"), measured("fedavg", 0.74, 0.889)]
    found = verdict_by(None, *rows)
    words = "In accuracy taking part brought nothing: the best method, fedavg, is level with training alone"
    assert found.headline == f"{words}; but in AUC fedavg gains 52.8 points (to 88.9\u00a0%)."
    assert (found.kind, found.badge) == ("mixed", "Mixed")
    assert "AUC 36.1\u00a0% alone, 88.9\u00a0% with fedavg" in found.beside[0] and found.beside[0] in found.sentences
    found = verdict_by("macro_auc", *rows)
    assert found.headline.startswith("Taking part") and "52.8 points of AUC" in found.headline
    assert "reaches 36.1\u00a0% AUC." in found.sentences[0]


def test_a_loss_in_another_metric_is_in_the_headline():
    rows = [measured("local_only", 0.74, 0.9, role="baseline"), measured("a", 0.8, 0.7)]
    rows[1]["clients"][0]["against_alone"] |= {"lost": 2, "won": 14}
    found = verdict_by("accuracy", *rows)
    assert found.kind == "good" and found.headline.endswith(", though it loses 20.0 points of AUC.")


@pytest.mark.parametrize(
    ("interval", "words"), [([-0.2, -0.05], "harms 1 of 1"), ([-0.2, 0.01], "1 of 1 lower by chance")]
)
def test_harm_in_another_metric_goes_by_its_own_interval(interval, words):
    rows = [measured("local_only", 0.7, 0.9, role="baseline")]
    rows.append(measured("a", 0.9, 0.8, intervals={"macro_auc": interval}))
    assert verdict_by("accuracy", *rows).best.harmed == 0
    found = verdict_by("macro_auc", *rows)
    assert found.best.lower == 1 and found.best.harmed == (interval[1] < 0)
    said = [*row_verdict(found.best), found.headline]
    assert any(words.replace("1 of 1 lower", "1 lower") in line or words in line for line in said)


def test_the_bar_is_the_best_way_of_training_alone_by_that_metric():
    rows = [
        measured("local_only", 0.8, 0.7, role="baseline"),
        measured("local_only:balanced", 0.7, 0.9, role="baseline"),
        measured("a", 0.85, 0.8, intervals={"macro_auc": [0.05, 0.15]}),
    ]
    assert verdict_by("accuracy", *rows).best.gain.mean == pytest.approx(0.05)
    found = verdict_by("macro_auc", *rows)
    assert found.best.gain.mean == pytest.approx(-0.1)
    assert found.best.clearly_harmed is None, "images were compared with another row than this"


def test_a_run_says_what_it_is_judged_by():
    rows = [measured("local_only", 0.74, 0.361, role="baseline"), measured("fedavg", 0.74, 0.889)]
    results = {"rows": rows, "complete": True, "config": {"metric": "macro_auc"}}
    assert summarise(results)[0].metric == "macro_auc"
    assert judged_by(results, "accuracy")["judged_by"] == "accuracy"
    for odd in (None, 3, "speed", ["accuracy"]):
        assert judged_by({**results, "config": {"metric": odd}})["judged_by"] == "accuracy"
    with pytest.raises(FedBiCrossError, match="balanced_accuracy"):
        judged_by(results, "balanced_acuracy")


@pytest.mark.parametrize(
    ("lost", "won", "kind"),
    [(4, 4, "good"), (4, 2, "good"), (20, 2, "bad")],  # of 1,000 images: a few flips are chance, eighteen are not
)
def test_a_loss_at_home_within_chance_is_level(lost, won, kind):
    pairs = [{"harmed": False, "against_alone": {"lost": lost, "won": won, "images": 1000}}]
    found = verdict(local(), {**now("p", 0.9 + (won - lost - 0.6) / 1000, overall=0.6), "clients": pairs})
    assert found.kind == kind and ("costs nobody anything at home" in found.headline) == (kind == "good")


def test_a_gain_at_home_within_chance_is_level_too():
    pairs = [{"harmed": False, "against_alone": {"lost": 2, "won": 5, "images": 1000}}]
    found = verdict(local(), {**now("p", 0.903), "clients": pairs})
    assert found.badge == "No gain" and "level with training alone" in found.headline
    pairs[0]["against_alone"]["images"] = 3  # more flips than images: a file that makes no sense is not a comparison
    assert verdict(local(), {**now("p", 0.903), "clients": pairs}).badge == "Worth it"
