"""Rows of the table by hand."""

import copy
import json

import pytest

from fedbicross.evaluate import METRICS, PROTOCOLS
from fedbicross.evaluate.summary import is_alone, local_baselines, reference, summarise


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
