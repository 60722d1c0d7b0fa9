"""Ed25519 keys: one private file per site, one line of text to give to others."""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from fedbicross.atomic import open_itself
from fedbicross.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PREFIX = "ed25519:"
MAX_KEY_FILE = 4096
POSIX = os.name == "posix"  # elsewhere a file has the rights of its folder, and its mode says nothing of them

# Points of order 1, 2, 4 and 8 (sign bit cleared): under such a "public key" almost any signature can be made to
# fit. All zeros, the placeholder somebody forgets in a file, is one of them.
_WEAK = frozenset(
    bytes.fromhex(text)
    for text in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)


def generate_key() -> Ed25519PrivateKey:
    """A new private key from the operating system's randomness."""
    return Ed25519PrivateKey.generate()


def save_private_key(path: str | Path, key: Ed25519PrivateKey) -> None:
    """Write a new key file (PEM, PKCS 8)."""
    write_private(Path(path), key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def write_private(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; an existing file is never touched."""
    try:
        handle = open_itself(path, "WRONLY", "CREAT", "EXCL")
    except FileExistsError:
        raise ConfigError("key_exists", f"{path} exists; a key is never overwritten: choose another name") from None
    except OSError as error:
        raise ConfigError("key_write", f"cannot create {path}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            if POSIX:
                os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise ConfigError("key_write", f"cannot write {path}: {error.strerror}") from None


def load_private_key(path: str | Path) -> Ed25519PrivateKey:
    """Read a private key; a file that others can read, a link or anything but an Ed25519 key is refused."""
    pem = _read_private(Path(path))
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # their texts are not repeated: they may quote the file
        raise ConfigError("key_file", f"{path} holds no readable private key without a password") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError("key_file", f"{path} holds a key of another kind; make one with `fedbicross client keygen`")
    return key


def public_text(key: Ed25519PrivateKey | Ed25519PublicKey) -> str:
    """The public half in one line, as it stands in ``federation.toml``."""
    return PREFIX + base64.b64encode(_raw_public(key)).decode()


def parse_public(text: str) -> Ed25519PublicKey:
    """Read ``public_text`` back; one key has exactly one text, and weak points are refused."""
    raw = b""
    if isinstance(text, str) and text.startswith(PREFIX):
        with contextlib.suppress(binascii.Error, ValueError):
            raw = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    if len(raw) != 32 or PREFIX + base64.b64encode(raw).decode() != text:
        # Not quoted: somebody may have put the private key in the public one's place.
        raise ConfigError("bad_key", f"not a public key: expected one line, {PREFIX!r} and 44 characters")
    if raw[:31] + bytes([raw[31] & 0x7F]) in _WEAK:
        raise ConfigError("weak_key", f"{text} is a placeholder or a weak key under which anyone could sign")
    return Ed25519PublicKey.from_public_bytes(raw)


def fingerprint(public: Ed25519PublicKey | Ed25519PrivateKey | str) -> str:
    """Short hex of the SHA-256 of the public key, for two people to compare on the telephone."""
    key = parse_public(public) if isinstance(public, str) else public
    digest = hashlib.sha256(_raw_public(key)).hexdigest()[:16]
    return "-".join(digest[i : i + 4] for i in range(0, 16, 4))


def _raw_public(key: Ed25519PrivateKey | Ed25519PublicKey) -> bytes:
    public = key.public_key() if isinstance(key, Ed25519PrivateKey) else key
    return public.public_bytes_raw()


def _read_private(path: Path) -> bytes:
    try:
        handle = open_itself(path, "RDONLY")
    except OSError as error:
        hint = "it is a link" if error.errno in (errno.ELOOP, errno.EMLINK) else error.strerror
        raise ConfigError("key_file", f"cannot read the key {path}: {hint}") from None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_KEY_FILE:
            raise ConfigError("key_file", f"{path} is not a key file")
        content = os.read(handle, MAX_KEY_FILE)
        if content.startswith(PREFIX.encode()):
            raise ConfigError("key_file", f"{path} is a public key; the private one is needed here")
        if POSIX and found.st_mode & 0o077:
            raise ConfigError("key_permissions", f"{path} can be read by others: chmod 600 it, or make a new key")
        return content
    finally:
        os.close(handle)
