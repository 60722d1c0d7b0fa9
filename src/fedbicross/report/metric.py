"""Which metric a page goes by: accuracy as stored, or another, with gains and harms made anew from the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbicross.errors import ConfigError, nearest
from fedbicross.evaluate.names import CHOICES
from fedbicross.evaluate.summary import local_baselines
from fedbicross.report.text import PROTOCOLS, get, mapping, number, sequence

NAMES = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "macro_auc": "AUC"}


def judged_by(results: Mapping[str, Any], metric: str | None = None) -> Mapping[str, Any]:
    """The same results with every gain, harm and interval in ``metric``; none: in that of the run.

    Rows hold these fields in accuracy. Training alone is again the best way of it, by this metric; where that is
    another row than the one that images were compared with, nothing tells harm from chance, and all that are lower
    count.
    """
    if metric is not None and metric not in CHOICES:
        raise ConfigError("metric", f"no verdict goes by {metric!r}{nearest(metric, CHOICES)}")
    if "judged_by" in results and metric in (None, results["judged_by"]):
        return results
    stored = get(results, "config", "metric")
    stored = stored if isinstance(stored, str) and stored in CHOICES else "accuracy"
    metric = metric or stored
    if metric == stored == "accuracy":
        return {**results, "judged_by": metric}
    rows = [row for row in sequence(results.get("rows")) if isinstance(row, Mapping)]
    bars = _bars(rows, metric)
    return {**results, "judged_by": metric, "rows": [_row(row, bars.get(str(row.get("seed"))), metric) for row in rows]}


def _bars(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Mapping[str, Any]]:
    """The best way of training alone by seed; of equals the first."""
    kinds = set(local_baselines(str(row.get("method")) for row in rows))
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if str(row.get("method")) in kinds:
            seed = str(row.get("seed"))
            height = [number(get(r, metric, "matched")) for r in (row, found.get(seed))]
            if seed not in found or (height[0] or 0.0) > (height[1] or 0.0):
                found[seed] = row
    return found


def _row(row: Mapping[str, Any], bar: Mapping[str, Any] | None, metric: str) -> dict[str, Any]:
    alone = {str(get(c, "client")): c for c in sequence(get(bar, "clients"))}
    compared = bar is not None and bar.get("method") == row.get("alone")
    clients = [_client(mapping(c), alone.get(str(get(c, "client"))), metric, compared) for c in _clients(row)]
    harmed = [c["harmed"] for c in clients if c["harmed"] is not None]
    clear = [c["clearly_harmed"] for c in clients if c["clearly_harmed"] is not None]
    gains = [c["gain_over_local"]["matched"] for c in clients]
    return {
        **row,
        "alone": None if bar is None else bar.get("method"),
        "harmed_clients": sum(harmed) if harmed else None,
        "clearly_harmed_clients": sum(clear) if clear and len(clear) == len(harmed) else None,
        "helped_clients": sum(gain > 0 for gain in gains if gain is not None) if harmed else None,
        "worst_client": {protocol: _worst(clients, protocol, metric) for protocol in PROTOCOLS},
        "clients": clients,
    }


def _clients(row: Mapping[str, Any]) -> list[Any]:
    return [client for client in sequence(row.get("clients")) if isinstance(client, Mapping)]


def _client(client: dict[str, Any], alone: object, metric: str, compared: bool) -> dict[str, Any]:
    gain = {}
    for protocol in PROTOCOLS:
        mine, theirs = number(get(client, metric, protocol)), number(get(alone, metric, protocol))
        gain[protocol] = mine - theirs if mine is not None and theirs is not None else None
    pairs = mapping(client.get("against_alone")) if compared else {}
    interval = pairs.get("interval") if metric == "accuracy" else get(pairs, "intervals", metric)
    ends = [number(end) for end in sequence(interval)]
    known = gain["matched"] is not None and len(ends) == 2 and None not in ends
    return {
        **client,
        "gain_over_local": gain,
        "harmed": None if gain["matched"] is None else gain["matched"] < 0,
        "clearly_harmed": (ends[1] or 0.0) < 0 if known else None,
        "clearly_helped": (ends[0] or 0.0) > 0 if known else None,
        "against_alone": {**pairs, "interval": ends} if known else None,
    }


def _worst(clients: Sequence[Mapping[str, Any]], protocol: str, metric: str) -> dict[str, Any]:
    known = [(value, c.get("client")) for c in clients if (value := number(get(c, metric, protocol))) is not None]
    worst = min(known, key=lambda pair: pair[0], default=(None, None))
    return {"accuracy": worst[0], "client": worst[1]}
