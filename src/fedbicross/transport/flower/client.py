"""At a site: answer the server's two questions from the site's own folders.

Only three things ever leave through here: the signed upload, the digest of the reply that came, and a code word where
something went wrong. Error texts stay in the site's log, because they may hold paths and names.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedbicross.atomic import write_atomic
from fedbicross.disclosure.policy import Policy, load_policy
from fedbicross.errors import FedBiCrossError, UploadError
from fedbicross.messages import Client, file_name
from fedbicross.privacy import ledger
from fedbicross.settings import parse
from fedbicross.transport import files, site_data
from fedbicross.transport.flower import envelope
from fedbicross.transport.flower.settings import LOG, LogFile, SiteSettings


@dataclass(frozen=True)
class Site:
    """Everything that one answer needs, all of it from this machine."""

    settings: SiteSettings
    federation: files.FederationFile
    log: LogFile

    @cached_property
    def name(self) -> str:
        """Of the site that this is."""
        return self.settings.name(self.federation)

    @property
    def work(self) -> Path:
        """The folder that `fedbicross client` uses too: what was trained there before is not trained again."""
        return self.settings.folder(self.federation) / "clients" / file_name(self.name)

    @property
    def kept_reply(self) -> Path:
        """Where the reply is put."""
        return self.settings.folder(self.federation) / "replies" / f"{file_name(self.name)}.safetensors"

    def policy(self) -> Policy | None:
        """The site's own rules on what may leave."""
        return load_policy(Path(self.settings.policy)) if self.settings.policy else None

    def client(self) -> Client:
        """The site's training images, found fit to train on."""
        return self.images()[0]

    def images(self) -> tuple[Client, files.HeldOut]:
        """The same, and what an audit needs."""
        agreed = self.federation
        client, held_out, names = site_data.load_named(
            self.settings.data, agreed.task, self.name, agreed.hold_out, agreed.seed
        )
        accept = [code.strip() for code in self.settings.accept.split(",") if code.strip()]
        for warning in site_data.check_site(client, held_out, agreed.classes, accept):
            self.log.say(f"warning: {warning}")
        controls = Client(self.name, held_out.images, held_out.labels, held_out.patients)
        return client, files.HeldOut(controls, names)


def upload(site: Site, message: Message) -> Message:
    """The signed upload: trained once, afterwards read from the site's folder."""
    key, device, policy = site.settings.load_key(), site.settings.device, site.policy()
    client, held_out = site.images()
    book = Path(site.settings.work) / ledger.NAME
    options: dict[str, Any] = {"device": device, "book": book, "policy": policy, "held_out": held_out}
    data = files.make_upload(site.federation, client, key, site.work, site.log, **options)
    site.log.say(f"sending the upload, {len(data):,} bytes, SHA-256 {_digest(data)}")
    return Message(envelope.content({}, data), reply_to=message)


def reply(site: Site, message: Message) -> Message:
    """Keep the reply before anything else is done with it, then make the site's model."""
    data = envelope.bundle_of(message)
    files.open_reply(site.federation, data, site.name)
    write_atomic(site.kept_reply, data)
    site.log.say(f"the reply came, {len(data):,} bytes, SHA-256 {_digest(data)}")
    state = "model_made"
    try:
        files.personalize(site.federation, site.client(), data, site.work, site.log, device=site.settings.device)
    except Exception:  # the reply is safe: `fedbicross client personalize` goes on from it
        site.log.say(traceback.format_exc())
        state = "reply_kept_no_model"
    return Message(envelope.content({"sha256": _digest(data), "state": state}), reply_to=message)


def answer(message: Message, context: Context, how: Callable[[Site, Message], Message]) -> Message:
    """Answer, or say with one word why not."""
    log = None
    try:
        settings = parse(SiteSettings, dict(context.node_config), "node-config")
        log = LogFile(Path(settings.work) / LOG)
        federation = files.load_federation(settings.federation_file)
        asked = envelope.note_of(message).get("run")
        if asked != federation.run:
            raise UploadError(
                "other_run", f"the server asks for run {asked!r}; federation.toml here is {federation.run!r}"
            )
        return how(Site(settings, federation, log), message)
    except Exception as error:
        # Flower would send the text of an exception to the server.
        code = error.code if isinstance(error, FedBiCrossError) else "unexpected"
        said = str(error) if isinstance(error, FedBiCrossError) else traceback.format_exc()
        (print if log is None else log.say)(said)
        return Message(envelope.content({"code": code}), reply_to=message)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """TRAIN: the upload."""
    return answer(message, context, upload)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """EVALUATE: the reply, and a receipt."""
    return answer(message, context, reply)
