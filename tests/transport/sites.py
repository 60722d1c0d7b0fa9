"""A tiny federation of three sites with keys of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbicross.bundle import keys
from fedbicross.context import Context, Progress, Silent
from fedbicross.messages import Client
from fedbicross.transport import files
from fedbicross.transport.federation_file import FederationFile, new_federation
from small import tiny_clients

NAMES = ("client-0", "client-1", "client-2")
TRAINING = {"recipe": "modern", "epochs": 1, "batch_size": 8}


class Said(Silent):
    """Progress that remembers what was said and which work was begun."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.begun: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)

    def start(self, label: str, total: int) -> Any:
        self.begun.append(label)
        return super().start(label, total)


@dataclass
class Sites:
    """The agreed file, everybody's keys and images."""

    federation: FederationFile
    server_key: Any
    client_keys: dict[str, Any]
    clients: list[Client]

    def simulation(self) -> Context:
        """The same task, training and seed for ``simulate``."""
        file = self.federation
        return Context(file.task, file.training, seed=file.seed)

    def fuse(self, uploads: Any, work: Path, said: Progress | None = None, **options: Any) -> dict[str, bytes]:
        """The server's replies."""
        return files.fuse_uploads(self.federation, uploads, work, self.server_key, said, **options)


def make_sites(method: str = "fedavg", names: tuple[str, ...] = NAMES, **settings: Any) -> Sites:
    server_key = keys.generate_key()
    client_keys = {name: keys.generate_key() for name in names}
    clients = tiny_clients(len(names))
    given: dict[str, Any] = {"model": "resnet8", "training": TRAINING, "seed": 5, "run_id": "test-run", **settings}
    federation = new_federation(
        classes=["class-0", "class-1", "class-2"],
        server=keys.public_text(server_key),
        clients={name: keys.public_text(key) for name, key in client_keys.items()},
        image_size=12,
        method=method,
        **given,
    )
    renamed = [Client(name, c.images, c.labels) for name, c in zip(names, clients, strict=True)]
    return Sites(federation, server_key, client_keys, renamed)


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
