"""Who made a bundle: an Ed25519 signature over its manifest, which holds the SHA-256 of every tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidSignature

from fedbicross.bundle import keys
from fedbicross.bundle.format import Header, check_digests, inspect, with_metadata
from fedbicross.bundle.limits import OWN
from fedbicross.errors import ConfigError, UploadError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# A signature made for any other purpose with the same key must not fit a bundle.
_DOMAIN = b"fedbicross bundle signature, version 1\0"
_SIGNATURE = re.compile(r"[0-9a-f]{128}", re.ASCII)


def sign(data: bytes, key: Ed25519PrivateKey) -> bytes:
    """The same bundle with the signer's public key and signature in its metadata. Same key and data, same bytes."""
    header = inspect(data, OWN)
    check_digests(data, header)
    signer = keys.public_text(key)
    return with_metadata(data, header, signer, key.sign(_message(signer, header.text)).hex())


def check_signer(header: Header, allowed: Mapping[str, str]) -> str:
    """The name of the signer: who must be among ``allowed`` (name to public key) and, for an upload, its sender.

    With the digests of the tensors (`format.check_digests`) no byte can be other than the signer wrote it.
    """
    names = _by_key(allowed)
    if header.signer is None or header.signature is None:
        raise UploadError("unsigned", "the bundle carries no signature: sign it with the site's key")
    if header.signer not in names:
        raise UploadError("unknown_key", f"signed with a key that is not on the list: {header.signer[:64]!r}")
    name = names[header.signer]
    if not _SIGNATURE.fullmatch(header.signature):
        raise UploadError("signature", "the signature is not 128 hexadecimal digits")
    try:
        message = _message(header.signer, header.text)
        keys.parse_public(header.signer).verify(bytes.fromhex(header.signature), message)
    except InvalidSignature:
        raise UploadError("signature", f"the signature does not fit: not what {name!r} signed") from None
    if header.kind == "upload" and header.manifest.get("client") != name:
        raise UploadError("name_key_mismatch", f"signed by {name!r} but in the name of another client")
    return name


def _by_key(allowed: Mapping[str, str]) -> dict[str, str]:
    """Public key to name; a key under two names would let one site speak for another."""
    names: dict[str, str] = {}
    for name, text in allowed.items():
        keys.parse_public(text)
        if text in names:
            raise ConfigError("key_twice", f"{names[text]!r} and {name!r} are listed with the same key")
        names[text] = name
    return names


def _message(signer: str, text: str) -> bytes:
    return _DOMAIN + signer.encode() + b"\0" + text.encode()
