"""One line per method: the rows of all seeds brought together. Nothing here formats or draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedbicross.evaluate.summary import reference
from fedbicross.report.text import PROTOCOLS, Stat, clean, get, number, sequence, stat

Row = Mapping[str, Any]

ROLES = {"baseline": 0, "method": 1, "upper_bound": 2}
# Below half of the last printed digit two accuracies look the same on the page, so words must not rank them.
LEVEL = 0.0005


@dataclass(frozen=True)
class Summary:
    """A method's results over all of its seeds; bytes are per client, seconds per seed."""

    method: str
    role: str
    is_local: bool
    rows: tuple[Row, ...]
    accuracy: dict[str, Stat]
    worst: Stat
    worst_client: str | None
    harmed: int | None
    helped: int | None
    judged: int  # client-seed pairs behind ``harmed``
    gains: tuple[float | None, ...]  # matched accuracy minus local-only's on the same seed, one per row
    gain: Stat
    upload: Stat
    reply: Stat
    seconds: Stat

    @property
    def seeds(self) -> int:
        """How many seeds this method has finished."""
        return len(self.rows)

    @property
    def loses(self) -> bool:
        """Whether training alone is better under the matched protocol, by at least what the page can show."""
        return not self.is_local and self.gain.mean is not None and self.gain.mean <= -LEVEL

    @property
    def beats(self) -> bool:
        """Whether it is better than training alone under the matched protocol, by at least what the page can show."""
        return not self.is_local and self.gain.mean is not None and self.gain.mean >= LEVEL


def training_alone(results: Mapping[str, Any]) -> set[str]:
    """The methods that are training alone, the row that every other one has to beat."""
    kinds = {str(row["method"]): _kind(row["method"]) for row in result_rows(results)}
    chosen = reference(kinds.values())
    return {method for method, kind in kinds.items() if kind == chosen}


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


def summarise(results: Mapping[str, Any]) -> list[Summary]:
    """All methods: training alone first, then the other baselines, the methods, and upper bounds last."""
    grouped: dict[str, list[Row]] = {}
    for row in result_rows(results):
        grouped.setdefault(str(row["method"]), []).append(row)
    alone = training_alone(results)
    local = {
        str(row.get("seed")): number(get(row, "accuracy", "matched")) for method in alone for row in grouped[method]
    }
    found = [_summary(method, rows, local, method in alone) for method, rows in grouped.items()]
    return sorted(found, key=lambda item: (not item.is_local, ROLES.get(item.role, 1)))


def _summary(method: str, rows: list[Row], local: Mapping[str, float | None], is_local: bool) -> Summary:
    judged = [row for row in rows if number(row.get("harmed_clients")) is not None and judged_clients(row)]
    helped = [value for row in rows if (value := number(row.get("helped_clients"))) is not None]
    worst = [get(row, "worst_client", "matched") for row in rows]
    gains = tuple(_gain(row, local) for row in rows)
    return Summary(
        method=method,
        role=str(rows[0].get("role") or "method"),
        is_local=is_local,
        rows=tuple(rows),
        accuracy={protocol: stat(get(row, "accuracy", protocol) for row in rows) for protocol in PROTOCOLS},
        worst=stat(get(entry, "accuracy") for entry in worst),
        worst_client=clean(get(worst[0], "client")) if len(worst) == 1 and get(worst[0], "client") else None,
        harmed=int(sum(number(row["harmed_clients"]) or 0 for row in judged)) if judged else None,
        helped=int(sum(helped)) if helped else None,
        judged=sum(judged_clients(row) for row in judged),
        gains=gains,
        gain=stat(gains),
        upload=stat(per_client(row, "upload_bytes") for row in rows),
        reply=stat(per_client(row, "reply_bytes") for row in rows),
        seconds=stat(row.get("seconds") for row in rows),
    )


def _gain(row: Row, local: Mapping[str, float | None]) -> float | None:
    mine, reference = number(get(row, "accuracy", "matched")), local.get(str(row.get("seed")))
    return mine - reference if mine is not None and reference is not None else None


def local_summary(summaries: list[Summary]) -> Summary | None:
    """Training alone, where the run has it."""
    return next((item for item in summaries if item.is_local), None)
