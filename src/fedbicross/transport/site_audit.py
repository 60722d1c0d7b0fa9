"""At a site, before an upload leaves: the audit, its signed statement, and what the site's policy says to it.

Everything is kept in the site's work folder. The statement is made to be filed; what names or shows single images lies
beside it, and nothing sends it anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fedbicross import disclosure
from fedbicross.bundle.format import canonical_json
from fedbicross.disclosure import policy as policies
from fedbicross.disclosure import statement
from fedbicross.disclosure.effort import Effort
from fedbicross.errors import PolicyError
from fedbicross.messages import Client, Upload
from fedbicross.methods.base import RECEIVES
from fedbicross.transport.federation_file import FederationFile

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedbicross.context import Context, Store
    from fedbicross.disclosure.audit import Memorised
    from fedbicross.disclosure.policy import Policy

FOLDER = "audit"


@dataclass(frozen=True, eq=False)
class HeldOut:
    """What an audit needs beside the training images: images that nothing was trained on, and names for the site."""

    controls: Client
    names: Sequence[str] = ()  # of the training images, in their order


@dataclass(frozen=True)
class Audited:
    """A finished audit."""

    json: bytes  # the signed statement
    html: bytes
    body: dict[str, Any]
    memorised: list[Memorised]

    @property
    def reasons(self) -> list[str]:
        """Why the site's policy keeps the upload here; empty where it may leave."""
        return list((self.body["policy"] or {}).get("reasons", []))


def place(data: bytes) -> str:
    """Where the audit of these bytes lies in the work folder, without its ending."""
    return f"{FOLDER}/{hashlib.sha256(data).hexdigest()[:16]}"


def audit_upload(
    federation: FederationFile,
    client: Client,
    held_out: HeldOut,
    key: Ed25519PrivateKey,
    data: bytes,
    ctx: Context,
    *,
    trying: Effort,
    policy: Policy | None,
    made_here: bool,
) -> Audited:
    """Audit signed bytes and keep the statement; whether they may leave is said in it, not decided here."""
    upload, method = Upload.unpack(data), federation.build()
    findings = disclosure.audit.audit(method, upload, client, held_out.controls, ctx, trying)
    judged = None
    if policy is not None:
        rule = policy.audit
        reasons = [] if rule is None else policies.reasons_against(rule, findings.public)
        try:
            policies.check_method(policy, federation.method, method)
            policies.apply_counts(policy.model_copy(update={"below": "refuse"}), upload)
        except PolicyError as error:
            reasons = [error.args[0], *reasons]
        judged = {"rules": policy.model_dump(), "reasons": reasons}
    body = statement.make(
        findings.public,
        data,
        client=client.name,
        run=federation.run,
        method=federation.method,
        leaves=method.upload_summary,
        others_receive=RECEIVES[method.others_receive],
        images={
            "trained_on": len(client.labels),
            "held_out": len(held_out.controls.labels),
            "made_here": made_here,
        },
        effort=trying.model_dump(),
        policy=judged,
        counts=upload.class_counts,
        privacy=None if upload.privacy is None else upload.privacy.words,
    )
    text, page = statement.sign(body, key)
    name = place(data)
    private = [_named(one, held_out.names, federation.classes) for one in findings.memorised]
    ctx.store.save(f"{name}-private.json", canonical_json({"known_by_heart": private}).encode())
    if findings.pictures:
        ctx.store.save(f"{name}-private.png", findings.pictures)
    ctx.store.save(f"{name}.html", page)
    ctx.store.save(f"{name}.json", text)
    return Audited(text, page, body, findings.memorised)


def _named(one: Memorised, names: Sequence[str], classes: Sequence[str]) -> dict[str, Any]:
    return {**asdict(one), "label": classes[one.label], "file": names[one.row] if one.row < len(names) else None}


def kept_audit(store: Store, data: bytes, key: str, policy: Policy) -> bool:
    """Whether these bytes passed an audit here under this very policy."""
    text = store.load(f"{place(data)}.json")
    if text is None:
        return False
    body = statement.verify(text, {Upload.unpack(data).client: key}, upload=data)
    judged = body["policy"] or {}
    return judged.get("rules") == policy.model_dump() and not judged["reasons"]
