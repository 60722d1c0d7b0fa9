"""The signed statement of an audit: JSON for programs, HTML for the data officer's file, one signature for both.

The signature is over the JSON, which holds the SHA-256 of the page and of the upload, so that none can be exchanged.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidSignature
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedbicross import __version__
from fedbicross.bundle import keys
from fedbicross.bundle.audit import now
from fedbicross.bundle.format import canonical_json
from fedbicross.errors import UploadError
from fedbicross.lazy_torch import torch
from fedbicross.report import svg

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SCHEMA = 1
MAX_BYTES = 4 << 20
_DOMAIN = b"fedbicross audit statement, version 1\0"  # so that no other signature of the same key fits
_SIGNATURE = re.compile(r"[0-9a-f]{128}", re.ASCII)

NETWORK_COVERED = (
    "Membership inference by likelihood ratio and by confidence alone, with controls that the network never saw.",
    "A lower bound on what training by this recipe admits, from one run with canaries.",
    "Images inverted from the network, compared with training images and with the same number of held-out images.",
    "Training images that the network knows by heart: counted here, named only at the site.",
)
FEATURES_COVERED = (
    "Distance between synthetic features and real ones, and copies among them.",
    "A decoder that tries to rebuild images, beside the same with features of other people.",
)
NOT_COVERED = (
    "Attackers with more shadow networks, more computing time or other knowledge than this audit had.",
    "What several uploads of the same images, or this one joined with other releases, give away together.",
    "Properties of the whole group (how many patients with which disease), which a network shows by design.",
    "Whether the images are what they are said to be; the audit takes the site's word for which were trained on.",
)
FEATURES_NOT_COVERED = ("Membership inference on features: no such attack is built in for this kind of upload.",)
SATRE = (
    (
        "A documented policy for outputs that cannot be checked by eye, such as the weights of a network",
        "In part: the site's policy file and this statement of its outcome. Who decides, and on what grounds, is the "
        "organisation's own to write down.",
    ),
    (
        "The risk that a network has memorised records",
        "Measured: membership, canaries, images known by heart. Evidence from attacks, not a proof of safety.",
    ),
    (
        "The export of models named in the policy",
        "Yes: this file by its SHA-256, the method, what it sends, and what other sites receive of it.",
    ),
    ("A person who checks and decides", "Not covered: the statement is made for that person."),
)


def make(
    found: Mapping[str, Any],
    upload: bytes,
    *,
    client: str,
    run: str,
    method: str,
    leaves: str,
    others_receive: str,
    images: Mapping[str, Any],
    effort: Mapping[str, Any],
    policy: Mapping[str, Any] | None,
    counts: Sequence[int] | None,
    privacy: str | None = None,
) -> dict[str, Any]:
    """What the statement says, before it is signed."""
    features = found["kind"] == "features"
    covered = {"network": NETWORK_COVERED, "features": FEATURES_COVERED}.get(found["kind"], ())
    missing = list(NOT_COVERED)
    if features:
        missing[:0] = FEATURES_NOT_COVERED
    elif found["kind"] == "not_audited":
        missing.insert(0, "This kind of upload: no attack on it is built in. Nothing was measured.")
    elif found["kind"] == "network":
        missing += _gaps(found, counts)
    return {
        "schema": SCHEMA,
        "made": now(),
        "client": client,
        "run": run,
        "method": method,
        "leaves": leaves,
        "privacy": privacy or "none: nothing bounds what it can give away",
        "others_receive": others_receive,
        "upload": {"sha256": hashlib.sha256(upload).hexdigest(), "bytes": len(upload)},
        "images": dict(images),
        "effort": dict(effort),
        "found": dict(found),
        "policy": None if policy is None else dict(policy),
        "covered": list(covered),
        "not_covered": missing,
        "satre_3_3_07": [list(row) for row in SATRE],
        "versions": {"fedbicross": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    }


def _gaps(found: Mapping[str, Any], counts: Sequence[int] | None) -> list[str]:
    out = []
    if found["reconstruction"] is None:
        out.append("Reconstruction: the network has no batch-normalisation statistics to invert it by.")
    if found["other_tensors"]:
        out.append(f"Tensors beside the network: {', '.join(found['other_tensors'][:5])}.")
    if counts is not None:
        out.append("The class counts in the upload: they leave as they are, under the rules on counts.")
    for name, needed in (("tpr_at_0.01", 100), ("tpr_at_0.001", 1000)):
        if found["membership"]["likelihood_ratio"][name] is None:
            out.append(f"True positives at {float(name[7:]):.1%} false ones: that takes {needed:,} held-out images.")
    return out


def sign(body: Mapping[str, Any], key: Ed25519PrivateKey) -> tuple[bytes, bytes]:
    """The signed JSON and its page."""
    page = render(body).encode()
    whole = {**body, "html_sha256": hashlib.sha256(page).hexdigest()}
    signer = keys.public_text(key)
    signature = key.sign(_message(signer, whole)).hex()
    text = json.dumps(
        {"statement": whole, "signer": signer, "signature": signature}, indent=1, sort_keys=True, allow_nan=False
    )
    return text.encode() + b"\n", page


def verify(data: bytes, allowed: Mapping[str, str], page: bytes | None = None, upload: bytes | None = None) -> Any:
    """What was signed by somebody among ``allowed`` (name to key); for this page and upload, where they are given."""
    if len(data) > MAX_BYTES:
        raise UploadError("too_large", f"a statement has at most {MAX_BYTES:,} bytes")
    try:
        outer = json.loads(data)
        body, signer, signature = outer["statement"], outer["signer"], outer["signature"]
        if not isinstance(body, dict) or body["schema"] != SCHEMA or set(outer) != {"statement", "signer", "signature"}:
            raise ValueError
        message = _message(signer, body)
        client, digests = body["client"], (body["html_sha256"], body["upload"]["sha256"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UploadError("statement", "this is no audit statement, or one of another version") from None
    names = {text: name for name, text in allowed.items()}
    if signer not in names:
        raise UploadError("unknown_key", "the statement was signed with a key that is not on the list")
    if not isinstance(signature, str) or not _SIGNATURE.fullmatch(signature):
        raise UploadError("signature", "the signature is not 128 hexadecimal digits")
    try:
        keys.parse_public(signer).verify(bytes.fromhex(signature), message)
    except InvalidSignature:
        raise UploadError("signature", f"the signature does not fit: not what {names[signer]!r} signed") from None
    if client != names[signer]:
        raise UploadError("name_key_mismatch", f"signed by {names[signer]!r} but about another site's upload")
    for what, given, digest in zip(("page", "upload"), (page, upload), digests, strict=True):
        if given is not None and hashlib.sha256(given).hexdigest() != digest:
            raise UploadError(f"other_{what}", f"the {what} is not the one that the statement was made for")
    return body


def _message(signer: str, body: Mapping[str, Any]) -> bytes:
    return _DOMAIN + signer.encode() + b"\0" + canonical_json(body).encode()


# --- the page --------------------------------------------------------------------------------------------


def render(body: Mapping[str, Any]) -> str:
    """The statement as one page with nothing to fetch and nothing to run."""
    environment = Environment(
        loader=PackageLoader("fedbicross.disclosure", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = {"body": body, "rows": rows(body["found"]), "picture": Markup(_roc(body["found"]))}
    return environment.get_template("statement.html.j2").render(shown) + "\n"


def rows(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What was measured, its value, and what nothing learnt would give."""
    if found["kind"] == "features":
        return _feature_rows(found["features"])
    if found["kind"] != "network":
        return []
    known, canaries, inverted = found["membership"], found["canaries"], found["reconstruction"]
    out = []
    for name, title in (("likelihood_ratio", "with shadow networks"), ("confidence", "by confidence alone")):
        attack = known[name]
        out += [
            (f"membership {title}: AUC", _interval(attack["auc"]), "0.5"),
            ("… found at 1 % false alarms", _percent(attack["tpr_at_0.01"]), "1 %"),
            ("… found at 0.1 % false alarms", _percent(attack["tpr_at_0.001"]), "0.1 %"),
            ("… advantage (found less false alarms)", f"{attack['advantage']:.3f}", "0"),
        ]
    out += [
        (
            "control: the same two groups, to networks that never saw them, AUC",
            _interval(known["difference_without_membership"]),
            "0.5",
        ),
        ("the same attack on the shadow networks themselves, AUC", f"{known['shadows_attacked']:.3f}", "0.5"),
        ("training images known by heart", f"{found['memorised']:,}", f"{0.01 * known['members']:.0f}"),
        (
            f"canaries: ε is at least (95 %, δ = {canaries['delta']:g})",
            f"{canaries['epsilon']:.2f}, {canaries['correct']} of {canaries['guesses']} guesses right",
            "0, half of them",
        ),
    ]
    if inverted is not None:
        out += [
            (
                f"inverted images nearer to a training image, of {inverted['images']}",
                f"{inverted['closer_to_training']:.0%}",
                f"{inverted['closer_by_chance'][0]:.0%} to {inverted['closer_by_chance'][1]:.0%}",
            ),
            ("training images nearer to an inverted one than held-out images, AUC", _interval(inverted["auc"]), "0.5"),
            (
                "median distance of an inverted image to the nearest, training / held out",
                f"{inverted['nearest_training']:.3f} / {inverted['nearest_held_out']:.3f}",
                "equal",
            ),
            ("inverted images that the network recognises", f"{inverted['recognised']:.0%}", ""),
        ]
    return out


