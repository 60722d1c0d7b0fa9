"""What a method's context is made of: the task, storage that survives a kill, progress for a person, a stopwatch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Task:
    """What all sites agreed on before anyone trained; of an upload, with the architecture of its client."""

    classes: tuple[str, ...]
    image_size: int
    channels: int
    model: str  # of the server and its students; of clients too, unless they bring their own

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return self.channels, self.image_size, self.image_size

    def as_json(self) -> dict[str, Any]:
        """The task as it stands in a manifest."""
        return {
            "classes": list(self.classes),
            "image_size": self.image_size,
            "channels": self.channels,
            "model": self.model,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Task:
        """Read back ``as_json``."""
        return cls(tuple(value["classes"]), value["image_size"], value["channels"], value["model"])


class Store(Protocol):
    """Named bytes that survive a kill; a name is a relative path."""

    def load(self, name: str) -> bytes | None:
        """The bytes, or None."""
        ...

    def size(self, name: str) -> int:
        """Length in bytes; 0 where there is nothing."""
        ...

    def save(self, name: str, data: bytes) -> None:
        """Keep the bytes, all or nothing."""
        ...

    def drop(self, prefix: str) -> None:
        """Forget a name, or every name in a folder."""
        ...


class MemoryStore:
    """A store that lives as long as the process."""

    def __init__(self) -> None:
        self._content: dict[bytes, bytes] = {}  # equal bytes are kept once
        self._names: dict[str, bytes] = {}

    def load(self, name: str) -> bytes | None:
        """The bytes, or None."""
        digest = self._names.get(name)
        return None if digest is None else self._content[digest]

    def size(self, name: str) -> int:
        """Length in bytes; 0 where there is nothing."""
        return len(self.load(name) or b"")

    def save(self, name: str, data: bytes) -> None:
        """Keep the bytes."""
        digest = hashlib.sha256(data).digest()
        self._content.setdefault(digest, data)
        self._names[name] = digest

    def drop(self, prefix: str) -> None:
        """Forget a name, or every name in a folder, and what nothing names any more."""
        for name in [n for n in self._names if n == prefix or n.startswith(prefix.rstrip("/") + "/")]:
            del self._names[name]
        used = set(self._names.values())
        self._content = {digest: data for digest, data in self._content.items() if digest in used}


class Progress(Protocol):
    """Tells a person how far the work is."""

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Begin a piece of work; the function returned takes (done so far, a short note)."""
        ...

    def say(self, message: str) -> None:
        """One line for the person."""
        ...


class Silent:
    """Progress for tests and libraries."""

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Ignore the work."""
        del label, total
        return lambda done, note: None

    def say(self, message: str) -> None:
        """Ignore the line."""
        del message


@dataclass
class Stopwatch:
    """Time of the verb at work, less what it spends on work that methods share. Copies of a context have one watch."""

    at_work: tuple[str, str] | None = None  # verb and name
    shared_seconds: float = 0.0  # of training and encoding, which are charged to every method that uses them
    _seen: tuple[float, float] = (0.0, 0.0)

    def begin(self, verb: str, name: str) -> None:
        """A verb starts."""
        self.at_work, self._seen = (verb, name), (time.perf_counter(), self.shared_seconds)

    def lap(self) -> float:
        """Seconds since this was last asked; each is told once."""
        (began, shared), self._seen = self._seen, (time.perf_counter(), self.shared_seconds)
        return max(self._seen[0] - began - (self.shared_seconds - shared), 0.0)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Shared work, at whose checkpoints nobody asks for a lap: its own time is told when it is done."""
        outer, self.at_work = self.at_work, None
        try:
            yield
        finally:
            self.at_work = outer
