"""What `client train`, `client personalize` and `client join` do alike at a hospital."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbicross import deploy, privacy, transport
from fedbicross.cli.common import print_table, site_work
from fedbicross.cli.show import progress

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedbicross.disclosure.policy import Policy
    from fedbicross.transport.federation_file import FederationFile
    from fedbicross.transport.files import HeldOut


@dataclass(frozen=True)
class Site:
    """One site of a federation on this machine."""

    agreed: FederationFile
    name: str
    data: str
    work: Path
    device: str

    @property
    def folder(self) -> Path:
        """Where its unfinished and private work lies."""
        return site_work(self.work, self.agreed, self.name)

    @property
    def book(self) -> Path:
        """Everything that was ever sent from here, over all federations."""
        return self.work / privacy.ledger.NAME

    def load(self) -> Any:
        """Images to train on, and those that are held out."""
        return self.load_named()[:2]

    def load_named(self) -> Any:
        """The same, and the names of the first."""
        agreed = self.agreed
        return transport.site_data.load_named(self.data, agreed.task, self.name, agreed.hold_out, agreed.seed)


def for_audit(site: Site, held_out: Any, names: Sequence[str]) -> HeldOut:
    """Held-out images as an audit takes them."""
    controls = transport.files.Client(site.name, held_out.images, held_out.labels, held_out.patients)
    return transport.files.HeldOut(controls, names)


def train(site: Site, key: Ed25519PrivateKey, accept: Sequence[str], policy: Policy | None = None) -> bytes:
    """Check the images, train, and return the bytes that may leave."""
    client, held_out, names = site.load_named()
    warnings = transport.site_data.check_site(client, held_out, site.agreed.classes, accept)
    with progress() as shown:
        for warning in warnings:
            shown.say(f"warning: {warning}")
        shown.say(f"{site.name}: {len(client.labels):,} images to train on, {len(held_out):,} held out")
        made = transport.files.make_upload(
            site.agreed,
            client,
            key,
            site.folder,
            shown,
            device=site.device,
            book=site.book,
            policy=policy,
            held_out=for_audit(site, held_out, names),
        )
        statement = site.folder / f"{transport.site_audit.place(made)}.html"
        if statement.is_file():
            shown.say(f"audit: {statement} is the statement to file, with the signed .json beside it")
        return made


def finish(site: Site, reply: bytes, out: Path, onnx: bool = False) -> dict[str, Any]:
    """Make the site's model from a reply, compare it with training alone on held-out images, write both; the scores."""
    agreed = site.agreed
    deploy.folder.check_absent(out)
    if onnx:
        deploy.graphs.require_onnx()
    opened = transport.files.open_reply(agreed, reply, site.name)  # before images are read, which may take minutes
    client, held_out = site.load()
    with progress() as shown:
        made = transport.files.both_models(agreed, client, reply, site.folder, shown, device=site.device)
    federated, alone = (model.probabilities(held_out.images) for model in (made.federated, made.alone))
    scores = deploy.compare.both(federated, alone, held_out.labels)
    method = agreed.build()
    sent = site.folder / transport.files.SENT
    origin = deploy.folder.Origin(
        kind="federation",
        client=site.name,
        run=agreed.run,
        method=agreed.method,
        leaves=method.leaves(agreed.training),
        upload_bytes=sent.stat().st_size if sent.is_file() else None,
        train_images=len(client.labels),
        hold_out=agreed.hold_out,
        seed=agreed.seed,
        settings=method.config.model_dump(),
        training=agreed.training.model_dump(),
        reply_sha256=hashlib.sha256(reply).hexdigest(),
        notes=transport.files.notes_in(opened),
        privacy=_privacy(site),
    )
    finished = deploy.folder.Finished(made.federated, origin, made.alone, made.calibration_images, scores)
    deploy.folder.write_model(out, finished, onnx=onnx)
    return scores


def _privacy(site: Site) -> dict[str, str | None] | None:
    """Of the upload behind a model, and of everything that the site ever sent, in words; none where nobody knows."""
    entries = privacy.ledger.read(site.book)
    mine = [entry for entry in entries if (entry.run, entry.client) == (site.agreed.run, site.name)]
    if not mine:
        return None
    stated = mine[-1].privacy
    return {"upload": None if stated is None else stated.words, "total": privacy.ledger.total(entries).words}


def print_scores(title: str, scores: dict[str, Any]) -> None:
    """Both models side by side, and which one to keep."""
    names = {"test": "federated", "alone": "trained alone"}
    tests = {name: scores[key] for key, name in names.items() if scores[key]}
    if tests:
        images = ("images", *(f"{test['images']:,}" for test in tests.values()))
        print_table(title, ("metric", *tests), [images, *deploy.card.metric_rows(*tests.values())])
    if scores["comparison"] or not tests:
        for line in deploy.compare.advice(scores["comparison"]):
            print(line)