def _feature_rows(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    copies, attack = found["copies"], found["attack"] or {}
    out = [
        (
            "synthetic tokens with cosine over 0.999 to a real one",
            str(copies["above_0.999"]),
            f"{copies['strangers_above_0.999']} for other people",
        )
    ]
    for name, title in (("synthetic", "rebuilt from the upload"), ("others", "rebuilt from other people")):
        if attack.get(name):
            out.append((f"SSIM of the best image {title}", f"{attack[name]['ssim']:.3f}", ""))
    return out


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['value']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def _percent(value: Mapping[str, float] | None) -> str:
    if value is None:
        return "too few held-out images"
    return f"{value['value']:.1%} ({value['low']:.1%} to {value['high']:.1%})"


def _roc(found: Mapping[str, Any]) -> str:
    """Both attacks' curves and the diagonal of guessing."""
    if found["kind"] != "network":
        return ""
    size, left, top = 240.0, 44.0, 12.0

    def path(points: Sequence[Sequence[float]]) -> str:
        return " ".join(f"{svg.coordinate(left + size * x)},{svg.coordinate(top + size * (1 - y))}" for x, y in points)

    parts = [
        svg.rect(left, top, size, size, "frame"),
        svg.tag("polyline", points=path([(0, 0), (1, 1)]), class_="guess"),
    ]
    for name, title in (("confidence", "by confidence alone"), ("likelihood_ratio", "with shadow networks")):
        curve = found["membership"][name]["roc"]
        parts.append(svg.tag("polyline", points=path(curve), class_=name.replace("_", "-"), tip=title))
    parts += [
        svg.text(left + size / 2, top + size + 32, "controls taken for members", anchor="middle"),
        svg.text(left, top + size + 16, "0", anchor="middle"),
        svg.text(left + size, top + size + 16, "1", anchor="middle"),
        svg.text(left - 8, top + size, "0", anchor="end"),
        svg.text(left - 8, top + 10, "1", anchor="end"),
        svg.text(left + 8, top + 16, "members found"),
    ]
    return svg.tag("svg", "".join(parts), viewBox="0 0 300 300", width="300", height="300", role="img")
