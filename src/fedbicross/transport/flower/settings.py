"""What each machine keeps to itself: where its files lie, and how long the server waits. No import of Flower."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, field_validator

from fedbicross.bundle import keys
from fedbicross.errors import ConfigError, printable
from fedbicross.messages import file_name
from fedbicross.settings import Settings, parse, read_toml

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedbicross.transport.federation_file import FederationFile

SERVER_FILE = "FEDBICROSS_FLOWER_SERVER"  # environment of the SuperLink: path of the server's settings
LOG = "flower.log"


class MachineSettings(Settings):
    """Paths on one machine. Absolute, because Flower starts its processes wherever it likes."""

    federation: str = Field(description="the agreed federation.toml")
    key: str = Field(description="the private key that signs what leaves this machine")
    work: str = Field(description="folder for everything made here; each run has its own folder in it")
    device: str = Field("auto", description="auto, cpu, cuda or mps")

    @field_validator("federation", "key", "work", "data", "policy", check_fields=False)
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and not Path(value).is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @property
    def federation_file(self) -> Path:
        """The agreed file."""
        return Path(self.federation)

    def folder(self, federation: FederationFile) -> Path:
        """Where this run's files lie, laid out as `fedbicross client` and `fedbicross server` do."""
        return Path(self.work) / federation.run_id

    def load_key(self) -> Ed25519PrivateKey:
        """The private key."""
        return keys.load_private_key(self.key)


class SiteSettings(MachineSettings):
    """``site.toml``: what a SuperNode is started with. It stays at the site."""

    data: str = Field(description="the site's images: folder of class folders, CSV manifest or .npz")
    accept: str = Field("", description="findings of `fedbicross check` to go on in spite of, comma-separated codes")
    policy: str = Field("", description="the site's policy.toml: what may leave; empty: no rules of its own")

    def name(self, federation: FederationFile) -> str:
        """Which site of the federation this is: the one that its key belongs to."""
        public = keys.public_text(self.load_key())
        for name, listed in federation.clients.items():
            if listed == public:
                return name
        raise ConfigError("not_listed", f"the federation file does not list the key {self.key}")


class ServerSettings(MachineSettings):
    """``server.toml``: what the SuperLink's environment points at. Runs cannot change it."""


class RunOptions(Settings):
    """What the operator decides for one run. Times are generous: hospitals train for hours and restart at night."""

    deadline_seconds: float = Field(72 * 3600.0, gt=0, description="after this the run ends, whoever is missing")
    grace_seconds: float = Field(
        24 * 3600.0, ge=0, description="once the quorum is there: how long after the last news the rest is waited for"
    )
    quorum: int = Field(0, ge=0, description="fuse with so few uploads; 0: as agreed")
    hold_on_notes: bool = Field(False, description="begin nothing while an upload sticks out")
    trust: str = Field("", description="file names of sites whose uploads are used as they are, comma-separated")
    without: str = Field("", description="file names of sites that take no part in this run, comma-separated")
    retry_seconds: float = Field(60.0, gt=0, description="pause before a node that failed is asked again; doubles")
    poll_seconds: float = Field(3.0, gt=0, description="pause between two looks for answers")

    @classmethod
    def from_run_config(cls, given: Mapping[str, Any]) -> RunOptions:
        """From `flwr run --run-config 'deadline-seconds=...'`; Flower's names have dashes."""
        return parse(cls, {key.replace("-", "_"): value for key, value in given.items()}, "run-config")

    def run_config(self) -> str:
        """For `flwr run --run-config`."""
        return " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in self.model_dump().items())

    def sites(self, field: Literal["trust", "without"], federation: FederationFile) -> list[str]:
        """The names of the sites in one of the lists; one that the federation does not have is an error."""
        given = {part.strip() for part in str(getattr(self, field)).split(",")} - {""}
        listed = {file_name(name): name for name in federation.clients}
        for unknown in sorted(given - set(listed)):
            raise ConfigError(
                "not_listed", f"{field}: {printable(unknown)} is no file name of a site in the federation"
            )
        return [listed[name] for name in sorted(given)]

    def check(self, federation: FederationFile) -> None:
        """Refuse sites that are not there, and a quorum that so many sites cannot reach."""
        self.sites("trust", federation)
        sites = len(federation.clients) - len(self.sites("without", federation))
        if self.quorum > sites:
            raise ConfigError("quorum", f"--quorum {self.quorum}: of the federation {sites} sites take part")


P = TypeVar("P", bound=MachineSettings)


def load_settings(cls: type[P], file: Path) -> P:
    """Read ``site.toml`` or ``server.toml``."""
    return parse(cls, read_toml(file))


def server_settings(**typed: str | Path) -> ServerSettings:
    """From what was typed: every path is made absolute."""
    return parse(ServerSettings, _absolute(typed))


def site_settings(**typed: str | Path) -> SiteSettings:
    """From what was typed: every path is made absolute."""
    return parse(SiteSettings, _absolute(typed))


def _absolute(typed: Mapping[str, str | Path]) -> dict[str, str]:
    return {key: str(value.absolute()) if isinstance(value, Path) else value for key, value in typed.items()}


def settings_of_superlink() -> ServerSettings:
    """The settings that the SuperLink was started with."""
    file = os.environ.get(SERVER_FILE)
    if not file:
        raise ConfigError(
            "no_server_file", f"the SuperLink was started without {SERVER_FILE}; use `fedbicross flower up`"
        )
    return load_settings(ServerSettings, Path(file))


class LogFile:
    """Progress as lines in a file, where the person at this machine can read them; and through ``also``, if given."""

    def __init__(self, file: Path, also: Callable[[str], object] | None = None) -> None:
        self.file, self.also = file, also
        file.parent.mkdir(parents=True, exist_ok=True)

    def start(self, label: str, total: int) -> Callable[[int, str], None]:
        """Begin a piece of work; of its steps about ten are noted."""
        self.say(label)
        step = max(1, total // 10)

        def update(done: int, note: str) -> None:
            if done % step == 0 or done == total:
                self.say(f"{label}: {done}/{total} {note}".rstrip())

        return update

    def say(self, message: str) -> None:
        """One line."""
        line = printable(" ".join(message.split()))
        with self.file.open("a", encoding="utf-8") as out:
            out.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
        if self.also is not None:
            self.also(line)
