"""At a site: train once and sign what leaves; turn the server's reply into the site's own model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedbicross import engine, parts, pipeline
from fedbicross.bundle import UPLOAD, inspect, keys, sign
from fedbicross.bundle.format import canonical_json
from fedbicross.context import Context, Progress
from fedbicross.disclosure import policy as policies
from fedbicross.disclosure.effort import Effort
from fedbicross.disclosure.policy import Policy
from fedbicross.errors import ConfigError, MethodError, PolicyError, RunError, UploadError
from fedbicross.messages import Client, Predictor, Upload, file_name
from fedbicross.privacy import ledger
from fedbicross.runs.store import RunFolder
from fedbicross.settings import Settings, read_json
from fedbicross.transport.federation_file import CountPolicy, FederationFile, check_not_expired, find_client
from fedbicross.transport.site_audit import Audited, HeldOut, audit_upload, kept_audit
from fedbicross.transport.verify import counts_agree, open_reply, verify_upload
from fedbicross.transport.work import SCOPE, make_context, say_warnings, work_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SENT = "upload.safetensors"
SITE = "site.json"


class _Begun(Settings):
    """What a site's work was begun with; kept in its work folder."""

    run: str
    client: str
    data: str  # SHA-256 of the images
    device: str


def make_upload(
    federation: FederationFile,
    client: Client,
    key: Ed25519PrivateKey,
    work: Path,
    progress: Progress | None = None,
    *,
    device: str = "auto",
    book: Path | None = None,
    policy: Policy | None = None,
    held_out: HeldOut | None = None,
) -> bytes:
    """Train, and return the signed bytes that leave; if they lie in ``work`` already, nothing is trained again.

    ``book`` is the site's ledger of everything that it ever sent (`privacy.ledger`); none: one in ``work``. With a
    ``policy`` of the site, what it does not let leave is neither returned nor kept; where it requires an audit, that is
    made here, with the images that were ``held_out``.
    """
    book = work / ledger.NAME if book is None else book
    ledger.read(book)  # a damaged one is an error before hours of training, not after
    check_not_expired(federation)
    check_key(federation, client.name, key)
    _check_images(federation, client)
    if policy is not None:
        policies.check_method(policy, federation.method, federation.build())
    with work_folder(work) as folder:
        ctx = _site_context(federation, client, folder, progress, device)
        kept = folder.store.load(SENT)
        if kept is not None and policy is not None and not _policy_allows(policy, key, kept, ctx):
            folder.store.drop(SENT)  # made before the policy, or under another one
            kept = None
        if kept is not None and _may_leave(federation, key, kept):
            verify_upload(federation, kept)
            ctx.progress.say("done before: the upload is the one that was made then")
            _enter(book, federation, client, kept, ctx)
            return kept
        name = f"{SCOPE}/{file_name(client.name)}"
        upload = pipeline.make_upload(federation.build(), client, ctx, name)
        say_warnings(ctx, "upload", name, _agreed_settings(federation))
        upload = replace(
            apply_counts(federation.class_counts, upload), run_id=federation.run, agreement=federation.agreement
        )
        leaving = upload if policy is None else policies.apply_counts(policy, upload)
        data = sign(leaving.pack(), key)
        try:
            verify_upload(federation, data)  # what the server would refuse is refused here, before it travels
        except UploadError as error:
            if leaving is upload:
                raise
            way_on = "below = 'refuse', or a smaller smallest_count"
            problem = f"{federation.method} needs the counts that the site's policy suppresses; {way_on} ({error})"
            raise PolicyError("policy_count", problem) from None
        if policy is not None and policy.audit is not None and policy.audit.required:
            _audit_or_refuse(federation, client, held_out, key, data, ctx, policy)
        folder.store.save(SENT, data)
        ctx.drop_stages()
        _enter(book, federation, client, data, ctx)
        return data


