"""Rows of the table by hand."""

import copy
import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbicross.evaluate import METRICS, PROTOCOLS
from fedbicross.evaluate.summary import across_seeds, is_alone, local_baselines, reference, summarise


def scores(client, matched, **overrides):
    """A client's score with the same value everywhere but where said otherwise."""
    base = {metric: dict.fromkeys(PROTOCOLS, matched) for metric in METRICS}
    return {"client": client, **base, "test_images": dict.fromkeys(PROTOCOLS, 10), **overrides}


ROW = [scores("a", 0.5), scores("b", 0.9), scores("c", 0.7)]
LOCAL = [scores("c", 0.7), scores("a", 0.6), scores("b", 0.8)]  # another order: matched by name


def test_means_weights_and_the_worst_client():
    row = summarise(ROW, [10, 30, 60], LOCAL)
    for metric in METRICS:
        assert row[metric] == {protocol: pytest.approx(0.7) for protocol in PROTOCOLS}
    assert row["accuracy_weighted"]["matched"] == pytest.approx((5 + 27 + 42) / 100)
    assert row["worst_client"]["matched"] == {"accuracy": 0.5, "client": "a"}


def test_harm_is_strictly_lower_than_the_clients_own_model():
    row = summarise(ROW, [1, 1, 1], LOCAL)
    assert (row["harmed_clients"], row["helped_clients"]) == (1, 1)
    assert [c["harmed"] for c in row["clients"]] == [True, False, False]
    assert [c["gain_over_local"]["matched"] for c in row["clients"]] == [
        pytest.approx(-0.1),
        pytest.approx(0.1),
        0,
    ]
    assert [c["client"] for c in row["clients"]] == ["a", "b", "c"]


def test_harm_looks_at_matched_only():
    ours = [scores("a", 0.5, accuracy={"global": 0.1, "matched": 0.6, "label_set": 0.1})]
    row = summarise(ours, [1], [scores("a", 0.5)])
    assert row["harmed_clients"] == 0 and row["helped_clients"] == 1
    assert row["clients"][0]["gain_over_local"]["global"] == pytest.approx(-0.4)


def test_without_local_only_nothing_is_said_about_harm():
    row = summarise(ROW, [1, 1, 1], None)
    assert row["harmed_clients"] is None and row["helped_clients"] is None
    assert all(c["harmed"] is None for c in row["clients"])
    assert all(c["gain_over_local"] == dict.fromkeys(PROTOCOLS) for c in row["clients"])


def test_undefined_values_are_skipped_not_counted_as_zero():
    ours = [scores("a", None), scores("b", 0.4)]
    row = summarise(ours, [90, 10], [scores("a", 0.9), scores("b", 0.4)])
    assert row["accuracy"]["matched"] == 0.4
    assert row["accuracy_weighted"]["matched"] == pytest.approx(0.4)
    assert row["worst_client"]["matched"]["client"] == "b"
    assert row["harmed_clients"] == 0
    assert [c["harmed"] for c in row["clients"]] == [None, False]


def test_all_undefined_stays_undefined():
    row = summarise([scores("a", None)], [5], [scores("a", None)])
    assert row["macro_auc"] == dict.fromkeys(PROTOCOLS)
    assert row["accuracy_weighted"]["global"] is None
    assert row["worst_client"]["global"] == {"accuracy": None, "client": None}
    assert row["harmed_clients"] == 0


def test_of_equally_bad_clients_the_first_is_named():
    row = summarise([scores("a", 0.9), scores("b", 0.3), scores("c", 0.3)], [1, 1, 1], None)
    assert row["worst_client"]["global"]["client"] == "b"


def test_summarise_changes_nothing_it_was_given_and_is_json():
    ours, own = copy.deepcopy(ROW), copy.deepcopy(LOCAL)
    row = summarise(ours, [1, 2, 3], own)
    assert (ours, own) == (ROW, LOCAL)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_contradictory_input_is_refused():
    with pytest.raises(ValueError, match="sample counts"):
        summarise(ROW, [1, 2], None)
    with pytest.raises(ValueError, match="'c'"):
        summarise(ROW, [1, 1, 1], LOCAL[1:])


def table_row(method, seed, accuracy, **more):
    fields = {"accuracy": {"global": accuracy, "matched": None}, "seconds": 2, "clients": [{"client": "a"}]}
    return {"method": method, "seed": seed, **fields, **more}


