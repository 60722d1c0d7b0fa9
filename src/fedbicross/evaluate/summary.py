"""From scores of clients to a row of the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedbicross.evaluate.names import METRICS, PROTOCOLS

Scores = Mapping[str, Any]
ALONE = ("local_only", "local_head")  # training alone: a network, or a head on the frozen encoder


def is_alone(spec: str) -> bool:
    """Whether this is a way of training alone: nothing is shared, so that it is never a method that pays or not."""
    return spec.partition(":")[0] in ALONE


def local_baselines(specs: Iterable[str]) -> list[str]:
    """The rows that the bar is chosen from: networks trained alone, else heads on a frozen encoder."""
    found = list(specs)
    networks, heads = ([spec for spec in found if spec.partition(":")[0] == kind] for kind in ALONE)
    return networks or heads


def reference(scores: Mapping[str, Sequence[Scores]], metric: str = "accuracy") -> str | None:
    """What a hospital has without taking part, and what all rows of a seed are measured against.

    ``scores`` are the clients' scores of each local baseline. The one with the highest mean of ``metric`` under matched
    is taken, of equals the first. It is chosen by the test images, which makes the bar harder for every method, never
    easier.
    """

    def height(spec: str) -> float:
        mean = _mean(client[metric]["matched"] for client in scores[spec])
        return -1.0 if mean is None else mean

    return max(scores, key=height, default=None)


def summarise(
    client_scores: Sequence[Scores], num_samples: Sequence[int], alone: Sequence[Scores] | None
) -> dict[str, Any]:
    """One method under one seed: means over clients, the worst client, and whom the method harms.

    ``client_scores`` come from ``score_client`` plus the key ``client`` (name); ``num_samples`` are the training images
    of each, in the same order; ``alone`` are the scores of the clients' own models, matched by name. A client's
    ``against_alone`` (from ``compare_client``), where it is given, says whether a difference is beyond chance.
    """
    if len(client_scores) != len(num_samples):
        raise ValueError(f"{len(client_scores)} clients but {len(num_samples)} sample counts")
    own = None if alone is None else _by_name(alone)
    clients = [_against_local(scores, own) for scores in client_scores]
    harmed = [client["harmed"] for client in clients]
    gains = [client["gain_over_local"]["matched"] for client in clients]
    return {
        **{
            metric: {protocol: _mean(client[metric][protocol] for client in clients) for protocol in PROTOCOLS}
            for metric in METRICS
        },
        "accuracy_weighted": {
            protocol: _weighted_mean([client["accuracy"][protocol] for client in clients], num_samples)
            for protocol in PROTOCOLS
        },
        "worst_client": {protocol: _worst(clients, protocol) for protocol in PROTOCOLS},
        "harmed_clients": None if own is None else sum(h is True for h in harmed),
        "helped_clients": None if own is None else sum(gain is not None and gain > 0 for gain in gains),
        "clearly_harmed_clients": _count(clients, "clearly_harmed"),
        "clearly_helped_clients": _count(clients, "clearly_helped"),
        "patients": _patients(clients),
        "clients": clients,
    }


def _patients(clients: Sequence[Scores]) -> dict[str, Any] | None:
    """Means of the clients' scores by patient; None where patients are unknown."""
    known = [found for client in clients if (found := client.get("patients")) is not None]
    if not known:
        return None
    return {metric: {p: _mean(found[metric][p] for found in known) for p in PROTOCOLS} for metric in METRICS}


def _by_name(scores: Sequence[Scores]) -> dict[str, Scores]:
    return {score["client"]: score for score in scores}


def _against_local(scores: Scores, own: Mapping[str, Scores] | None) -> dict[str, Any]:
    """The client's scores with its gain over its own model; None where either side is undefined."""
    if own is not None and scores["client"] not in own:
        raise ValueError(f"no scores of training alone for client {scores['client']!r}")
    gain = {
        protocol: None
        if own is None
        else _difference(scores["accuracy"][protocol], own[scores["client"]]["accuracy"][protocol])
        for protocol in PROTOCOLS
    }
    # Strictly lower on its own patients. Both accuracies are k/n of the same n, so equal counts compare equal.
    harmed = None if gain["matched"] is None else gain["matched"] < 0
    interval = (scores.get("against_alone") or {}).get("interval")
    clear = {
        "clearly_harmed": None if interval is None else interval[1] < 0,
        "clearly_helped": None if interval is None else interval[0] > 0,
    }
    return {**scores, "gain_over_local": gain, "harmed": harmed, **clear}


def _count(clients: Sequence[Scores], field: str) -> int | None:
    """How many clients this is true of; None where it was measured for none."""
    known = [client[field] for client in clients if client[field] is not None]
    return sum(known) if known else None


def _difference(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours - theirs


def _mean(values: Iterable[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return statistics.fmean(defined) if defined else None


def _weighted_mean(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    defined = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in defined)
    return sum(value * weight for value, weight in defined) / total if total else None


def _worst(clients: Sequence[Scores], protocol: str) -> dict[str, Any]:
    """The first of the clients with the lowest accuracy."""
    defined = [client for client in clients if client["accuracy"][protocol] is not None]
    if not defined:
        return {"accuracy": None, "client": None}
    worst = min(defined, key=lambda client: float(client["accuracy"][protocol]))
    return {"accuracy": worst["accuracy"][protocol], "client": worst["client"]}
