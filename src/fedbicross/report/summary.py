"""One line per method: the rows of all seeds brought together. Nothing here formats or draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbicross.evaluate.metrics import paired_interval
from fedbicross.evaluate.names import CHOICES
from fedbicross.evaluate.summary import is_alone, local_baselines
from fedbicross.report.metric import judged_by
from fedbicross.report.text import PROTOCOLS, Stat, clean, get, number, sequence, stat

Row = Mapping[str, Any]

ROLES = {"baseline": 0, "method": 1, "upper_bound": 2}
# Below half of the last printed digit two accuracies look the same on the page, so words must not rank them.
LEVEL = 0.0005


@dataclass(frozen=True)
class Summary:
    """A method's results over all of its seeds, judged by one metric; bytes are per client, seconds per seed."""

    method: str
    role: str
    is_local: bool  # training alone, in one way or another
    reference_rows: tuple[Row, ...]  # its rows that are the best way of training alone in their seed: the bar
    rows: tuple[Row, ...]
    metric: str
    scores: dict[str, dict[str, Stat]]  # every metric that a verdict may go by, under every protocol
    worst: Stat
    worst_client: str | None
    lower: int | None  # clients that are below training alone under matched, by chance or not
    clearly_harmed: int | None  # those of them that are so beyond chance; None in results that do not tell
    helped: int | None
    judged: int  # client-seed pairs behind ``lower``
    gains: tuple[float | None, ...]  # matched score minus that of training alone on the same seed, one per row
    gain: Stat
    interval: tuple[float, float] | None  # paired, of the gain on the own images of all clients and seeds together
    gain_elsewhere: dict[str, Stat]  # the same under the protocols for patients unlike the hospital's own
    gain_beside: dict[str, Stat]  # the gain for own patients by the other metrics
    upload: Stat
    reply: Stat
    seconds: Stat

    @property
    def score(self) -> dict[str, Stat]:
        """By the metric that is judged by, under every protocol."""
        return self.scores[self.metric]

    @property
    def seeds(self) -> int:
        """How many seeds this method has finished."""
        return len(self.rows)

    @property
    def is_reference(self) -> bool:
        """Whether it sets the bar in any seed."""
        return bool(self.reference_rows)

    @property
    def shares(self) -> bool:
        """Whether it is a way of taking part: something leaves the hospital, and a federation could do it."""
        return not self.is_local and _kind(self.method) != "majority" and self.role != "upper_bound"

    @property
    def harmed(self) -> int | None:
        """Clients harmed beyond chance or, in results that do not tell chance from harm, all that are lower."""
        return self.lower if self.clearly_harmed is None else self.clearly_harmed

    @property
    def loses(self) -> bool:
        """Whether training alone is better under the matched protocol: by what the page can show, and beyond chance."""
        beyond = self.interval is None or self.interval[1] < 0
        return self.gain.mean is not None and self.gain.mean <= -LEVEL and beyond

    @property
    def beats(self) -> bool:
        """Whether it is better than training alone under the matched protocol, likewise."""
        beyond = self.interval is None or self.interval[0] > 0
        return self.gain.mean is not None and self.gain.mean >= LEVEL and beyond


@dataclass(frozen=True)
class Alone:
    """Training alone as the bar: the best way of it in each seed."""

    methods: tuple[str, ...]
    ways: int  # that the run has of it
    metric: str
    scores: dict[str, dict[str, Stat]]

    @property
    def score(self) -> dict[str, Stat]:
        """By the metric that is judged by, under every protocol."""
        return self.scores[self.metric]


def _kind(method: object) -> str:
    return str(method).split(":")[0].replace("-", "_")


def result_rows(results: Mapping[str, Any]) -> list[Row]:
    """The rows that can be read at all."""
    return [row for row in sequence(results.get("rows")) if isinstance(row, Mapping) and row.get("method") is not None]


def seeds_of(results: Mapping[str, Any]) -> list[str]:
    """Every seed that appears anywhere, numbers in their order."""
    found = {str(row.get("seed")) for row in result_rows(results)}
    for part in ("clients", "training"):
        found |= {str(seed) for seed in (results.get(part) or {})} if isinstance(results.get(part), Mapping) else set()
    return sorted(found, key=lambda seed: (not seed.isdecimal(), int(seed) if seed.isdecimal() else 0, seed))


def per_client(row: Row, field: str) -> float | None:
    """A row's total shared evenly among its clients."""
    total, clients = number(row.get(field)), client_count(row)
    return total / clients if total is not None and clients else None


def client_count(row: Row) -> int:
    """How many clients took part in a row."""
    declared = number(row.get("num_clients"))
    return int(declared) if declared is not None else len(sequence(row.get("clients")))


def judged_clients(row: Row) -> int:
    """How many clients could be compared with training alone: one without matched test images cannot."""
    clients = clients_of(row)
    return sum(client.get("harmed") is not None for client in clients) if clients else client_count(row)


def clients_of(row: Row) -> list[Mapping[str, Any]]:
    """A row's per-client entries."""
    return [client for client in sequence(row.get("clients")) if isinstance(client, Mapping)]