def _enter(book: Path, federation: FederationFile, client: Client, data: bytes, ctx: Context) -> None:
    """Write down what is about to leave, and say what it adds up to; without the entry nothing leaves."""
    entries = ledger.add(
        book,
        run=federation.run,
        client=client.name,
        method=federation.method,
        data=client.digest,
        upload=hashlib.sha256(data).hexdigest(),
        privacy=Upload.unpack(data).privacy,
    )
    ctx.progress.say(f"privacy of everything that this site ever sent: {ledger.total(entries).words}")


def _policy_allows(policy: Policy, key: Ed25519PrivateKey, data: bytes, ctx: Context) -> bool:
    """Whether an upload that was made before passes the policy as it is today."""
    upload = Upload.unpack(data)
    try:
        fits = policies.apply_counts(policy, upload) is upload
    except PolicyError:
        fits = False
    audited = policy.audit is None or not policy.audit.required
    return fits and (audited or kept_audit(ctx.store, data, keys.public_text(key), policy))


def _audit_or_refuse(
    federation: FederationFile,
    client: Client,
    held_out: HeldOut | None,
    key: Ed25519PrivateKey,
    data: bytes,
    ctx: Context,
    policy: Policy,
) -> None:
    assert policy.audit is not None
    if held_out is None:
        raise PolicyError("policy_audit", "the site's policy requires an audit, for which images must be held out")
    trying = policy.audit.trying
    done = audit_upload(federation, client, held_out, key, data, ctx, trying=trying, policy=policy, made_here=True)
    if done.reasons:
        raise PolicyError("policy_audit", f"the audit keeps this upload here: {'; '.join(done.reasons)}")
    ctx.progress.say("audit: within the site's policy")


def audit_file(
    federation: FederationFile,
    client: Client,
    held_out: HeldOut,
    key: Ed25519PrivateKey,
    data: bytes,
    work: Path,
    progress: Progress | None = None,
    *,
    device: str = "auto",
    trying: Effort,
    policy: Policy | None = None,
) -> Audited:
    """Audit an upload that this site has made, here or elsewhere."""
    check_key(federation, client.name, key)
    upload = verify_upload(federation, data)
    if upload.client != client.name:
        raise ConfigError("wrong_site", f"this upload is of {upload.client!r}, not of {client.name!r}")
    _check_images(federation, client)
    with work_folder(work) as folder:
        ctx = _site_context(federation, client, folder, progress, device)
        made_here = folder.store.load(SENT) == data
        return audit_upload(
            federation, client, held_out, key, data, ctx, trying=trying, policy=policy, made_here=made_here
        )


def check_key(federation: FederationFile, name: str, key: Ed25519PrivateKey) -> None:
    """The key must be the one that the others expect of this site."""
    if keys.public_text(key) != find_client(federation, name):
        raise ConfigError("wrong_key", f"this key is not the one that the federation file lists for {name!r}")


def _may_leave(federation: FederationFile, key: Ed25519PrivateKey, data: bytes) -> bool:
    """Whether an upload that was made before is still right: by today's key, rule on counts, and agreement."""
    signed = inspect(data, UPLOAD).signer == keys.public_text(key)
    upload = Upload.unpack(data)
    return signed and upload.agreement == federation.agreement and counts_agree(federation.class_counts, upload)


def _check_images(federation: FederationFile, client: Client) -> None:
    expected = (federation.image_size, federation.image_size, federation.channels)
    if client.images.shape[1:] != expected or not len(client.labels):
        raise ConfigError(
            "images", f"{client.label}: images [n, H, W, C] must be {expected}, got {client.images.shape}"
        )
    if client.labels.min() < 0 or client.labels.max() >= len(federation.classes):
        raise ConfigError("labels", f"{client.label}: labels must lie in 0..{len(federation.classes) - 1}")


def apply_counts(policy: CountPolicy, upload: Upload) -> Upload:
    """The minimum-count rule: a count that could point at a person stays here."""
    if not policy.send:
        return replace(upload, class_counts=None, num_samples=None)
    if counts_agree(policy, upload):
        return upload
    if policy.below == "refuse":
        raise MethodError(
            "small_count",
            f"a count below class_counts.smallest = {policy.smallest} would leave; "
            "agree on below = 'round_up', or on a method that sends no counts",
        )
    counts, total = upload.class_counts, upload.num_samples
    if counts is not None:
        counts = [_rounded(number, policy.smallest) for number in counts]
    if total is not None:
        total = _rounded(total, policy.smallest) if counts is None else sum(counts)
    return replace(upload, class_counts=counts, num_samples=total)


