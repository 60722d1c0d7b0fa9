"""``federation.toml``: what all sites agree on before anyone trains. Torch-free.

Two digests guard the agreement. ``run`` goes into every upload and reply; it covers all that determines the result
(task, method, training, seed), so that a file made under other settings is refused. ``agreement`` goes there too: who
the members are, what the models are for, and until when. ``fingerprint`` covers the whole file, keys included; sites
read it to each other over the telephone before they begin.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from fedbicross import models
from fedbicross.bundle import keys
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Task
from fedbicross.engine.recipe import Training
from fedbicross.errors import ConfigError, FedBiCrossError, MethodError, nearest
from fedbicross.messages import Agreement, file_name
from fedbicross.methods import create, find
from fedbicross.methods.base import Method, check_private_training
from fedbicross.settings import Settings, as_toml, parse, read_toml

MAX_FILE = 1 << 20  # bytes
MAX_CLIENTS = 1000
MAX_NAME = 100  # characters
MAX_PURPOSE = 500
# Alphabets with letters that look like those of another. The first word of a letter's Unicode name is its alphabet.
_ALPHABETS = frozenset({"LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "COPTIC", "CHEROKEE"})
_LOOK_ALIKE = str.maketrans("1I|O", "lll0")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RECIPE_SHOWN = 16  # hex digits of the digest of all that determines the result


class CountPolicy(Settings):
    """Which numbers of images may leave. A small count can point at a patient with a rare disease."""

    send: bool = Field(True, description="false: nothing that counts images leaves; methods that need it are refused")
    smallest: int = Field(5, ge=0, le=1_000_000, description="counts from 1 to one less than this are small")
    below: Literal["refuse", "round_up"] = Field(
        "refuse", description="small counts: make no upload at all, or send `smallest` in their place"
    )


class FederationFile(Settings):
    """Everything that the sites agree on."""

    run_id: str = Field(description="name of this federation; a file made for another run is refused")
    classes: list[str] = Field(description="label map: class names in the order of the network's outputs")
    image_size: int = Field(ge=8, le=1024, description="pixels per side after preparation")
    channels: Literal[1, 3] = Field(description="1: grey, 3: RGB")
    model: str = Field(description="architecture, see `fedbicross list models`")
    method: str = Field(description="name or name:variant, see `fedbicross list methods`")
    settings: dict[str, Any] = Field(default_factory=dict, description="of the method; what is not named has defaults")
    training: Training = Field(default_factory=lambda: Training(recipe="paper"))
    seed: int = Field(0, ge=0, description="of every random stream")
    hold_out: float = Field(
        0.2, ge=0, lt=1, description="share of patients that each site keeps for testing, if its data name no test set"
    )
    quorum: int = Field(ge=1, description="uploads without which the server does not fuse")
    class_counts: CountPolicy = Field(default_factory=CountPolicy)
    purpose: str = Field("", description="what the models may be used for; signed into every upload and reply")
    expires: str | None = Field(
        None, description="last day, YYYY-MM-DD in UTC, on which files of this run are made or taken; none: no end"
    )
    server: str = Field(description="public key that signs the replies")
    clients: dict[str, str] = Field(description="name of each site and the public key that signs its upload")

    @field_validator("expires", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return value.isoformat() if type(value) is date else value  # TOML knows dates

    @property
    def task(self) -> Task:
        """The task as every upload has to state it."""
        return Task(tuple(self.classes), self.image_size, self.channels, self.model)

    @property
    def run(self) -> str:
        """Run id and digest of what determines the result; stands in every upload and reply."""
        return f"{self.run_id}+{self._recipe_digest()[:_RECIPE_SHOWN]}"

    @property
    def agreement(self) -> Agreement:
        """Members, purpose and last day; stands in every upload and reply."""
        members = canonical_json({"server": self.server, "clients": self.clients})
        digest = hashlib.sha256(members.encode()).hexdigest()
        return Agreement(members=digest, purpose=self.purpose, expires=self.expires)

    @property
    def fingerprint(self) -> str:
        """Digest of the whole file, in groups of four to be read aloud."""
        whole = {**self.model_dump(), "settings": self.build().config.model_dump()}
        digest = hashlib.sha256(canonical_json(whole).encode()).hexdigest()[:32]
        return " ".join(digest[start : start + 4] for start in range(0, len(digest), 4))

    def build(self) -> Method[Any]:
        """The method with these settings."""
        return create(self.method, {self.method: self.settings})

    def _recipe_digest(self) -> str:
        # Defaults are part of it: sites whose versions of the program differ in one must notice.
        parts = {
            "task": self.task.as_json(),
            "method": self.method,
            "settings": self.build().config.model_dump(),
            "training": self.training.model_dump(),
            "seed": self.seed,
        }
        return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def load_federation(path: Path) -> FederationFile:
    """Read and check ``federation.toml``; any mistake is a one-line ``ConfigError``."""
    if not path.is_file():  # a pipe would be waited for
        raise ConfigError("no_federation", f"no federation file {str(path)!r}; ask who set up the federation")
    if path.stat().st_size > MAX_FILE:
        raise ConfigError("too_large", f"{path} is too large; a federation file has at most {MAX_FILE:,} bytes")
    federation = parse(FederationFile, read_toml(path))
    check_federation(federation)
    return federation


def new_federation(
    *,
    classes: Sequence[str],
    server: str,
    clients: Mapping[str, str],
    image_size: int = 28,
    channels: int = 3,
    model: str = "resnet18",
    method: str = "fedbicross",
    settings: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    run_id: str | None = None,
    quorum: int | None = None,
    quick: bool = False,
    **more: Any,
) -> FederationFile:
    """A checked federation. ``server`` and ``clients`` are public keys; the quorum is everybody unless said.

    ``quick`` takes the method's small settings. ``more`` are the remaining fields: seed, hold_out, class_counts.
    """
    name = method.partition(":")[0]
    small = dict(find(name).quick_settings) if quick else {}
    values = {
        "run_id": run_id or f"run-{secrets.token_hex(6)}",
        "classes": list(classes),
        "image_size": image_size,
        "channels": channels,
        "model": model,
        "method": method,
        "settings": {**small, **(settings or {})},
        "training": dict(training or {"recipe": "paper"}),
        "quorum": len(clients) if quorum is None else quorum,
        "server": server,
        "clients": dict(clients),
        **more,
    }
    federation = parse(FederationFile, values)
    check_federation(federation)
    return federation


def federation_text(federation: FederationFile) -> str:
    """The content of ``federation.toml``."""
    head = (
        "# What all sites of this federation agree on. Compare its fingerprint by telephone before you train:\n"
        "#   fedbicross federation show federation.toml\n"
    )
    return head + as_toml(federation)


def check_federation(federation: FederationFile) -> None:
    """Everything that can be wrong without looking at a single image."""
    if not _RUN_ID.fullmatch(federation.run_id):
        raise ConfigError("run_id", f"run_id: letters, digits, . _ and - only, at most 64 (got {federation.run_id!r})")
    _check_classes(federation.classes)
    models.check(federation.model, federation.channels, len(federation.classes), federation.image_size)
    _check_keys(federation)
    _check_purpose(federation)
    if federation.quorum > len(federation.clients):
        raise ConfigError("quorum", f"quorum: {federation.quorum} of {len(federation.clients)} clients cannot be met")
    _check_method(federation)


def _check_classes(classes: Sequence[str]) -> None:
    for name in classes:
        if not name or not name.isprintable() or name != name.strip() or len(name) > MAX_NAME:
            raise ConfigError("classes", f"classes: {name!r} is no plain class name")
    if len(set(classes)) < len(classes):
        raise ConfigError("classes", "classes: names must differ")


def _check_keys(federation: FederationFile) -> None:
    if not 1 <= len(federation.clients) <= MAX_CLIENTS:
        raise ConfigError("clients", f"clients: 1 to {MAX_CLIENTS} are possible (got {len(federation.clients)})")
    owners: dict[str, str] = {}
    for place, name, text in (
        ("server", "the server", federation.server),
        *((f"clients.{name}", repr(name), text) for name, text in federation.clients.items()),
    ):
        try:
            key = keys.fingerprint(text)
        except FedBiCrossError as error:
            raise ConfigError("bad_key", f"{place}: {error.args[0]}") from None
        if key in owners:  # whoever holds it could speak for both
            raise ConfigError("same_key", f"{place}: the same key as that of {owners[key]}")
        owners[key] = name
    _check_names(list(federation.clients))


def _check_names(names: Sequence[str]) -> None:
    """Names that no two people can confuse, and no two disks."""
    folded: dict[str, str] = {}
    alphabets: dict[str, str] = {}  # and who uses it first
    for name in names:
        if not name or not name.isprintable() or name != name.strip() or len(name) > MAX_NAME:
            raise ConfigError("client_name", f"clients: {name!r} is no plain name of at most {MAX_NAME} characters")
        if unicodedata.normalize("NFKC", name) != name:
            raise ConfigError("client_name", f"clients: {name!r} can be written in another way; use its NFKC form")
        for letter in filter(str.isalpha, name):
            alphabet = unicodedata.name(letter, "").partition(" ")[0]
            if alphabet in _ALPHABETS:
                alphabets.setdefault(alphabet, name)
        if len(alphabets) > 1:
            (one, first), (other, second) = list(alphabets.items())[:2]
            what = f"{first!r} has {one} letters and {second!r} has {other} ones, which look alike"
            raise ConfigError("client_name", f"clients: {what}; use one alphabet for all names")
        # The same file name, on some disks or on all; or the same to the eye.
        for alike in (name.casefold(), file_name(name).casefold(), name.translate(_LOOK_ALIKE).casefold()):
            if folded.setdefault(alike, name) != name:
                raise ConfigError("client_name", f"clients: {name!r} and {folded[alike]!r} are too much alike")


def _check_purpose(federation: FederationFile) -> None:
    if not federation.purpose.isprintable() or len(federation.purpose) > MAX_PURPOSE:
        raise ConfigError("purpose", f"purpose: one line of at most {MAX_PURPOSE} characters")
    if federation.expires is not None:
        try:
            same = date.fromisoformat(federation.expires).isoformat() == federation.expires
        except ValueError:
            same = False
        if not same:
            raise ConfigError("expires", f"expires: {federation.expires[:20]!r} is no day; write YYYY-MM-DD")


def check_not_expired(federation: FederationFile) -> None:
    """After its last day nothing is made or taken under an agreement."""
    if federation.expires is not None and datetime.now(UTC).date().isoformat() > federation.expires:
        raise ConfigError("expired", f"this federation ended on {federation.expires}; agree on a new federation file")


def _check_method(federation: FederationFile) -> None:
    method = federation.build()
    if method.pools_data:
        raise MethodError("not_federated", f"{federation.method} pools the images; it exists only inside a simulation")
    if method.rounds != 1:
        raise MethodError(
            "not_one_shot",
            f"{federation.method} takes {method.rounds} rounds; one file out and one file back needs one round",
        )
    if "bn_stats" in method.needs and not models.MODELS[federation.model].has_batchnorm:
        raise ConfigError(
            "needs_batchnorm",
            f"{federation.method} needs batch-normalisation statistics, which {federation.model!r} does not have",
        )
    if federation.training.dp is not None:
        if not method.sends_only_the_network and not method.private_training_problem:
            what = f"training.dp does nothing for {federation.method}, which sends no network that a client trained"
            raise ConfigError("dp_unused", f"{what}; methods on features have a setting epsilon")
        check_private_training(method, federation.training, federation.method)
        if models.MODELS[federation.model].has_batchnorm:
            raise ConfigError("dp_batchnorm", f"training.dp: {models.group_norm_advice(federation.model)}")
    counts = sorted(method.needs & {"class_counts", "num_samples"})
    if counts and not federation.class_counts.send:
        raise MethodError(
            "needs_counts", f"{federation.method} needs {' and '.join(counts)}, but class_counts.send is false"
        )


def find_client(federation: FederationFile, name: str) -> str:
    """The public key of a site; an unknown name is an error with the nearest known one."""
    if name not in federation.clients:
        raise ConfigError("not_listed", f"no client {name!r} in the federation file{nearest(name, federation.clients)}")
    return federation.clients[name]