def references(results: Mapping[str, Any]) -> dict[str, Row]:
    """The row of training alone that all rows of a seed are measured against, by seed.

    Every row names it. Older results do not, and had one way of training alone.
    """
    rows = result_rows(results)
    kinds = local_baselines(_kind(row["method"]) for row in rows)[:1]
    by_name = {(str(row["method"]), str(row.get("seed"))): row for row in rows}
    by_kind = {str(row.get("seed")): row for row in reversed(rows) if _kind(row["method"]) in kinds}
    found: dict[str, Row] = {}
    for row in rows:
        seed = str(row.get("seed"))
        bar = by_name.get((str(row["alone"]), seed)) if "alone" in row else by_kind.get(seed)
        if bar is not None:
            found.setdefault(seed, bar)
    return found


def summarise(results: Mapping[str, Any]) -> list[Summary]:
    """All methods: training alone first, then the other baselines, the methods, and upper bounds last."""
    results = judged_by(results)
    grouped: dict[str, list[Row]] = {}
    for row in result_rows(results):
        grouped.setdefault(str(row["method"]), []).append(row)
    bars, metric = references(results), str(results["judged_by"])
    found = [_summary(method, rows, bars, metric) for method, rows in grouped.items()]
    return sorted(found, key=lambda item: (not item.is_reference, not item.is_local, ROLES.get(item.role, 1)))


def _summary(method: str, rows: list[Row], bars: Mapping[str, Row], metric: str) -> Summary:
    judged = [row for row in rows if number(row.get("harmed_clients")) is not None and judged_clients(row)]
    clear = [value for row in judged if (value := number(row.get("clearly_harmed_clients"))) is not None]
    helped = [value for row in rows if (value := number(row.get("helped_clients"))) is not None]
    worst = [get(row, "worst_client", "matched") for row in rows]
    gains = {protocol: tuple(_gain(row, bars, metric, protocol) for row in rows) for protocol in PROTOCOLS}
    others = [name for name in CHOICES if name != metric]
    return Summary(
        method=method,
        role=str(rows[0].get("role") or "method"),
        is_local=is_alone(_kind(method)),
        reference_rows=tuple(row for row in rows if any(row is bar for bar in bars.values())),
        rows=tuple(rows),
        metric=metric,
        scores=_scores(rows),
        worst=stat(get(entry, "accuracy") for entry in worst),
        worst_client=clean(get(worst[0], "client")) if len(worst) == 1 and get(worst[0], "client") else None,
        lower=int(sum(number(row["harmed_clients"]) or 0 for row in judged)) if judged else None,
        clearly_harmed=int(sum(clear)) if judged and len(clear) == len(judged) else None,
        helped=int(sum(helped)) if helped else None,
        judged=sum(judged_clients(row) for row in judged),
        gains=gains["matched"],
        gain=stat(gains["matched"]),
        interval=_interval(rows, metric),
        gain_elsewhere={protocol: stat(gains[protocol]) for protocol in ("global", "label_set")},
        gain_beside={name: stat(_gain(row, bars, name, "matched") for row in rows) for name in others},
        upload=stat(per_client(row, "upload_bytes") for row in rows),
        reply=stat(per_client(row, "reply_bytes") for row in rows),
        seconds=stat(row.get("seconds") for row in rows),
    )


def _scores(rows: Sequence[Row]) -> dict[str, dict[str, Stat]]:
    return {name: {p: stat(get(row, name, p) for row in rows) for p in PROTOCOLS} for name in CHOICES}


def _interval(rows: Sequence[Row], metric: str) -> tuple[float, float] | None:
    """Of the difference to training alone on the clients' own images; None where these were not compared.

    In accuracy that of all images together; in another metric that of the mean over clients, from their own intervals.
    """
    pairs = [client.get("against_alone") for row in rows for client in clients_of(row)]
    if metric != "accuracy":
        ends = [[number(end) for end in sequence(get(pair, "interval"))] for pair in pairs]
        known = [(low, high) for low, high in (e for e in ends if len(e) == 2) if low is not None and high is not None]
        if not known:
            return None
        centre = sum(low + high for low, high in known) / 2 / len(known)
        half = sum((high - low) ** 2 for low, high in known) ** 0.5 / 2 / len(known)
        return centre - half, centre + half
    lost, won, images = (
        int(sum(number(get(pair, key)) or 0 for pair in pairs if pair)) for key in ("lost", "won", "images")
    )
    return paired_interval(lost, won, images) if min(lost, won) >= 0 and lost + won <= images else None


def _gain(row: Row, bars: Mapping[str, Row], metric: str, protocol: str) -> float | None:
    mine, bar = (number(get(r, metric, protocol)) for r in (row, bars.get(str(row.get("seed")))))
    return mine - bar if mine is not None and bar is not None else None


def training_alone(summaries: Sequence[Summary]) -> Alone | None:
    """Training alone, where the run has it."""
    local = [item for item in summaries if item.is_local]
    best = [item for item in local if item.is_reference]
    if not best:
        return None
    rows = [row for item in best for row in item.reference_rows]
    return Alone(tuple(item.method for item in best), len(local), best[0].metric, _scores(rows))