def test_rows_are_grouped_by_method_in_order():
    rows = [table_row("b", 0, 0.5), table_row("a", 0, 0.1), table_row("b", 1, 0.7), table_row("b", 2, None)]
    merged = across_seeds(rows)
    assert [row["method"] for row in merged] == ["b", "a"]
    assert merged[0]["seeds"] == [0, 1, 2]
    assert merged[0]["accuracy"]["global"] == {
        "mean": pytest.approx(0.6),
        "sd": pytest.approx(0.1 * 2**0.5),
        "n": 2,
    }
    assert merged[0]["accuracy"]["matched"] == {"mean": None, "sd": None, "n": 0}
    assert merged[0]["seconds"] == {"mean": 2, "sd": 0, "n": 3}
    assert merged[1]["accuracy"]["global"] == {"mean": 0.1, "sd": None, "n": 1}
    assert "clients" not in merged[0]


def test_text_and_truth_values_have_no_mean():
    rows = [
        table_row("a", s, 0.5, device="cpu", resumed=True, worst_client={"global": {"accuracy": 0.1, "client": "x"}})
        for s in (0, 1)
    ]
    merged = across_seeds(rows)[0]
    assert "device" not in merged and "resumed" not in merged
    assert list(merged["worst_client"]["global"]) == ["accuracy"]


def test_the_same_seed_twice_is_not_two_observations():
    with pytest.raises(ValueError, match="same seed"):
        across_seeds([table_row("a", 0, 0.5), table_row("a", 0, 0.5)])


def test_rows_of_summarise_can_be_merged():
    rows = [{"method": "m", "seed": s, **summarise(ROW, [1, 1, 1], LOCAL)} for s in range(3)]
    merged = across_seeds(rows)[0]
    assert merged["harmed_clients"] == {"mean": 1, "sd": 0, "n": 3}
    assert merged["worst_client"]["matched"]["accuracy"]["mean"] == pytest.approx(0.5)
    assert merged["accuracy_weighted"]["global"]["n"] == 3


def test_no_rows_no_table():
    assert across_seeds([]) == []


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_mean_and_sd_are_the_usual_ones(values):
    merged = across_seeds([table_row("m", s, v) for s, v in enumerate(values)])[0]["accuracy"]["global"]
    mean = sum(values) / len(values)
    assert merged["mean"] == pytest.approx(mean)
    assert merged["sd"] == pytest.approx((sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5, abs=1e-9)
    assert merged["sd"] == statistics.stdev(values)


def test_the_bar_is_the_better_way_of_training_alone():
    plain, balanced = [scores("a", 0.5), scores("b", 0.9)], [scores("a", 0.8), scores("b", 0.7)]
    assert reference({"local_only": plain, "local_only:balanced": balanced}) == "local_only:balanced"
    assert reference({"local_only": plain, "local_only:balanced": plain}) == "local_only", "of equals the first"
    undefined = [scores("a", None), scores("b", None)]
    assert reference({"local_only": undefined, "local_only:balanced": balanced}) == "local_only:balanced"
    assert reference({"local_only": undefined}) == "local_only" and reference({}) is None


def test_networks_trained_alone_come_before_heads():
    assert local_baselines(["fedavg", "local_head", "local_only:balanced", "local_only"]) == [
        "local_only:balanced",
        "local_only",
    ]
    assert local_baselines(["local_head", "falcon"]) == ["local_head"] and local_baselines(["falcon"]) == []
    assert [is_alone(spec) for spec in ("local_only:balanced", "local_head", "majority")] == [True, True, False]


def test_beyond_chance_is_said_of_each_client_and_counted():
    pairs = {"a": [-0.3, -0.1], "b": [0.05, 0.2], "c": [-0.2, 0.1]}
    ours = [{**client, "against_alone": {"interval": pairs[client["client"]]}} for client in ROW]
    row = summarise(ours, [1, 1, 1], LOCAL)
    assert (row["clearly_harmed_clients"], row["clearly_helped_clients"]) == (1, 1)
    assert [c["clearly_harmed"] for c in row["clients"]] == [True, False, False]
    ours[0]["against_alone"] = None
    row = summarise(ours, [1, 1, 1], LOCAL)
    assert row["clearly_harmed_clients"] == 0 and row["clients"][0]["clearly_harmed"] is None
    assert summarise(ROW, [1, 1, 1], LOCAL)["clearly_harmed_clients"] is None, "nothing was compared"