def _rounded(number: int, smallest: int) -> int:
    return smallest if 0 < number < smallest else number


def personalize(
    federation: FederationFile,
    client: Client,
    reply: bytes,
    work: Path,
    progress: Progress | None = None,
    *,
    device: str = "auto",
) -> Predictor:
    """The model that the site will use; if it lies in ``work`` already, nothing is trained again."""
    opened = open_reply(federation, reply, client.name)
    _check_images(federation, client)
    with work_folder(work) as folder:
        ctx = _site_context(federation, client, folder, progress, device)
        name = f"models/{hashlib.sha256(reply).hexdigest()[:32]}.safetensors"
        data = folder.store.load(name)
        if data is None:
            verb = f"{SCOPE}/{file_name(client.name)}"
            with _naming_bad_replies():
                predictor = pipeline.personalize(federation.build(), client, opened, ctx, verb)
            say_warnings(ctx, "personalize", verb, _agreed_settings(federation))
            data = predictor.pack()
            folder.store.save(name, data)
            ctx.drop_stages()
        return Predictor.unpack(data)


def _agreed_settings(federation: FederationFile) -> frozenset[str]:
    """What no site can change alone."""
    return frozenset({*type(federation.build().config).model_fields, *type(federation.training).model_fields})


@dataclass(frozen=True)
class SiteModels:
    """What a site ends with, both as sure as its validation images allow."""

    federated: Predictor
    alone: Predictor  # what it would have without taking part
    calibration_images: int  # 0: there were too few, and both are as sure as they are


def both_models(
    federation: FederationFile,
    client: Client,
    reply: bytes,
    work: Path,
    progress: Progress | None = None,
    *,
    device: str = "auto",
) -> SiteModels:
    """``personalize``, and what it is to be measured against: what the site trained, or now trains, alone."""
    federated = personalize(federation, client, reply, work, progress, device=device)
    with work_folder(work) as folder:
        ctx = _site_context(federation, client, folder, progress, device)
        method = federation.build()
        alone, rows = method.alone(client, ctx), method.held_back(client, ctx)
        ctx.drop_stages()
        images, labels = client.images[rows], client.labels[rows]
        models = [
            parts.calibration.calibrate(model, images, labels, ctx.device, ctx.store) for model in (federated, alone)
        ]
    enough = len(labels) >= parts.calibration.LEAST_IMAGES
    return SiteModels(models[0], models[1], len(labels) if enough else 0)


@contextmanager
def _naming_bad_replies() -> Iterator[None]:
    """A signed reply can still be wrong: what torch or a lookup says of its content becomes one line."""
    try:
        yield
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        if engine.device.out_of_memory(error):
            raise
        text = " ".join(str(error).split())[:200]
        raise UploadError("bad_reply", f"the reply does not hold what the method expects ({text})") from error


def _site_context(
    federation: FederationFile, client: Client, folder: RunFolder, progress: Progress | None, device: str
) -> Context:
    """The context of a site's work, refusing a folder that was begun with other images or for another run."""
    kept = folder.store.load(SITE)
    before = read_json(_Begun, kept, SITE) if kept is not None else None
    ctx = make_context(federation, folder, progress, before.device if before and device == "auto" else device)
    now = _Begun(run=federation.run, client=client.name, data=client.digest, device=ctx.device)
    if before is None:
        folder.store.save(SITE, canonical_json(now.model_dump()).encode())
    for key, what in (("run", "for another run"), ("client", "for another client"), ("data", "with other images")):
        if before is not None and getattr(before, key) != getattr(now, key):
            raise RunError("changed", f"{folder.path} was begun {what}; choose another --work, or empty it")
    return ctx
