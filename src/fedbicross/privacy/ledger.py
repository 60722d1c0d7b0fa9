"""What a site ever sent, in one file: what it adds up to is what it gave away.

Entries are only ever added, each with the digest of the one before it, so that one that was changed or taken out shows.
It is no signature: whoever may write here can write the whole file anew. Uploads without differential privacy are
entered too, since no number bounds what they give away.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import Field, ValidationError

from fedbicross.atomic import read_plain, write_atomic
from fedbicross.bundle.format import canonical_json
from fedbicross.errors import RunError
from fedbicross.privacy.accountant import spent
from fedbicross.privacy.statement import Statement
from fedbicross.settings import Settings

NAME = "privacy.json"
SCHEMA = 1
MAX_BYTES = 64 << 20
SECONDS = 60.0  # to wait for another process that writes


class Entry(Settings):
    """One upload."""

    time: str  # UTC
    run: str
    client: str
    method: str
    data: str  # SHA-256 of the images that it was made of
    upload: str = Field(pattern="^[0-9a-f]{64}$")  # SHA-256 of the file
    privacy: Statement | None  # none: sent without differential privacy
    before: str = ""  # SHA-256 of the entry before this one; empty for the first

    @property
    def digest(self) -> str:
        """What the next entry refers to."""
        return hashlib.sha256(canonical_json(self.model_dump()).encode()).hexdigest()


class _File(Settings):
    schema_: int = Field(alias="schema")
    entries: list[Entry]


@dataclass(frozen=True)
class Total:
    """All uploads of a site together."""

    epsilon: float  # of the private ones
    delta: float | None  # at which ε is told: the smallest of all statements; None where there is none
    unit: str  # whose ε it is: a patient's only where every statement is
    private: int
    open: int  # uploads without differential privacy

    @property
    def words(self) -> str:
        """In one line."""
        if not self.private and not self.open:
            return "nothing was sent"
        parts = []
        if self.private:
            what = f"{self.private} upload" + ("s" if self.private > 1 else "")
            parts.append(f"{what} with differential privacy, together ε = {self.epsilon:.4g} at δ = {self.delta:.4g}")
            parts[-1] += f" for each {self.unit}"
        if self.open:
            what = f"{self.open} upload" + ("s" if self.open > 1 else "")
            parts.append(f"{what} without: nothing bounds what they give away")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        epsilon = self.epsilon if math.isfinite(self.epsilon) else None
        return {"epsilon": epsilon, "delta": self.delta, "unit": self.unit, "private": self.private, "open": self.open}


def read(file: Path) -> list[Entry]:
    """Every entry, checked; none where there is no file."""
    try:
        data = read_plain(file, MAX_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError("ledger", f"{file} cannot be read: {error.strerror}") from None
    try:
        found = _File.model_validate_json(data)
    except ValidationError as error:
        where = ".".join(str(part)[:32] for part in error.errors()[0]["loc"])
        raise RunError("ledger", f"{file} is no ledger of this program ({where or 'no JSON'}): {_ADVICE}") from None
    if found.schema_ != SCHEMA:
        raise RunError("ledger", f"{file} was written by another version of this program (schema {found.schema_})")
    before = ""
    for number, entry in enumerate(found.entries, start=1):
        if entry.before != before:
            raise RunError("ledger", f"{file}: entry {number} does not follow the one before it: {_ADVICE}")
        before = entry.digest
    return found.entries


_ADVICE = "it was changed or damaged; bring it back from a copy, nothing is sent without it"


def add(file: Path, **values: Any) -> list[Entry]:
    """Enter an upload, unless the same file is there already; every entry, the new one included."""
    with _locked(file):
        entries = read(file)
        if values["upload"] not in {entry.upload for entry in entries}:
            before = entries[-1].digest if entries else ""
            now = datetime.now(UTC).isoformat(timespec="seconds")
            entries = [*entries, Entry(time=now, before=before, **values)]
            content = {"schema": SCHEMA, "entries": [entry.model_dump() for entry in entries]}
            write_atomic(file, (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())
    return entries


def total(entries: list[Entry]) -> Total:
    """What all of them give away together, as if every patient were in all of them."""
    stated = [entry.privacy for entry in entries if entry.privacy is not None]
    delta = min((statement.delta for statement in stated), default=None)
    releases = [release for statement in stated for release in statement.releases]
    epsilon = 0.0 if delta is None else spent(releases, delta)
    unit = "patient" if stated and all(statement.unit == "patient" for statement in stated) else "image"
    return Total(epsilon, delta, unit, len(stated), len(entries) - len(stated))


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(f".{file.name}.lock"), timeout=SECONDS):
            yield
    except Timeout:
        raise RunError("locked", f"another process has been writing to {file} for {SECONDS:.0f} s") from None
    except OSError as error:
        raise RunError("cannot_write", f"cannot write to {file}: {error.strerror or error}") from None
